"""What a person sees of an evaluation under way."""

import io

import pytest
from rich.console import Console

from atas.cli import _watch
from atas.evaluation import Status

STATUS = Status("autoattack", "apgd-t", 4812, 10000, 0.25, 75.0)


@pytest.fixture
def screen():
    return io.StringIO()


def test_a_terminal_shows_what_is_done_and_the_time_left(screen):
    console = Console(file=screen, force_terminal=True, width=120)
    with _watch.Watch(console=console) as watch:
        watch(STATUS)
        watch(Status("", "", 0, 0, 0.0, None, "warning: the model is strange"))
    shown = screen.getvalue()
    for part in (
        "autoattack: apgd-t",
        "25%",
        "4,812 of 10,000 hold, at most 1:15 left",
        "warning: the model is strange",
    ):
        assert part in shown
    assert watch.said == {"warning: the model is strange"}


def test_a_pipe_gets_a_line_now_and_then(screen, monkeypatch):
    with _watch.Watch(console=Console(file=screen, width=40)) as watch:
        watch(STATUS)
        assert screen.getvalue() == ""
        monkeypatch.setattr(_watch, "_PLAIN_EVERY", 0.0)
        watch(STATUS)
        watch(Status("clean", "clean", 10, 10, 0.0, None))
    assert screen.getvalue().splitlines() == [
        "autoattack: apgd-t  25%  4,812 of 10,000 hold, at most 1:15 left",
        "clean  0%  10 of 10 hold",
    ]


def test_a_pipe_gets_sentences_at_once_and_warnings_with_the_result(screen):
    with _watch.Watch(console=Console(file=screen)) as watch:
        for note in ("warning: the model is strange", "going on from there"):
            watch(Status("", "", 0, 0, 0.0, None, note))
    assert screen.getvalue() == "going on from there\n"
    assert watch.said == {"going on from there"}
