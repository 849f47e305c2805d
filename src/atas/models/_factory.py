"""The user's own models, named as `package.module:function`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from atas.errors import UsageError


def call_factory(name: str, num_classes: int, channels: int) -> nn.Module:
    """Import and call the factory; what the user's own code raises in it passes through as it is."""
    module_name, _, function_name = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), function_name]):
        raise UsageError(f"'{name}' does not name a model; write your own one as package.module:function.")
    with _current_directory_importable():
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise UsageError(
                f"cannot import '{module_name}' for the model '{name}' ({error}); "
                "install what is missing, or run from the folder that holds it."
            ) from error
        function = getattr(module, function_name, None)
        if not callable(function):
            raise UsageError(
                f"module '{module_name}' has no function '{function_name}'; "
                "define it there or correct the model's name."
            )
        try:
            # Binding first tells a wrong signature from a TypeError in the body, which is the user's to see.
            inspect.signature(function).bind(num_classes=num_classes, channels=channels)
        except TypeError as error:
            raise UsageError(
                f"'{name}' cannot be called with the keyword arguments num_classes and channels ({error}); "
                "let it take exactly these two, or give the others defaults."
            ) from error
        model = function(num_classes=num_classes, channels=channels)
    if not isinstance(model, nn.Module):
        raise UsageError(f"'{name}' returned {type(model).__name__}; let it return a torch.nn.Module.")
    return model


@contextmanager
def _current_directory_importable() -> Iterator[None]:
    """As under `python -m`; an installed command does not have the current directory on its path."""
    directory = os.getcwd()
    sys.path.insert(0, directory)
    # A module written a moment ago is not yet in the import system's directory listings.
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(directory)
