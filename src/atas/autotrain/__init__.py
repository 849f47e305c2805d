"""One call from data to a robust model: settings from the data's size and the time, training, evaluation, verdict."""

from __future__ import annotations

from atas.autotrain.job import robustify
from atas.autotrain.result import AutoTrainResult

__all__ = ["AutoTrainResult", "robustify"]
