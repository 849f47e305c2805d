"""Load a user's own object, named as `package.module:name`, and say where its code failed."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from atas.errors import AtasError, UsageError


def create_from_factory(name: str, num_classes: int, channels: int) -> nn.Module:
    """Import and call the factory; what the user's own code raises there is told in a sentence, with its place."""
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
        except Exception as error:  # it runs code of the user's, which may raise anything
            raise UsageError(
                f"'{module_name}' for the model '{name}' cannot be imported: {_describe_error(error)}."
            ) from error
        function = getattr(module, function_name, None)
        if not callable(function):
            raise UsageError(
                f"module '{module_name}' has no function '{function_name}'; "
                "define it there or correct the model's name."
            )
        try:
            # Binding first tells a wrong signature from a TypeError in the body.
            inspect.signature(function).bind(num_classes=num_classes, channels=channels)
        except TypeError as error:
            raise UsageError(
                f"'{name}' cannot be called with the keyword arguments num_classes and channels ({error}); "
                "let it take exactly these two, or give the others defaults."
            ) from error
        try:
            model = function(num_classes=num_classes, channels=channels)
        except AtasError:
            raise
        except Exception as error:  # as above
            raise UsageError(f"'{name}' failed to make a model: {_describe_error(error)}.") from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"'{name}' returned {type(model).__name__}; let it return a torch.nn.Module.")
    return model


def _describe_error(error: Exception) -> str:
    """What was raised and where: the innermost line below the current folder, or else the innermost one at all."""
    text = str(error).splitlines()
    said = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    if isinstance(error, SyntaxError):  # it says where itself
        return f"{said}; mend it"
    frames = traceback.extract_tb(error.__traceback__)
    here = [
        frame for frame in frames if Path(frame.filename).is_relative_to(Path.cwd()) and _is_user_code(frame.filename)
    ]
    last = (here or frames)[-1]
    return f"{said} (file {last.filename}, line {last.lineno}); mend it there"


def _is_user_code(file: str) -> bool:
    return "site-packages" not in Path(file).parts


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
