"""What terminals and shells expect: NO_COLOR, and completion."""

import io
import json
import re
from contextlib import redirect_stdout

import pytest

from atas.cli import app
from atas.training import recipe

COLOUR = re.compile(r"\x1b\[[0-9;]*\b(3[0-8]|4[0-8]|9[0-7]|10[0-7])[0-9;]*m")
FAILS = ["train", "digits-small-cnn-atass"]


@pytest.fixture
def in_colour(monkeypatch):
    """As in a terminal that shows colours."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_there_is_colour_where_it_is_wanted(command, in_colour):
    """Without this, the tests below could pass for the wrong reason."""
    assert COLOUR.search(command(*FAILS).err)


@pytest.mark.parametrize("arguments", [FAILS, ["ls", "attacks"], ["reproduce", "--list"], ["--help"]], ids=" ".join)
def test_no_color_is_respected(arguments, command, in_colour, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    result = command(*arguments)
    assert result.out + result.err
    assert not COLOUR.search(result.out + result.err)


def test_no_color_in_the_progress_of_a_training(tiny, tmp_path, command, in_colour, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    result = command("train", tiny, "--out", tmp_path / "run", "--evaluate")
    assert result.status == 0
    assert not COLOUR.search(result.out + result.err)


@pytest.fixture(params=[60, 80])
def narrow(request, in_colour, monkeypatch):
    """As in a terminal of so many columns; what it shows is given back without styles."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(request.param))
    return lambda text: re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_narrow_terminal_shows_whole_names_of_recipes(narrow, command):
    lines = [line.split()[0] for line in narrow(command("ls", "recipes").out).splitlines() if line.strip()]
    assert lines[2:] == recipe.names()


@pytest.mark.parametrize("listed", [["ls", "methods"], ["reproduce", "--list"], ["ls", "attacks"]], ids=" ".join)
def test_a_list_fits_the_usual_terminal_and_nothing_is_cut(listed, narrow, command):
    shown = narrow(command(*listed).out)
    assert "…" not in shown
    for row in json.loads(command(*listed, "--json").out):
        assert next(iter(row.values())) in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_no_figure_is_cut_in_a_narrow_terminal(narrow, copy_of, command):
    folder = copy_of("a-name-that-is-not-short")
    shown = narrow(command("evaluate", folder, "--examples", "40").out)
    evaluation = json.loads((folder / "evaluation.json").read_text())
    for low, high in evaluation["interval"].values():
        assert f"{100 * low:.2f}%" in shown
        assert f"{100 * high:.2f}%" in shown
    compared = narrow(command("compare", folder).out)
    assert "…" not in shown + compared
    for part in ("a-name-that-is-not-short", f"{100 * evaluation['accuracy']['fgsm']:.1f}", "collapse"):
        assert part in compared


@pytest.fixture
def complete(monkeypatch):
    """What a bash would be offered for the last of these words."""

    def offers(*words):
        monkeypatch.setenv("_ATAS_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", " ".join(words))
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        out = io.StringIO()
        with redirect_stdout(out), pytest.raises(SystemExit):
            app(prog_name="atas")
        return out.getvalue().split()

    return offers


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["atas", "ex"], ["export"]),
        (["atas", "export", "--to", "o"], ["onnx"]),
        (["atas", "train", "digits-small-cnn-ata"], ["digits-small-cnn-atas", "digits-small-cnn-atas-literal"]),
        (["atas", "reproduce", "table-cifar100"], ["table-cifar100"]),
    ],
    ids=str,
)
def test_the_shell_completes(words, offered, complete):
    assert complete(*words) == offered


def test_the_command_installs_completion(command):
    assert "--install-completion" in command("--help").out


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_terminal_says_that_torch_is_being_loaded(rank, tmp_path, command, in_colour, monkeypatch):
    """And the first process alone: it is the same for all."""
    monkeypatch.setenv("RANK", rank)
    shown = command("evaluate", tmp_path / "nowhere").err
    assert ("loading PyTorch" in shown) == (rank == "0")


def test_a_pipe_is_not_told(tmp_path, command):
    assert "loading" not in command("evaluate", tmp_path / "nowhere").err
