"""`atas report`: where the page goes, what is said, and how it fails."""

import pytest


@pytest.mark.slow
def test_one_run_goes_into_its_folder(command, copy_of):
    folder = copy_of()
    result = command("report", folder)
    assert result.status == 0, result
    assert result.out == f"report: {folder / 'report.html'}\n"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_several_runs_go_where_one_is(command, copy_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, two = copy_of("one"), copy_of("two")
    assert command("report", one, two).out == "report: report.html\n"
    assert "2 runs compared" in (tmp_path / "report.html").read_text()
    assert command("report", one, two, "--out", "new/page.html").status == 0
    assert (tmp_path / "new" / "page.html").exists()


def test_an_unfinished_run(command, unfinished):
    assert command("report", unfinished).status == 0
    assert "The run has not been evaluated" in (unfinished / "report.html").read_text()


def test_report_of_damaged_runs_is_refused(command, copy_of, tmp_path):
    command("report", tmp_path).sentence("is not the folder of a run", "atas train", status=1)
    folder = copy_of()
    (folder / "evaluation.json").write_text("[]")
    command("report", folder).sentence("evaluation.json", "damaged", "evaluate again", status=1)
    (folder / "evaluation.json").unlink()
    (folder / "training_examples.safetensors").write_text("[]")
    command("report", folder).sentence("training_examples.safetensors", "damaged", "train --resume", status=1)
    (folder / "metrics.jsonl").write_text("")
    command("report", folder).sentence("no finished epoch", status=1)
    assert not (folder / "report.html").exists()


@pytest.mark.usefixtures("no_forward_pass")
def test_where_no_page_can_be(command, copy_of, contents, monkeypatch):
    folder = copy_of()
    before = contents(folder)
    monkeypatch.chdir(folder)
    for out, why in ((".", "is a folder"), ("", "is a folder"), ("model.safetensors", "ends in .html")):
        command("report", folder, "--out", out).sentence("--out names a file", why, status=2)
    command("report", folder, "--out", "/proc/page.html").sentence("(/proc/page.html)", status=1)
    assert contents(folder) == before


def test_options_of_earlier_versions_are_no_options(command, copy_of):
    """A page needs neither data nor code."""
    for option in (["--data", "elsewhere"], ["--trust"]):
        assert command("report", copy_of(option[0].strip("-")), *option).status == 2


def test_no_run_is_wrong_use(command):
    assert command("report").status == 2


def test_help_has_an_example(command):
    result = command("report", "--help")
    assert "atas report runs/" in result.out
