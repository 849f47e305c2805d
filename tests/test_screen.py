"""What all live views share."""

import doctest
import io

from rich.console import Console

from atas import _screen


def test_examples_in_docstrings_run():
    result = doctest.testmod(_screen)
    assert (result.failed, result.attempted) == (0, 1)


def test_there_is_a_bar_in_a_terminal_alone():
    assert _screen.bar(Console(file=io.StringIO())) is None
    assert _screen.bar(Console(file=io.StringIO(), force_terminal=True)) is not None
