"""Load a user's own object, named as `package.module:name`, and say where its code failed.

Importing runs code. A name that the user gave in this command or call is trusted; a name that a file holds is trusted
only if the user said so (`--trust`, `trust=True`). `import_object` is the only place that imports by name.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atas.errors import UsageError

GIVEN = "given:"  # prefix of the name of a model or data set that was passed in Python
TIMM = "timm:"  # prefix of networks that timm, an optional package, builds by their names
_PACKAGE = Path(__file__).parents[1]


def is_code(name: str) -> bool:
    """Return whether a name is that of a user's own object, as `package.module:name`."""
    return ":" in name and not is_timm(name)


def is_timm(name: str) -> bool:
    """Return whether a name is that of a network of timm, as `timm:resnet50`; no other code is imported for it."""
    return name.startswith(TIMM)


def import_object(name: str, kind: str, what: str, *, trusted: bool) -> Any:
    """Import the object `package.module:name`; modules in the current directory are found too.

    `kind` ("model", "method") and `what` ("function", "class") are words for messages. Raises UsageError if the name is
    not `trusted`.
    """
    if not trusted:
        raise UsageError(
            f"the {kind} {name} is not loaded: it is code, which would be run; if you trust it, pass --trust (in "
            f"Python, trust=True)"
        )
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise UsageError(f"'{name}' does not name a {kind}; write your own one as package.module:{what}.")
    with current_directory_importable():
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise UsageError(
                f"cannot import '{module_name}' for the {kind} '{name}' ({error}); "
                "install what is missing, or run from the folder that holds it."
            ) from error
        except (Exception, SystemExit) as error:  # the user's code may raise anything; a script may end the program
            raise UsageError(
                f"'{module_name}' for the {kind} '{name}' cannot be imported: {describe_error(error)}."
            ) from error
    imported = getattr(module, attribute, None)
    if not callable(imported):
        raise UsageError(
            f"module '{module_name}' has no {what} '{attribute}'; define it there or correct the {kind}'s name."
        )
    return imported


def describe_error(error: BaseException) -> str:
    """Return error type, message, file and line: the innermost line of the user's code, or the innermost one at all."""
    text = str(error).splitlines()
    summary = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    if isinstance(error, SyntaxError):  # its message names the line
        return f"{summary}; fix it"
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame for frame in frames if Path(frame.filename).is_relative_to(Path.cwd()) and _is_user_code(frame.filename)
    ]
    others = [frame for frame in frames if not Path(frame.filename).is_relative_to(_PACKAGE)]
    if not others:  # a function without Python code
        return f"{summary}; correct its arguments or wrap it in a function"
    last = (own or others)[-1]
    return f"{summary} (file {last.filename}, line {last.lineno}); fix it there"


def _is_user_code(file: str) -> bool:
    return "site-packages" not in Path(file).parts


@contextmanager
def current_directory_importable() -> Iterator[None]:
    """Put the current directory on the import path, as `python -m` does; an installed command does not have it."""
    directory = os.getcwd()
    sys.path.insert(0, directory)
    # A module written a moment ago is not yet in the import system's directory listings.
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(directory)
