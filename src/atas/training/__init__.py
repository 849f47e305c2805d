"""Training: recipes, the trainer, and runs."""

from __future__ import annotations

from atas.training._train import train
from atas.training.live import Live
from atas.training.loggers import Logger
from atas.training.recipe import Recipe
from atas.training.run import Run

__all__ = ["Live", "Logger", "Recipe", "Run", "train"]
