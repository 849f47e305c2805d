"""Mark tables for small screens: wide ones with sentences are stacked there, each row as a block; others scroll."""

from __future__ import annotations

import html
import re

_TABLE = re.compile(r"<table>(.*?)</table>", re.DOTALL)
_HEADING = re.compile(r"<th(?: [^>]*)?>(.*?)</th>", re.DOTALL)
_ROW = re.compile(r"<tr>(.*?)</tr>", re.DOTALL)
_CELL = re.compile(r"<td([^>]*)>(.*?)</td>", re.DOTALL)
_LONGEST = 40  # characters of a cell that still reads well in a narrow column


def mark_tables(content: str) -> str:
    """Give the cells of such tables the name of their column, which the style sheet shows when rows are stacked.

    >>> mark_tables("<table><tr><th>a</th></tr><tr><td>1</td></tr></table>")
    '<table><tr><th>a</th></tr><tr><td>1</td></tr></table>'
    """
    return _TABLE.sub(_mark, content)


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


def text_of(markup: str) -> str:
    """Return HTML without its tags.

    >>> text_of("<code>a</code> &lt; b")
    'a < b'
    """
    return html.unescape(re.sub(r"<[^>]*>", "", markup)).strip()
