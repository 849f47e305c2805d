"""Models outside of this library: files that other programs read, each with a card that says what the model is.

>>> write("runs/mine", "onnx").check  # doctest: +SKIP
"""

from __future__ import annotations

from atas.export.registry import FORMATS, Exported, write
from atas.export.safetensors import load

__all__ = ["FORMATS", "Exported", "load", "write"]
