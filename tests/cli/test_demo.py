"""`atas demo`: a short story that ends, and one sentence where it cannot."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from atas.cli import demo
from atas.evaluation import Evaluation


@pytest.fixture
def short(monkeypatch):
    """The demo with one epoch and few images."""
    monkeypatch.setattr(demo, "_EPOCHS", 1)
    monkeypatch.setattr(demo, "IMAGES", 3)
    values = {method: (*values, "training.epochs=1") for method, values in demo.VALUES.items()}
    monkeypatch.setattr(demo, "VALUES", values)


@pytest.mark.slow
def test_the_story_has_a_table_four_sentences_and_a_report(command, short, tmp_path):
    result = command("demo", "--out", tmp_path / "demo")
    assert result.status == 0, result.err
    lines = result.out.splitlines()
    assert len(lines) <= 40
    assert [line[:2] for line in lines if line[:1].isdigit()] == ["1.", "2.", "3.", "4."]
    assert lines[-2] == f"report: {tmp_path / 'demo' / 'report.html'}"
    assert (tmp_path / "demo" / "report.html").exists()
    for method in ("standard", "fgsm", "atas-plus"):
        found = Evaluation.load(tmp_path / "demo" / method / "evaluation.json")
        assert found.threat.eps == 0.2
        assert {"clean", "fgsm", "pgd50", "autoattack"} <= found.accuracy.keys()


@pytest.mark.slow
def test_a_failure_is_one_sentence(command, short, tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "fgsm").write_text("not a folder")
    result = command("demo", "--out", tmp_path / "demo")
    assert result.status == 1
    assert "the demo stopped while training fgsm" in result.err
    assert len(result.err.strip().splitlines()) == 1


def test_a_wrong_folder_is_said_at_once(command, tmp_path):
    (tmp_path / "file").touch()
    command("demo", "--out", tmp_path / "file").sentence("File exists", status=1)


@pytest.mark.slow
def test_ctrl_c_stops_all_processes(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "atas", "demo", "--out", tmp_path / "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = tmp_path / "demo" / "atas-plus" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith("atas: interrupted")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def run(collapse, **accuracy):
    result = SimpleNamespace(accuracy=accuracy, interval={"autoattack": (0.5, 0.75)}, n=100)
    return SimpleNamespace(evaluation=result, collapse_epoch=collapse)


def test_sentences_say_what_was_measured():
    runs = {
        "standard": run(None, clean=0.99, fgsm=0.1, pgd50=0.0, autoattack=0.0),
        "fgsm": run(25, clean=0.86, fgsm=0.74, pgd50=0.04, autoattack=0.01),
        "atas-plus": run(None, clean=0.98, fgsm=0.8, pgd50=0.7, autoattack=0.66),
    }
    text = " ".join(demo._sentences(runs))
    assert "right on 99% of the clean digits and on 0% under attack" in text
    assert "looks robust under one step, 74%, but it collapsed in epoch 25: it keeps 1% under AutoAttack" in text
    assert "3. atas-plus keeps 66% under AutoAttack (95% interval 50 to 75%, 100 images), for one more forward" in text
    assert "training time" not in text  # trainings that run side by side, or beside other work, take any time
    runs["fgsm"] = run(None, clean=0.9, fgsm=0.7, pgd50=0.5, autoattack=0.4)
    assert "did not collapse this time: it keeps 40%" in demo._sentences(runs)[1]
