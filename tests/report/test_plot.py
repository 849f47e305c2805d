"""Training curves: a panel a run, the collapse marked."""

import sys

import pytest

from atas import report
from atas.errors import UsageError

COLLAPSE = [(0.5, 0.4, 0.35), (0.7, 0.6, 0.45), (0.8, 0.9, 0.02), (0.8, 0.95, 0.0)]
MARK = "#d55e00"


@pytest.fixture
def draw(make_run, tmp_path):
    """The text of an SVG of these runs, given as keyword arguments of `make_run`; texts show up in comments."""

    def make(*runs):
        folders = [make_run(f"runs/{number}-run", **options) for number, options in enumerate(runs)]
        report.plot_curves(report.summarise(folders), tmp_path / "curves.svg")
        return (tmp_path / "curves.svg").read_text().lower()

    return make


def test_a_picture_of_several_runs(make_run, tmp_path):
    from PIL import Image

    folders = [make_run(f"runs/{method}", method, COLLAPSE) for method in ("fgsm-rs", "atta", "atas", "pgd")]
    report.plot_curves(report.summarise(folders), tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as image:
        image.load()
        assert image.size[0] > 900
        assert image.size[1] > 600
        assert len(image.convert("RGB").getcolors(1 << 20)) > 100
    assert not list(tmp_path.glob(".*"))


def test_the_curves_and_their_legend(draw):
    text = draw({})
    for label in ("clean", "fgsm", "pgd-10", "epoch", "accuracy, %"):
        assert f"<!-- {label}" in text, label
    for colour in ("#999999", "#e69f00", "#0072b2"):
        assert colour in text


def test_a_collapse_is_marked_and_only_a_collapse(draw):
    text = draw({"curve": COLLAPSE, "collapsed_from": 2})
    assert MARK in text
    assert "<!-- collapse -->" in text


def test_no_mark_without_a_collapse(draw):
    text = draw({"curve": COLLAPSE})
    assert MARK not in text
    assert "<!-- collapse -->" not in text


def test_one_of_two_collapsed(draw):
    text = draw({"method": "fgsm-rs", "curve": COLLAPSE, "collapsed_from": 2}, {"method": "atas"})
    assert text.count("<!-- collapse -->") == 1
    assert "<!-- fgsm-rs, linf(8/255) -->" in text
    assert "<!-- atas, linf(8/255) -->" in text


def test_panels_of_the_same_method_can_be_told_apart(draw):
    """Two seeds of one method, say: only the names of the runs tell which is which."""
    text = draw({}, {"curve": COLLAPSE})
    assert "0-run" in text
    assert "1-run" in text


@pytest.mark.parametrize("epochs", [1, 2])
def test_short_runs_have_all_curves(epochs, draw):
    text = draw({"curve": COLLAPSE[:epochs]})
    for label in ("clean", "fgsm", "pgd-10"):
        assert f"<!-- {label}" in text, label


def test_the_folder_is_made_and_no_suffix_means_png(make_run, tmp_path):
    path = tmp_path / "new" / "curves"
    report.plot_curves(report.summarise([make_run("run")]), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_suffixes_in_capitals(make_run, tmp_path):
    report.plot_curves(report.summarise([make_run("run")]), tmp_path / "CURVES.PNG")
    assert (tmp_path / "CURVES.PNG").read_bytes().startswith(b"\x89PNG")


def test_a_suffix_that_is_no_picture(make_run, tmp_path):
    runs = report.summarise([make_run("run")])
    with pytest.raises(UsageError, match=r"cannot be written as '\.docx'; use \.png, \.svg or \.pdf"):
        report.plot_curves(runs, tmp_path / "curves.docx")
    assert not (tmp_path / "curves.docx").exists()


def test_an_old_picture_stays_when_the_new_one_cannot_be_drawn(make_run, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    runs = report.summarise([make_run("run")])
    path = tmp_path / "curves.png"
    path.write_bytes(b"old")

    def fail(self, file, **options):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="No space left"):
        report.plot_curves(runs, path)
    assert path.read_bytes() == b"old"
    assert not list(tmp_path.glob(".*"))


def test_without_matplotlib(make_run, tmp_path, monkeypatch):
    runs = report.summarise([make_run("run")])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'atas\[plots\]'"):
        report.plot_curves(runs, tmp_path / "curves.png")


def test_no_window_and_no_global_state_of_pyplot(make_run, tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    report.plot_curves(report.summarise([make_run("run")]), tmp_path / "curves.png")
    assert dict(matplotlib.rcParams) == before
