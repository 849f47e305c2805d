"""Images for tests."""

import numpy as np
from PIL import Image


def noise_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return grey noise as an RGB image, the same for the same seed; Pillow's own noise has no seed."""
    noise = np.random.default_rng(seed).normal(128, 60, (height, width)).clip(0, 255).astype(np.uint8)
    return Image.fromarray(noise).convert("RGB")
