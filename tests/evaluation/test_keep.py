"""Perturbed images that an evaluation keeps."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import atas
from atas.attacks.losses import margin
from atas.errors import UsageError
from atas.evaluation import evaluate
from atas.evaluation.adversarial import KeptPoints, PointStore
from atas.evaluation.outcomes import AttackOutcome, merge_shards

ATTACKS = ["fgsm", "pgd3x2", "pgd5"]


@pytest.fixture(scope="module")
def kept(make_problem, ball, tiny):
    """The result of an evaluation; not to be changed."""
    return evaluate(*make_problem(), ball, attacks=[*ATTACKS, tiny], keep=True, chunk_bytes=6000, batch_size=7)


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
        assert targets is not None or torch.equal(result.details.predicted[name], predicted)
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


class StopError(Exception):
    pass


def stop_at(attack):
    """A watcher that stops before the points of this attack."""

    def watch(status):
        if status.note is None and status.attack == attack:
            raise StopError

    return watch


def test_the_file_gives_the_verdicts_also_rounded_to_a_ball_of_grey_levels(problem, ball, tiny, tmp_path):
    model, x, y = problem
    evaluate(model, x, y, ball, attacks=["pgd3", tiny], keep=True).save_adversarial(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz", allow_pickle=False) as file:
        for name in ("pgd3", "tiny"):
            points = torch.from_numpy(file[f"x_adv.{name}"])
            with torch.no_grad():
                assert torch.equal(model(points).argmax(1) == y, torch.from_numpy(file[f"correct.{name}"]))
            levels = (points.double() * 255).round() - (x.double() * 255).round()
            assert levels.abs().max() <= 4, "eps is 4/255"


def test_no_points_are_left(problem, ball, tmp_path):
    """Also where the evaluation that resumes keeps none."""
    options = {"attacks": ["fgsm", "pgd3", "pgd5"], "progress_file": tmp_path / "p.json"}
    with pytest.raises(StopError):
        evaluate(*problem, ball, keep=True, progress=stop_at("pgd5"), **options)
    (tmp_path / "p.points-mine-1.safetensors").write_bytes(b"mine")
    assert len(list(tmp_path.glob("p.points-0-*"))) == 2
    evaluate(*problem, ball, **options).save(tmp_path / "a.json")
    assert {file.name for file in tmp_path.iterdir()} == {
        "a.json",
        "a.safetensors",
        "p.points-mine-1.safetensors",
    }


def test_points_of_another_evaluation_are_not_used(problem, ball, tmp_path):
    """As after a kill between the files of two evaluations, whose verdicts may well be the same."""
    model, x, y = problem
    path = tmp_path / "p.json"
    options = {"attacks": ["pgd3", "pgd5"], "keep": True, "progress_file": path}
    wrong = (y + 1) % 4  # on all images of both, so all verdicts are equal
    with torch.no_grad():
        wrong = torch.where(model(x).argmax(1) == wrong, (y + 2) % 4, wrong)
    ball = atas.Linf(0.5 / 255)
    with pytest.raises(StopError):
        evaluate(model, x.flip(0), wrong.flip(0), ball, progress=stop_at("pgd5"), **options)
    others = {file.name: file.read_bytes() for file in tmp_path.glob("*.points-*")}
    with pytest.raises(StopError):
        evaluate(model, x, wrong, ball, progress=stop_at("pgd5"), **options)
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
    found = evaluate(model, x, wrong, ball, **options)
    assert ball.distance(found.adversarial["pgd3"], x).max() <= ball.eps + 1e-6


def test_every_process_has_its_own_files(tmp_path):
    kept = KeptPoints(torch.rand(2, 1, 2, 2), torch.zeros(2))
    stores = [PointStore(tmp_path / f"p.json-{rank}-of-2", "same", print) for rank in (1, 2)]
    stores[0].save(0, 1, 1, kept)
    assert stores[1].load(0, 1, 1) is None
    assert torch.equal(stores[0].load(0, 1, 1).points, kept.points)


def test_the_strongest_of_several_points_is_kept(generator):
    """By a loop over the points, of which several may be of one example."""
    kept = KeptPoints(torch.zeros(4, 1, 1, 1), torch.tensor([torch.inf, 0.5, -torch.inf, 0.0], dtype=torch.float64))
    points, margins = kept.points.flatten().tolist(), kept.margins.tolist()
    for _ in range(20):
        rows = torch.randint(4, (6,), generator=generator)
        found = torch.randn(6, dtype=torch.float64, generator=generator) + 1
        new = torch.rand(6, 1, 1, 1, generator=generator)
        kept.update(rows, new, found)
        for row, point, least in zip(rows.tolist(), new.flatten().tolist(), found.tolist(), strict=True):
            if least < margins[row]:
                points[row], margins[row] = point, least
        assert kept.points.flatten().tolist() == points
        assert kept.margins.tolist() == margins
