"""Training: from a recipe to a finished run."""

from __future__ import annotations

from atas import recipes as recipe
from atas.recipes import Recipe
from atas.training.callbacks import Callback, Logger
from atas.training.job import train
from atas.training.monitor import Monitor, MonitorEvent, MonitorStatus, ProbeResult
from atas.training.progress import TrainingProgress
from atas.training.progress import TrainingProgress as Live
from atas.training.run import Run

__all__ = [
    "Callback",
    "Live",
    "Logger",
    "Monitor",
    "MonitorEvent",
    "MonitorStatus",
    "ProbeResult",
    "Recipe",
    "Run",
    "TrainingProgress",
    "recipe",
    "train",
]
