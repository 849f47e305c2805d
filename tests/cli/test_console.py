"""What is printed: lines and tables, progress displays, and what terminals and shells expect."""

import io
import json
import re
import sys
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.table import Table

from atas import recipes
from atas._utils.console import DataProgress, ProgressDisplay, print_json, print_line, print_table
from atas.cli import app
from atas.errors import AtasError
from atas.evaluation import EvaluationWarning, Status
from atas.evaluation.progress import EvaluationProgress
from atas.training import TrainingProgress

# Displays


@pytest.mark.parametrize("is_terminal", [True, False])
def test_only_a_terminal_has_a_bar(is_terminal):
    display = ProgressDisplay(Console(file=io.StringIO(), force_terminal=is_terminal))
    display.add_bar()
    assert (display.bar is not None) == is_terminal


class FakeNotebook:
    """IPython's display: the last content of each output, in order."""

    def __init__(self):
        self.outputs = []

    def display(self, content, *, raw, display_id):
        assert raw
        assert display_id
        self.outputs.append(content)
        place = len(self.outputs) - 1
        return SimpleNamespace(update=lambda content, raw: self.outputs.__setitem__(place, content))


@pytest.fixture
def notebook(monkeypatch):
    """Make this process look like the kernel of a notebook."""
    fake = FakeNotebook()
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=fake))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    return fake


def test_a_notebook_has_one_line_of_progress_that_changes(notebook, capsys):
    now = [100.0]
    with DataProgress(Console(), clock=lambda: now[0]) as display:
        for done in (0, 10, 20):
            display("decoding [bold]", done, 100)
            now[0] += 10
        display.log("decoded")
        assert notebook.outputs == [{"text/plain": "decoding [bold]: 20 of 100, about 1:20 left"}]
    assert notebook.outputs == [{"text/plain": ""}]
    assert capsys.readouterr().out == "decoded\n"


def test_a_notebook_gets_plain_text(notebook, capsys):
    print_line("[bold]text")
    table = Table("name")
    table.add_row("value")
    print_table(table)
    shown = capsys.readouterr().out
    assert shown.startswith("[bold]text\n")
    assert "value" in shown
    assert "\x1b" not in shown
    assert notebook.outputs == []


def test_in_a_notebook_lines_of_short_epochs_replace_one_another(notebook, capsys):
    now = [100.0]
    with TrainingProgress(Console(), clock=lambda: now[0]) as live:
        live.start("toy", 40, 0)
        for epoch, seconds in enumerate((1, 1, 5, 1)):
            now[0] += seconds
            live.end_epoch(10 * (epoch + 1), {"epoch": epoch, "loss": 1.0}, 4)
            if epoch == 1:
                assert notebook.outputs == [{"text/plain": "epoch 2/4  loss 1.000  0:02 left"}]
    assert notebook.outputs == [{"text/plain": ""}]
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == ["epoch 3/4", "epoch 4/4"]


def test_a_display_that_writes_elsewhere_leaves_the_notebook_alone(notebook):
    for console in (Console(file=io.StringIO()), Console(quiet=True)):
        display = ProgressDisplay(console)
        display.show("work", "half", completed=0.5, total=1.0)
    assert notebook.outputs == []


@pytest.mark.slow
def test_training_in_a_real_notebook(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    values = "{'training.epochs': 2, 'training.loggers': []}"
    train = f"import atas; run = atas.train('digits-small-cnn-fgsm', out='run', values={values})"
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(train)])
    nbclient.NotebookClient(book, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = book.cells[0].outputs
    shown = "".join(output.text for output in outputs if output.output_type == "stream")
    assert [line.split(" ")[0] for line in shown.splitlines()] == ["digits-small-cnn-fgsm:", "epoch", "time:"]
    assert "epoch 2/2" in shown
    assert "\x1b" not in shown
    assert sum(output.output_type == "display_data" for output in outputs) <= 1


@pytest.mark.parametrize(("is_terminal", "interval"), [(True, 0.5), (False, 30.0)])
def test_updates_are_limited(is_terminal, interval):
    now = [100.0]
    display = ProgressDisplay(Console(file=io.StringIO(), force_terminal=is_terminal), clock=lambda: now[0])
    display.add_bar()
    now[0] += 0.9 * interval
    assert not display.due()
    now[0] += 0.1 * interval
    assert display.due()
    display.show("work", "half", completed=0.5, total=1.0)
    assert not display.due()


def test_a_download_prints_a_line_now_and_then():
    now, out = [100.0], io.StringIO()
    with DataProgress(Console(file=out), clock=lambda: now[0]) as progress:
        assert not progress.has_work
        for done in (0, 10, 40, 100):
            progress("files", done, 100)
            now[0] += 20
    assert progress.has_work
    assert out.getvalue() == "files: 40 of 100, about 1:00 left\n"


class FullStream(io.StringIO):
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
    console = Console(file=FullStream(error, method), force_terminal=True)
    display = ProgressDisplay(console)
    display.add_bar()
    with display:
        display.log("one")
        display.log("two")
    told = f"atas: cannot write output: {error.strerror}; continuing without it\n"
    assert capsys.readouterr().err == told


def test_characters_that_a_screen_cannot_show_are_replaced():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    ProgressDisplay(Console(file=stream)).log("into runs/caf\u00e9")
    assert stream.buffer.getvalue() == b"into runs/caf?\n"


@pytest.mark.parametrize(
    ("is_terminal", "wrap", "lines"),
    [
        (True, True, ["epoch 1/6  clean 21.3%", "FGSM 6.7%", "catastrophic overfitting in", "epoch 5"]),
        (True, False, ["epoch 1/6  clean 21.3%  FGSM 6.7%", "catastrophic overfitting in epoch 5"]),
        (False, True, ["epoch 1/6  clean 21.3%  FGSM 6.7%", "catastrophic overfitting in epoch 5"]),
    ],
)
def test_a_terminal_breaks_lines_between_words_or_fields(is_terminal, wrap, lines):
    stream = io.StringIO()
    display = ProgressDisplay(Console(file=stream, force_terminal=is_terminal, width=28, color_system=None))
    display.log("epoch 1/6  clean 21.3%  FGSM 6.7%", wrap=wrap)
    display.log("catastrophic overfitting in epoch 5", wrap=wrap)
    assert stream.getvalue().splitlines() == lines


def test_names_in_progress_are_shown_as_they_stand():
    stream = io.StringIO()
    ProgressDisplay(Console(file=stream)).log("runs/[bold]/:smile:")
    assert stream.getvalue() == "runs/[bold]/:smile:\n"


# Lines on standard output


@pytest.mark.parametrize("print_it", [print_line, print_json])
def test_standard_output_that_is_full_is_told_once(print_it):
    with open("/dev/full", "w") as full, redirect_stdout(full):
        with pytest.raises(AtasError, match="cannot write to standard output: No space left on device"):
            print_it("text")
        full.flush()  # as at the end of the process


@pytest.mark.parametrize("arguments", [("ls", "data", "--json"), ("ls", "data")])
def test_commands_say_it_in_the_same_words(arguments):
    with open("/dev/full", "w") as full, redirect_stdout(full):
        with pytest.raises(AtasError, match="cannot write to standard output: No space left on device"):
            app(arguments, standalone_mode=False)
        full.flush()


def test_a_line_is_shown_as_it_stands(capsys):
    print_line("runs/[bold]/:smile:")
    assert capsys.readouterr().out == "runs/[bold]/:smile:\n"


# The progress of an evaluation


WARNING = EvaluationWarning("random", "the model is strange")
STATUS = Status("autoattack", "apgd-t", 4812, 10000, 0.25, 75.0)


@pytest.fixture
def screen():
    return io.StringIO()


def test_a_terminal_shows_what_is_done_and_the_time_left(screen):
    console = Console(file=screen, force_terminal=True, width=120)
    with EvaluationProgress(console=console) as display:
        display(STATUS)
        display(Status("", "", 0, 0, 0.0, None, f"warning: {WARNING}", WARNING))
    shown = screen.getvalue()
    for part in (
        "autoattack: apgd-t",
        "25%",
        "4,812 of 10,000 correct, at most 1:15 left",
        f"warning: {WARNING}",
    ):
        assert part in shown
    assert display.shown_warnings == {WARNING}


def test_a_pipe_gets_a_line_now_and_then(screen):
    now = [0.0]
    with EvaluationProgress(console=Console(file=screen, width=40), clock=lambda: now[0]) as display:
        display(STATUS)
        assert screen.getvalue() == ""
        now[0] = 30.0
        display(STATUS)
        display(STATUS)
        now[0] = 60.0
        display(Status("clean", "clean", 10, 10, 0.0, None))
    assert screen.getvalue().splitlines() == [
        "autoattack: apgd-t  25%  4,812 of 10,000 correct, at most 1:15 left",
        "clean  0%  10 of 10 correct",
    ]


def test_a_pipe_gets_sentences_at_once_and_warnings_with_the_result(screen):
    with EvaluationProgress(console=Console(file=screen)) as display:
        display(Status("", "", 0, 0, 0.0, None, f"warning: {WARNING}", WARNING))
        display(Status("", "", 0, 0, 0.0, None, "resuming from there"))
    assert screen.getvalue() == "resuming from there\n"
    assert not display.shown_warnings


# Terminals and shells: colours, width, completion


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


@pytest.mark.slow
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

    def without_styles(text):
        return re.sub(r"\x1b\[[0-9;]*m", "", text)

    without_styles.columns = request.param
    return without_styles


@pytest.mark.slow
def test_a_narrow_terminal_shows_whole_names_of_recipes(narrow, command):
    shown = narrow(command("ls", "recipes").out)
    assert [word for word in shown.split() if word in recipes.names()] == recipes.names()
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= narrow.columns


LISTS = [["ls", what] for what in ("methods", "models", "data", "attacks")] + [["ls"], ["reproduce", "--list"]]


@pytest.mark.parametrize("listed", LISTS, ids=" ".join)
def test_a_list_fits_the_usual_terminal_and_nothing_is_cut(listed, narrow, command):
    shown = narrow(command(*listed).out)
    assert "…" not in shown
    for row in json.loads(command(*listed, "--json").out):
        assert next(iter(row.values())) in shown
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= narrow.columns


def test_a_short_text_is_not_broken_for_a_long_one(narrow, capsys):
    """Columns that need little get it first."""
    table = Table("run", "time", "note")
    table.add_row("one", "128 s", "a long note of many words " * 8)
    print_table(table)
    assert "128 s" in narrow(capsys.readouterr().out)


def test_rows_without_room_are_printed_as_blocks(narrow, capsys):
    table = Table("run", "method", "accuracy", "collapse", title="two runs", caption="*: a note")
    table.add_row(
        "a-name-of-36-characters-in-all-columns", "a-method-with-a-long-name-without-end-too", "1.0 [0.5, 2.0]", "no"
    )
    table.add_row("b", "atas", "-", "[bold]\x1b[31m")
    print_table(table)
    assert capsys.readouterr().out.splitlines() == [
        "two runs",
        "a-name-of-36-characters-in-all-columns",
        *(
            ["  method: a-method-with-a-long-name-without-end-too", "  accuracy: 1.0 [0.5, 2.0], collapse: no"]
            if narrow.columns == 60
            else ["  method: a-method-with-a-long-name-without-end-too, accuracy: 1.0 [0.5, 2.0]", "  collapse: no"]
        ),
        "b",
        r"  method: atas, collapse: [bold]\x1b[31m",
        "*: a note",
    ]


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
        (
            ["atas", "train", "digits-small-cnn-ata"],
            ["digits-small-cnn-atas", "digits-small-cnn-atas-literal", "digits-small-cnn-atas-plus"],
        ),
        (["atas", "reproduce", "table-cifar100"], ["table-cifar100"]),
        (["atas", "train", "x", "--set", "training.ep"], ["training.epochs="]),
        (["atas", "bench", "x", "--set", "method.max"], ["method.max_step="]),
        (["atas", "evaluate", "runs/x", "--attacks", "auto"], ["autoattack", "autoattack-rand"]),
        (["atas", "evaluate", "runs/x", "--attacks", "pgd10,pgd"], ["pgd10,pgd50"]),
        (["atas", "reproduce", "table-cifar10", "--attacks", "fg"], ["fgsm"]),
        (["atas", "evaluate", "runs/x", "--corruptions", "a"], ["all"]),
        (
            ["atas", "evaluate", "runs/x", "--corruptions", "jpeg,gaussian"],
            ["jpeg,gaussian-noise", "jpeg,gaussian-blur"],
        ),
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
