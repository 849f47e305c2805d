"""Perturbed images that an evaluation keeps."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import atas
from atas.attacks.losses import margin
from atas.errors import UsageError
from atas.evaluation import evaluate
from atas.evaluation.evaluator import merge_shards
from atas.evaluation.runner import AttackOutcome

ATTACKS = ["fgsm", "pgd3x2", "pgd5"]


@pytest.fixture
def kept(problem, ball, tiny):
    return evaluate(*problem, ball, attacks=[*ATTACKS, tiny], keep=True, chunk_bytes=6000, batch_size=7)


@pytest.mark.slow
@pytest.mark.parametrize("targets", [None, 2])
def test_points_give_the_verdicts_and_lie_in_the_ball(problem, ball, tiny, targets):
    model, x, y = problem
    result = evaluate(model, x, y, ball, attacks=[*ATTACKS, tiny], keep=True, batch_size=7, targets=targets)
    if targets is not None:
        x, y = x[y != targets], y[y != targets]
    assert torch.equal(result.labels, y)
    assert list(result.adversarial) == [*ATTACKS, "tiny"]
    for name, points in result.adversarial.items():
        with torch.no_grad():
            predicted = model(points).argmax(1)
        assert torch.equal(result.correct[name], predicted == y if targets is None else predicted != targets)
        assert ball.distance(points, x).max() <= ball.eps + 1e-6
        assert points.min() >= 0
        assert points.max() <= 1


def test_where_an_attack_fails_its_strongest_point_is_kept(problem, ball, tiny):
    model, x, y = problem
    result = evaluate(model, x, y, ball, attacks=["pgd3", "pgd3x3", tiny], keep=True)
    with torch.no_grad():
        margins = {name: margin(model(points), y) for name, points in result.adversarial.items()}
        clean = margin(model(x), y)
    robust = result.correct["worst"]
    assert robust.sum() > 3
    torch.testing.assert_close(result.adversarial["pgd3"], atas.attacks.pgd(model, x, y, ball, 3), rtol=0, atol=1e-6)
    assert (margins["pgd3x3"] <= margins["pgd3"] + 1e-5)[robust].all()
    assert (margins["tiny"] < clean)[robust].all()
    wrong = ~result.correct["clean"]
    assert torch.equal(result.adversarial["tiny"][wrong], x[wrong])


@pytest.mark.slow
def test_keeping_changes_no_verdict(problem, ball, tiny, kept):
    plain = evaluate(*problem, ball, attacks=[*ATTACKS, tiny])
    assert plain.adversarial == {}
    assert plain.labels is None
    for name, verdicts in plain.correct.items():
        assert torch.equal(verdicts, kept.correct[name])


@pytest.mark.slow
@pytest.mark.parametrize("damage", [None, "cut", "other"])
def test_a_resume_gives_the_same_points(problem, ball, tiny, kept, tmp_path, damage):
    path = tmp_path / "a.progress.json"

    def stop(status):
        if status.stage == "fab-t":
            raise KeyboardInterrupt

    def run(progress):
        return evaluate(
            *problem,
            ball,
            attacks=[*ATTACKS, tiny],
            keep=True,
            chunk_bytes=6000,
            batch_size=7,
            progress=progress,
            progress_file=path,
        )

    with pytest.raises(KeyboardInterrupt):
        run(stop)
    files = sorted(tmp_path.glob("a.progress.points-*"))
    assert len(files) >= len(ATTACKS)
    if damage == "cut":
        files[0].write_bytes(files[0].read_bytes()[:-100])
    elif damage == "other":
        files[0].write_bytes(files[1].read_bytes())
    seen = []
    result = run(seen.append)
    assert any("resuming" in (status.note or "") for status in seen)
    for name, points in kept.adversarial.items():
        assert torch.equal(result.correct[name], kept.correct[name])
        assert torch.equal(result.adversarial[name], points)
    result.save(tmp_path / "a.json")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.json", "a.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["npz", "safetensors"])
def test_files(kept, problem, tmp_path, ending):
    path = tmp_path / f"kept.{ending}"
    kept.save_adversarial(path)
    if ending == "npz":
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: torch.from_numpy(array) for name, array in file.items()}
    else:
        arrays = load_file(path)
    assert torch.equal(arrays.pop("labels"), problem[2])
    assert torch.equal(arrays.pop("correct.clean"), kept.correct["clean"])
    for name, points in kept.adversarial.items():
        assert torch.equal(arrays.pop(f"x_adv.{name}"), points)
        assert torch.equal(arrays.pop(f"correct.{name}"), kept.correct[name])
    assert not arrays


def test_what_cannot_be_written_is_refused(problem, ball, kept, tmp_path):
    with pytest.raises(UsageError, match=r"names a file that ends in .npz or .safetensors; got .*kept.png"):
        kept.save_adversarial(tmp_path / "kept.png")
    with pytest.raises(UsageError, match="kept no perturbed images: pass keep=True"):
        evaluate(*problem, ball, attacks=["fgsm"]).save_adversarial(tmp_path / "kept.npz")


def test_points_of_processes_without_examples_are_not_missed():
    def outcome(values):
        points = torch.tensor(values)[:, None] if values else None
        return {"fgsm": AttackOutcome(torch.zeros(len(values), dtype=torch.int64), [1.0], [1], None, points)}

    shares = [(range(0, 2, 3), outcome([0.1])), (range(1, 2, 3), outcome([0.2])), (range(2, 2, 3), outcome([]))]
    assert torch.equal(merge_shards(shares, 2)["fgsm"].points, torch.tensor([[0.1], [0.2]]))
