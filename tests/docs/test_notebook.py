"""The notebook `examples/story.ipynb`: its cells run, its outputs are those of its code, and its links have targets."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "story.ipynb"
TEXT = NOTEBOOK.read_text(encoding="utf-8")
SMALL = {
    "EPOCHS = 40": "EPOCHS = 2",
    "IMAGES = 100": "IMAGES = 10",
}  # settings of the first cell, and those of the test


@pytest.fixture
def book():
    return json.loads(TEXT)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("notebook_script", ROOT / "scripts" / "notebook.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pictures(monkeypatch):
    """The number of figures at each call of `plt.show`."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot

    shown = []

    def show():
        shown.append(len(pyplot.get_fignums()))
        pyplot.close("all")

    monkeypatch.setattr(pyplot, "show", show)
    with matplotlib.rc_context():
        yield shown
    pyplot.close("all")


def run(sources):
    """Run cells in one namespace; a traceback names the cell."""
    namespace = {"__name__": "__main__"}
    for name, source in sources.items():
        exec(compile(source, f"story.ipynb, cell {name}", "exec"), namespace)
    return namespace


def outputs(book, kind):
    return [output for cell in book["cells"] for output in cell.get("outputs", []) if output["output_type"] == kind]


@pytest.mark.slow
def test_the_cells_run(book, script, pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sources = {cell["id"]: "".join(cell["source"]) for cell in script.code_cells(book)}
    for setting, small in SMALL.items():
        assert sources["settings"].count(setting) == 1
        sources["settings"] = sources["settings"].replace(setting, small)
    found = run(sources)
    assert pictures == [1] * len(outputs(book, "display_data"))
    assert {path.name for path in (tmp_path / "runs" / "story").iterdir()} == {"standard", "fgsm", "atas-plus"}
    assert found["results"]["atas-plus"].n == 10
    table = capsys.readouterr().out.partition("10 test images: accuracy in %")[2]
    assert [line.split()[0] for line in table.splitlines()[1:5]] == ["training", "standard", "fgsm,", "atas-plus"]


def test_a_cell_that_raises_is_noticed():
    with pytest.raises(ZeroDivisionError) as failure:
        run({"one": "x = 1\n", "two": "\nx / 0\n"})
    assert (failure.traceback[-1].path, failure.traceback[-1].lineno + 1) == ("story.ipynb, cell two", 2)


def test_the_stored_outputs_are_those_of_the_code(book, script):
    assert script.is_current(book), "the code was changed and not run: python scripts/notebook.py"
    assert [cell["execution_count"] for cell in script.code_cells(book)] == [
        *range(1, len(script.code_cells(book)) + 1)
    ]
    assert not outputs(book, "error")
    assert not [output for output in outputs(book, "stream") if output["name"] == "stderr"]
    images = [output["data"]["image/png"] for output in outputs(book, "display_data")]
    assert len(images) >= 6
    assert all(image.startswith("iVBORw0KGgo") for image in images)  # the signature of PNG in base64


def test_the_stored_outputs_tell_the_story(book):
    shown = "".join(line for output in outputs(book, "stream") for line in output["text"])
    assert "Catastrophic overfitting in epoch" in shown
    rows = dict(re.findall(r"^(standard|fgsm, 2 eps|atas-plus) .* (\d+) \(\d+ to \d+\)$", shown, re.MULTILINE))
    robust = {name: int(percent) for name, percent in rows.items()}  # under AutoAttack
    assert max(robust["standard"], robust["fgsm, 2 eps"]) < 10
    assert robust["atas-plus"] > 50


def test_a_change_of_the_code_is_noticed(book, script):
    cell = script.code_cells(book)[-1]
    cell["source"] = [*cell["source"], "\npass"]
    assert not script.is_current(book)


def test_the_file_is_small_and_of_no_machine(book, script, tmp_path):
    assert len(TEXT) < 400_000
    without_pictures = re.sub(r'"image/png": ".*"', "", TEXT)
    assert not re.search(r"/home|/root|/tmp|/Users|/usr|/opt|\b[A-Z]:\\", without_pictures)
    script.write(script.normalize(book), tmp_path / "again.ipynb")
    assert (tmp_path / "again.ipynb").read_text(encoding="utf-8") == TEXT


def test_times_and_metadata_are_left_out(script, tmp_path):
    progress = {"output_type": "display_data", "data": {"text/plain": [""]}, "metadata": {}}
    picture = {"output_type": "display_data", "data": {"image/png": "iV"}, "metadata": {"image/png": {"width": 1}}}
    code = {"cell_type": "code", "id": "a", "source": ["x"], "execution_count": 1, "outputs": [progress, picture]}
    code["metadata"] = {"execution": {"iopub.status.busy": "2024-01-01"}}
    text = {"cell_type": "markdown", "id": "b", "source": ["y"], "metadata": {"tags": ["z"]}}
    kept = script.normalize({"cells": [code, text], "metadata": {"language_info": {"version": "3.11.7"}}})
    assert kept["cells"][0]["outputs"] == [picture | {"metadata": {}}]
    assert [cell["metadata"] for cell in kept["cells"]] == [{}, {}]
    assert "version" not in kept["metadata"]["language_info"]
    assert script.is_current(kept)


def test_links_lead_to_files_and_headings(book):
    text = "".join("".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", text)
    assert len(links) >= 5
    for target, anchor in links:
        path = NOTEBOOK.parent / target
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {heading.lower().replace(" ", "-") for heading in headings}
