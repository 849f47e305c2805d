"""Export of trained models to files that other programs read, each with a model card.

>>> write("runs/mine", "onnx").check  # doctest: +SKIP
"""

from __future__ import annotations

from atas.export.registry import FORMATS, Exported, write
from atas.export.safetensors import load

__all__ = ["FORMATS", "Exported", "load", "write"]
