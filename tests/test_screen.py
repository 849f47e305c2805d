"""What all live views share."""

import io

import pytest
from rich.console import Console

from atas import _screen


def test_there_is_a_bar_in_a_terminal_alone():
    assert _screen.bar(Console(file=io.StringIO())) is None
    assert _screen.bar(Console(file=io.StringIO(), force_terminal=True)) is not None


class Failing(io.StringIO):
    """A stream that can take no more."""

    def __init__(self, error, method):
        super().__init__()
        self._error, self._method = error, method

    def write(self, text):
        if self._method == "write":
            raise self._error
        return super().write(text)

    def flush(self):
        if self._method == "flush":
            raise self._error


@pytest.mark.parametrize("method", ["write", "flush"])
@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left on device")])
def test_a_screen_that_is_lost_is_told_once_and_ends_nothing(error, method, capsys):
    console = Console(file=Failing(error, method), force_terminal=True)
    with _screen.Screen(console, _screen.bar(console)) as screen:
        screen.say("one")
        screen.say("two")
    told = f"atas: the output takes no more ({error.strerror}); going on without it\n"
    assert capsys.readouterr().err == told


def test_characters_that_a_screen_cannot_show_are_replaced():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    _screen.Screen(Console(file=stream)).say("into runs/caf\u00e9")
    assert stream.buffer.getvalue() == b"into runs/caf?\n"
