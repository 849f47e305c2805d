"""`atas compare`."""

import io
import json
import sys

import pytest

from atas import cli


@pytest.fixture
def runs(copy_of, evaluated_copy):
    """Two runs, the first of them evaluated."""
    return [evaluated_copy("first"), copy_of("second")]


def test_a_table(runs, command):
    result = command("compare", *runs)
    assert result.status == 0, result.err
    for word in ("first", "second", "atas", "clean", "fgsm", "Linf(0.1)", "not evaluated"):
        assert word in result.out


def test_json(runs, command):
    rows = json.loads(command("compare", *runs, "--json").out)
    assert [row["run"] for row in rows] == ["first", "second"]
    assert rows[0]["accuracy"].keys() == {"clean", "fgsm", "worst"}
    assert rows[0]["n"] == 40
    low, high = rows[0]["interval"]["clean"]
    assert low <= rows[0]["accuracy"]["clean"] <= high
    assert rows[1]["accuracy"] is None
    assert [row["collapsed_in_epoch"] for row in rows] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "magic"), [("curves.png", b"\x89PNG"), ("curves.svg", b"<?xml"), ("c.pdf", b"%PDF")])
def test_a_plot(name, magic, runs, command, tmp_path):
    result = command("compare", *runs, "--plot", tmp_path / "plots" / name)
    assert result.status == 0, result.err
    content = (tmp_path / "plots" / name).read_bytes()
    assert content.startswith(magic)
    assert len(content) > 5_000
    assert [path.name for path in (tmp_path / "plots").iterdir()] == [name]


@pytest.mark.slow
def test_the_path_of_the_plot_is_in_one_piece(runs, command, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / ("a-long-name-" * 8) / "curves.png"
    assert command("compare", *runs, "--plot", path).out.splitlines()[-1] == f"curves: {path}"


def test_a_plot_of_a_kind_that_there_is_not(runs, command, tmp_path):
    path = tmp_path / "curves.doc"
    command("compare", *runs, "--plot", path).sentence("'.doc'", "use .png, .svg or .pdf", status=2)
    assert not path.exists()


@pytest.mark.parametrize("plot", [".", ""])
def test_a_plot_is_no_folder(plot, unfinished, command):
    command("compare", unfinished, "--plot", plot).sentence("--plot names a file, and . is a folder", status=2)


def test_names_are_shown_as_they_stand(copy_of, command):
    names = ["a[s0]", "a[s1]", "a:smile:"]
    out = command("compare", *map(copy_of, names)).out
    for name in names:
        assert name in out


def test_a_letter_that_standard_output_does_not_have(copy_of, monkeypatch):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "argv", ["atas", "compare", str(copy_of("é"))])
    monkeypatch.setattr(sys, "stdout", shown)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    assert b"|?   |atas" in shown.buffer.getvalue()


def test_without_matplotlib(runs, command, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    result = command("compare", *runs, "--plot", tmp_path / "curves.png")
    result.sentence("plots need matplotlib; install it with: pip install 'atas[plots]'", status=2)
    assert command("compare", *runs).status == 0


def test_not_the_folder_of_a_run(runs, command, tmp_path):
    command("compare", runs[0], tmp_path / "none").sentence("none is not the folder of a run", status=1)


def test_a_run_without_an_epoch(unfinished, command):
    (unfinished / "metrics.jsonl").write_text("")
    command("compare", unfinished).sentence("has no finished epoch", status=1)


def test_an_unfinished_run_can_be_compared(unfinished, command):
    assert command("compare", unfinished).status == 0


def test_a_damaged_result_file(runs, command):
    (runs[0] / "evaluation.json").write_text("{")
    command("compare", *runs).sentence("evaluation.json", "evaluate again", status=1)


def test_a_plot_where_nothing_can_be_written(runs, command, tmp_path):
    (tmp_path / "file").write_text("")
    result = command("compare", *runs, "--plot", tmp_path / "file" / "curves.png")
    assert result.status == 1
    result.sentence(status=1)
