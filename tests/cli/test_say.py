"""Sentences on a screen that may take none."""

from contextlib import redirect_stdout

import pytest

from atas.cli._say import echo, say
from atas.errors import AtasError


@pytest.mark.parametrize("print_it", [say, echo])
def test_standard_output_that_is_full_is_told_once(print_it):
    with open("/dev/full", "w") as full, redirect_stdout(full):
        with pytest.raises(AtasError, match="takes nothing \\(No space left on device\\)"):
            print_it("text")
        full.flush()  # as at the end of the process


def test_a_line_is_shown_as_it_stands(capsys):
    say("runs/[bold]/:smile:")
    assert capsys.readouterr().out == "runs/[bold]/:smile:\n"
