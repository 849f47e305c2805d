"""Paths, durations and sizes as text, and text from files that is safe to print."""

from __future__ import annotations

import re
import shlex
import unicodedata
from pathlib import Path

_ACTS = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # control, format, half of a pair, private, unknown, line ends
_MARKUP = re.compile(r"[`<>|]")
_LINK = re.compile(r"[\]!]+(?=[(\[])")


def printable(text: str, *, keep: str = "") -> str:
    r"""Return one line in which characters that a terminal acts on are written as escapes, except those to `keep`.

    Names of files, classes and runs may hold any character: escape codes, line breaks, a reversed direction.

    >>> printable("a\x1b[31m\n") == r"a\x1b[31m\n", printable("Zürich 東京")
    (True, 'Zürich 東京')
    """
    if text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in _ACTS and char not in keep else char
        for char in text
    )


def markdown_text(text: object) -> str:
    r"""Return text from a file for a page of Markdown: one line, without HTML, code, links, images or table cells.

    >>> markdown_text("a <b>c</b> [d](http://e)\n# f")
    'a bc/b [d(http://e) # f'
    """
    return _LINK.sub("", _MARKUP.sub("", printable(" ".join(str(text).split()))))


def markdown_code(text: object) -> str:
    """Return text from a file as code in a page of Markdown.

    >>> markdown_code("atas train a`b")
    '`atas train ab`'
    """
    return f"`{markdown_text(text)}`"


def shell_quote(path: str | Path) -> str:
    """Quote a path for a shell command.

    >>> shell_quote("runs/first"), shell_quote("runs/my first")
    ('runs/first', "'runs/my first'")
    """
    return shlex.quote(str(path))


def format_seconds(seconds: float) -> str:
    """Format a duration with a unit.

    >>> format_seconds(29.84), format_seconds(95), format_seconds(5000)
    ('29.8 s', '1.6 min', '1.39 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.2f} h"


def format_duration(seconds: float) -> str:
    """Format a duration as a clock does.

    >>> format_duration(75), format_duration(3675)
    ('1:15', '1:01:15')
    """
    hours, minutes, seconds = int(seconds) // 3600, int(seconds) // 60 % 60, int(seconds) % 60
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def format_bytes(size: float) -> str:
    """Format a number of bytes.

    >>> format_bytes(491_520), format_bytes(252e9)
    ('492 kB', '252 GB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}" if size < 100 * unit else f"{size / unit:,.0f} {name}"
    return f"{size / 1e3:,.0f} kB"


def describe_failure(error: Exception) -> str:
    """Return what went wrong with a file that a message names already.

    >>> describe_failure(OSError(28, "No space left on device", "x")), describe_failure(ValueError("header too large"))
    ('No space left on device', 'header too large')
    """
    return getattr(error, "strerror", None) or str(error)


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error's message, or its type if it has none.

    >>> first_line(ValueError("too small\nin row 3")), first_line(KeyboardInterrupt())
    ('too small', 'KeyboardInterrupt')
    """
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
