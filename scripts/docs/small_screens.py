"""Mark what would be hard to read on a small screen; the style sheet does the rest.

Wide tables with sentences are stacked there, each row as a block; others scroll. Pictures are no larger than they were
drawn on a wide screen, and scroll on a small one where their text would shrink too far. Options such as `--set` in a
sentence are not broken at their dashes.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path

from PIL import Image

_TABLE = re.compile(r"<table>(.*?)</table>", re.DOTALL)
_HEADING = re.compile(r"<th(?: [^>]*)?>(.*?)</th>", re.DOTALL)
_ROW = re.compile(r"<tr>(.*?)</tr>", re.DOTALL)
_CELL = re.compile(r"<td([^>]*)>(.*?)</td>", re.DOTALL)
_LONGEST = 40  # characters of a cell that still reads well in a narrow column
_LONG_CODE = re.compile(r"<td([^>]*)>(<code>(?:(?!</?code>).){41,}</code></td>)")
_IMAGE = re.compile(r'<img [^>]*?src="([^"]+)"[^>]*>')
_INCH = 96  # pixels of a style sheet
_BLOCK_OR_CODE = re.compile(r"<pre.*?</pre>|<code>[^<]*</code>", re.DOTALL)
_OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")


def mark_tables(content: str) -> str:
    """Give the cells of such tables the name of their column, which the style sheet shows when rows are stacked. In all
    tables, mark the cells of long code, which may have several lines.

    >>> mark_tables("<table><tr><th>a</th></tr><tr><td>1</td></tr></table>")
    '<table><tr><th>a</th></tr><tr><td>1</td></tr></table>'
    """
    return _LONG_CODE.sub(r"<td\1 data-long>\2", _TABLE.sub(_mark, content))


def _mark(table: re.Match[str]) -> str:
    headings = [text_of(heading) for heading in _HEADING.findall(table[1])]
    cells = [text_of(cell) for _, cell in _CELL.findall(table[1])]
    if len(headings) < 3 or max(map(len, cells), default=0) <= _LONGEST:
        return table[0]

    def label(row: re.Match[str]) -> str:
        names = iter(headings)
        return _CELL.sub(
            lambda cell: f'<td{cell[1]} data-label="{html.escape(next(names, ""))}">{cell[2]}</td>', row[0]
        )

    return f"<table data-stack>{_ROW.sub(label, table[1])}</table>"


def size_images(content: str, find: Callable[[str], Path | None]) -> str:
    """Put each picture of a known file into a box that may scroll, with the width that it was drawn with."""

    def boxed(image: re.Match[str]) -> str:
        path = find(image[1])
        if path is None or path.suffix != ".png":
            return image[0]
        with Image.open(path) as opened:
            width = round(opened.width * _INCH / opened.info.get("dpi", (_INCH, _INCH))[0])
        return f'<span class="picture" style="--width: {width}px">{image[0]}</span>'

    return _IMAGE.sub(boxed, content)


def keep_options(content: str) -> str:
    """Mark the options in code within sentences, so that no line ends inside of one.

    >>> keep_options("<code>a --b-c=1</code>")
    '<code>a <span class="option">--b-c</span>=1</code>'
    """
    return _BLOCK_OR_CODE.sub(
        lambda part: (
            part[0] if part[0].startswith("<pre") else _OPTION.sub(r'<span class="option">\g<0></span>', part[0])
        ),
        content,
    )


def text_of(markup: str) -> str:
    """Return HTML without its tags.

    >>> text_of("<code>a</code> &lt; b")
    'a < b'
    """
    return html.unescape(re.sub(r"<[^>]*>", "", markup)).strip()
