"""Benchmarks in a small form: they run, and what they say of a memory holds."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import atas
from atas import data, methods, models

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """Run a benchmark in this process; what it printed and what it wrote."""

    def run(name, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / name), *arguments, "--json", "found.json"])
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
        return capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))

    return run


@pytest.mark.parametrize("store", ["host", "device"])
def test_the_memory_of_a_large_set(store, bench):
    small = ["--examples", "60", "--size", "28", "--batch", "8", "--steps", "6", "--grid", "4", "--model", "small-cnn"]
    shown, found = bench("host_memory.py", *small, "--device", "cpu", "--precision", "float32", "--store", store)
    assert found["memory_gigabytes"] == pytest.approx(60 * 3 * 4 * 4 / 1e9)
    assert found["steps"] == 6
    assert found["in_both_epochs"] > 0
    assert found["changed_of_trained"] == 1
    assert found["changed_of_others"] == 0
    assert "images_a_second" in shown
    assert found["environment"]["command"].startswith("host_memory.py")


@pytest.mark.slow
@pytest.mark.parametrize("source", ["random", "packed"])
def test_the_pace_at_several_sizes(source, bench, tmp_path):
    small = ["--models", "small-cnn", "--sizes", "16", "24", "--batch", "8", "--steps", "2", "--rounds", "2"]
    small += ["--grid", "4", "--device", "cpu", "--precision", "float32"]
    if source == "random":
        small += ["--images", "40", "--stored", "32", "--classes", "3", "--view", "resized"]
    else:
        photos = tmp_path / "photos"
        for half, label in (("train", "a"), ("train", "b"), ("test", "a"), ("test", "b")):
            (photos / half / label).mkdir(parents=True)
            for number in range(12):
                Image.new("RGB", (40, 32), (number, 0, 0)).save(photos / half / label / f"{number}.png")
        data.pack(photos, tmp_path / "packed", size=32)
        small += ["--packed", str(tmp_path / "packed"), "--loading", "streaming", "--workers", "1"]
    shown, found = bench("throughput.py", *small)
    assert [(row["model"], row["shown"]) for row in found["rows"]] == [("small-cnn", 16), ("small-cnn", 24)]
    for row in found["rows"]:
        assert row["loading"] == ("resident" if source == "random" else "streaming")
        assert row["data_alone"]["median"] > 0
        hours = 90 * 1_281_167 / row["images_a_second"]["median"] / 3600
        assert row["hours_for_90_epochs_of_imagenet"] == pytest.approx(hours)
    assert "data alone" in shown
    assert {path.name for path in tmp_path.iterdir()} <= {"found.json", "photos", "packed"}


@pytest.mark.slow
def test_how_far_yopo_moves_its_first_layer(bench):
    _, found = bench("first_layer.py", "--steps", "8", "--batch", "32", "--seeds", "3")
    assert [(row["twice"], row["seed"]) for row in found["runs"]] == [(False, 3), (True, 3)]
    for row in found["runs"]:
        assert 0 < row["median_move"] <= row["largest_move"]


@pytest.mark.slow
def test_step_cost_benchmark_times_every_method(bench):
    small = ["--model", "small-cnn", "--batch", "4", "--rounds", "2", "--device", "cpu"]
    _, found = bench("step_cost.py", *small)
    assert list(found["rows"]) == methods.names()
    assert found["rows"]["standard"]["relative"] == 1


VARIANTS = """
recipe = "digits-small-cnn-atas"
held_out = 40

[values]
"training.epochs" = 1
"training.probe" = 10
"training.loggers" = []

[[variants]]
name = "base"

[[variants]]
name = "averaged"
values = { "targets.smoothing" = 0.1, "training.ema" = [0.5, 0.7] }
"""


@pytest.mark.slow
def test_a_variant_that_fails_is_said_and_gives_a_status(tmp_path, monkeypatch, capsys):
    text = VARIANTS.replace('"training.ema" = [0.5, 0.7]', '"model.name" = "nowhere:nothing"')
    (tmp_path / "variants.toml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["record.py", str(tmp_path / "variants.toml"), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="1"):
        runpy.run_path(str(BENCHMARKS / "record.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "averaged                        0 not done" in said
    assert "failed: " in said.splitlines()[-1]


@pytest.mark.slow
def test_variants_of_a_recipe_are_compared_once(tmp_path, monkeypatch, capsys):
    """A second call repeats nothing, and every run has a file with its verdicts."""
    (tmp_path / "variants.toml").write_text(VARIANTS, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["record.py", str(tmp_path / "variants.toml"), "--out", str(tmp_path / "out")])
    tables, written = [], []
    for _ in range(2):
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(str(BENCHMARKS / "record.py"), run_name="__main__")
        tables.append(capsys.readouterr().out.splitlines()[-4:])
        records = sorted((tmp_path / "out" / "runs").glob("*.json"))
        written.append([record.stat().st_mtime_ns for record in records])
    assert tables[0] == tables[1]
    assert written[0] == written[1]
    assert len(records) == 2
    assert [line.split()[:3] for line in tables[0][1:]] == [
        ["base", "0", "final"],
        ["averaged", "0", "final"],
        ["averaged", "0", "0.7"],
    ]
    for record in records:
        for figures in json.loads(record.read_text())["observed"]["held-out"]["models"].values():
            for name, verdicts in figures["correct"].items():
                assert len(verdicts) == 40
                assert verdicts.count("1") / 40 == pytest.approx(figures["accuracy"][name])


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("record.toml", {"cifar10"}),
        ("record-30s.toml", {"cifar10"}),
        ("later-methods.toml", {"cifar10"}),
        ("record-cifar100.toml", {"cifar100"}),
        ("record-test.toml", {"cifar10", "cifar100", "tiny-imagenet"}),
    ],
)
def test_shipped_variants_are_valid(file, data):
    module = runpy.run_path(str(BENCHMARKS / "record.py"))
    variants = module["read"](BENCHMARKS / file)
    assert {trials[0].resolved_recipe.data.name for trials in variants.values()} == data


@pytest.mark.slow
def test_chunked_batchnorm_is_that_of_four_networks(monkeypatch):
    """Each chunk is normalised by itself, and the running statistics follow the first."""
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    factory = importlib.import_module("benchmarks.chunked_batchnorm").preact_resnet18
    torch.manual_seed(0)
    plain = models.create("preact-resnet18", 10).train()
    torch.manual_seed(0)
    chunked = factory(num_classes=10, channels=3).train()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), chunked.parameters(), strict=True))
    assert chunked.state_dict().keys() == plain.state_dict().keys()
    x = torch.rand(8, 3, 32, 32)
    with torch.no_grad():
        logits = chunked(x)
        parts = [plain(part) for part in x[:2].split(2)]
        state = {name: value.clone() for name, value in plain.state_dict().items()}
        parts += [plain(part) for part in x[2:].split(2)]
    torch.testing.assert_close(logits, torch.cat(parts), rtol=1e-4, atol=1e-5)
    for name, value in chunked.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-4, atol=1e-5)
    chunked.eval()
    plain.load_state_dict(chunked.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(chunked(x), plain.eval()(x))


@pytest.mark.parametrize(
    ("name", "values"), [("MarginATAS", {}), ("HalfATAS", {}), ("StaleATAS", {}), ("StaleATAS", {"fresh_from": 0})]
)
def test_forms_that_are_tried_for_the_record_make_steps_inside_the_ball(name, values, monkeypatch):
    monkeypatch.chdir(BENCHMARKS.parent)
    threat, x = atas.Linf(8 / 255), torch.rand(6, 3, 8, 8)
    how = {"classes": 4, "warmup_epochs": 0, **values}
    method = atas.methods.create(f"benchmarks.trial_methods:{name}", threat, 6, (3, 8, 8), **how)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4))
    before = model[1].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method.start_epoch(0, epochs=2)
    stored = method.memory.delta.clone()
    index, view = torch.arange(6), atas.View.centre(6, 4)
    start = method.load_start(x, index, view)
    output = method.step(model, optimizer, x, torch.tensor([0, 1, 2, 3, 0, 1]), index, view)
    assert float((output.inputs - x).abs().max()) <= threat.eps + 1e-6
    assert not torch.equal(model[1].weight, before)
    moved = (method.memory.delta != stored).flatten(1).any(1)
    assert moved.tolist() == [True] * 3 + [name != "HalfATAS"] * 3
    at_start = (output.inputs == start).flatten(1).all(1)
    stale = {"HalfATAS": 3, "StaleATAS": 0 if values else 6}.get(name, 0)  # trained on where the last epoch ended
    assert at_start.tolist() == [False] * (6 - stale) + [True] * stale
