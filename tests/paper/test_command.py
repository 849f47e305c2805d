"""`atas reproduce` from the command line."""

import json

import pytest

from atas.paper.studies import names

TINY = [
    part
    for value in ("training.epochs=1", "training.batch_size=512", "training.probe=50", "engine.device=cpu")
    for part in ("--set", value)
]
QUICK = ["--quick", "--examples", 20, *TINY]


@pytest.mark.slow
def test_the_list_names_every_study(command):
    status, out, _ = command("reproduce", "--list")
    assert status == 0
    assert set(names()) <= set(out.split())
    status, out, _ = command("reproduce", "--list", "--json")
    assert [row["study"] for row in json.loads(out)] == names()


@pytest.mark.slow
def test_a_quick_table_from_end_to_end(command, tmp_path):
    wanted = ["--methods", "atas,fgsm-rs", "--attacks", "pgd2", "--padding", "0,4"]
    status, out, err = command("reproduce", "table-cifar10", *QUICK, "--out", tmp_path, *wanted)
    assert status == 0, err
    assert "4/4 digits, small-cnn, atas, 0.25" in err
    page = (tmp_path / "table-cifar10-quick.md").read_text()
    assert out.startswith(page)
    for part in ("| fgsm-rs | ours ", "| atas    | ours ", "ours, 16 x 16", "no such row", "training.epochs = 1"):
        assert part in page
    rows = json.loads((tmp_path / "table-cifar10-quick.json").read_text())["rows"]
    assert [(row["method"], row["padding"], row["paper"]) for row in rows] == [
        ("fgsm-rs", 0, None),
        ("fgsm-rs", 4, None),
        ("atas", 0, None),
        ("atas", 4, None),
    ]
    assert all(row["ours"]["pgd2"]["n"] == 20 for row in rows)

    status, out, err = command(
        "reproduce", "table-cifar100", *QUICK, "--out", tmp_path / "b", *wanted, "--reuse", tmp_path
    )
    assert (status, err) == (0, "4 of 4 runs are done already\n")
    assert not (tmp_path / "b" / "trainings").exists()


@pytest.mark.slow
def test_schedules_by_held_out_images(command, tmp_path):
    status, _, err = command("reproduce", "schedules", *QUICK, "--out", tmp_path, "--methods", "fgsm", "--json")
    assert status == 0, err
    (row,) = json.loads((tmp_path / "schedules-quick.json").read_text())["rows"]
    assert row["piecewise"]["n"] == row["cyclic"]["n"] == 20


@pytest.mark.slow
def test_a_failed_run_makes_status_1_and_one_sentence(command, tmp_path):
    options = ["--methods", "atas,atta", "--attacks", "fgsm", "--set", "schedule.peak=1e30"]
    status, out, err = command("reproduce", "table-cifar10", *QUICK, "--out", tmp_path, *options)
    assert status == 1
    last = err.splitlines()[-1]
    assert last.startswith("atas: 2 runs failed, the first was digits, small-cnn, atta")
    assert "Traceback" not in err
    assert "failed" in out


def test_a_dry_run_touches_nothing(command, tmp_path):
    status, out, _ = command("reproduce", "ablation", "--eps", "8/255", "--out", tmp_path / "out", "--dry-run")
    assert status == 0
    assert out.splitlines()[-1] == f"18 of 18 runs to do, into {tmp_path / 'out'}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        ([], 2, "name a study"),
        (["table-cifar"], 2, "did you mean 'table-cifar10'?"),
        (["table-cifar10", "--methods", ","], 2, "--methods is empty"),
        (["table-cifar10", "--seeds", "one"], 2, "--seeds takes integers"),
        (["table-cifar10", "--eps", "9/255"], 2, "unknown budget '9/255'"),
        (["table-cifar10", "--attacks", "pgd0"], 2, "unknown attack 'pgd0'"),
        (["table-cifar10", "--padding", "-1"], 2, "padding must be at least 0"),
        (["theory", "--methods", "atas"], 2, "does not take --methods"),
        (["theory", "--dry-run"], 2, "trains no models; leave out --dry-run"),
        (["table-cifar10", "theory", "--no-run"], 2, "the study theory trains no models; leave out --no-run"),
        (["table-cifar10", "--reuse", "nowhere"], 2, "holds no results to reuse"),
        (["table-cifar10", "--root", "nowhere"], 1, "nowhere"),
    ],
)
def test_mistakes_in_one_sentence(arguments, status, part, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, out, err = command("reproduce", *arguments)
    assert (found, out) == (status, "")
    assert err.startswith("atas: ")
    assert err.count("\n") == 1
    assert part in err
    assert list(tmp_path.iterdir()) == []
