"""What is computed when the page is made: against the evaluation, against plain loops, and within the time given."""

import pytest
import torch
import torch.nn.functional as F

import atas
from atas import attacks, data
from atas.report._attempts import attempt, choose
from atas.report._confusion import Confusion, confusion
from atas.report._landscape import POINTS, Landscape, landscape
from atas.report._subject import NotAtHand, Pace
from atas.report._tenths import norms_of, tenths_of
from atas.training import checkpoint

# The gallery


def test_attacks_end_as_they_did_in_the_evaluation(trained, subject_of):
    subject = subject_of(trained)
    found = attempt(subject)
    evaluation = subject.evaluation
    assert [one.name for one in found.attempts] == ["fgsm", "pgd10", "apgd-ce"]
    assert found.left_out == []
    assert found.broken_by == [evaluation.broken_by["worst"][place] for place in found.index]
    for one in found.attempts:
        assert one.holds == evaluation.correct[one.name][found.index].tolist(), one.name
        assert float((one.points - found.images).abs().max()) <= 0.1 + 1e-6
    clean = [label == said for label, said in zip(found.labels, found.clean.label, strict=True)]
    assert clean == evaluation.correct["clean"][found.index].tolist()
    test = data.load("digits").test
    assert torch.equal(found.images, test.images[found.index].float() / 255)
    with torch.no_grad():
        confidence = subject.model(found.images).softmax(1).max(1).values
    assert found.clean.confidence == pytest.approx(confidence.tolist())


def test_a_run_without_evaluation_is_attacked_all_the_same(copy_of, subject_of):
    found = attempt(subject_of(copy_of(without=["evaluation.json"])))
    assert [one.name for one in found.attempts] == ["fgsm", "pgd10"]
    for row, reason in enumerate(found.broken_by):
        right = [found.clean.label[row] == found.labels[row], *(one.holds[row] for one in found.attempts)]
        expected = next(
            (name for name, holds in zip(("clean", "fgsm", "pgd10"), right, strict=True) if not holds), None
        )
        assert reason == expected


def test_what_takes_too_long_or_is_not_known_is_left_out(trained, subject_of):
    subject = subject_of(trained)
    subject.evaluation.correct["mine"] = subject.evaluation.correct["fgsm"]
    subject.__dict__["pace"] = Pace(subject.model, torch.rand(2, 1, 8, 8))
    subject.pace.seconds = 0.5  # 24 passes of FGSM are 12 seconds, and 240 of PGD-10 are 120
    found = attempt(subject)
    assert [one.name for one in found.attempts] == ["fgsm"]
    assert found.left_out == ["pgd10", "apgd-ce", "mine"]


def test_other_weights_and_other_images_are_told(copy_of, subject_of):
    folder = copy_of()
    subject = subject_of(folder)
    assert subject.weights_differ is False
    subject.evaluation.correct["clean"][0] ^= True
    object.__setattr__(subject.evaluation, "weights", "others")
    with pytest.raises(NotAtHand, match="other weights"):
        attempt(subject)
    subject = subject_of(folder)
    object.__setattr__(subject.evaluation, "data", "others")
    with pytest.raises(NotAtHand, match="not those of the evaluation"):
        attempt(subject)


def test_examples_of_every_kind():
    reasons = [None] * 50 + ["clean"] * 3 + ["fgsm"]
    chosen = choose(reasons, 8)
    assert len(chosen) == 8
    assert chosen == sorted(set(chosen))
    assert {reasons[place] for place in chosen} == {None, "clean", "fgsm"}
    assert choose(["fgsm"], 8) == [0]
    assert choose([None] * 100, 3) == [0, 50, 99]  # data may be sorted by class
    assert choose(["clean", None, "fgsm"], 2) == [0, 1]


# Tenths of the gradient norm


def test_norms_are_those_that_the_method_remembers(trained, subject_of):
    norms = norms_of(subject_of(trained))
    tensors, _ = checkpoint.load(trained / "checkpoints" / "last.safetensors")
    assert torch.equal(norms.norm, tensors["method.norms.average"].sqrt())
    assert norms.index.tolist() == list(range(1297))


def test_norms_of_a_run_that_held_images_out_are_of_the_others(copy_of, subject_of):
    folder = copy_of()
    recipe = (folder / "recipe.toml").read_text().replace('on_collapse = "warn"', 'on_collapse = "stop"')
    (folder / "recipe.toml").write_text(recipe)
    with pytest.raises(NotAtHand, match="not those of the run"):
        norms_of(subject_of(folder))  # 1,297 remembered, 1,237 left to train on


def test_norms_of_other_methods_are_measured_at_the_images(copy_of, subject_of):
    subject = subject_of(copy_of(without=["checkpoints/last.safetensors"]))
    norms = norms_of(subject)
    x, y = (part[norms.index[:5]] for part in (subject.data.train.images, subject.data.train.labels))
    x = (x.float() / 255).requires_grad_(True)
    F.cross_entropy(subject.model(x), y, reduction="sum").backward()
    assert torch.allclose(norms.norm[:5], x.grad.flatten(1).norm(dim=1), rtol=1e-4)
    assert norms.step_size is None


def test_a_damaged_checkpoint_is_told(copy_of, subject_of):
    folder = copy_of()
    (folder / "checkpoints" / "last.safetensors").write_bytes(b"nothing")
    with pytest.raises(NotAtHand, match="checkpoint cannot be used"):
        norms_of(subject_of(folder))


def test_accuracy_by_tenth(trained, subject_of):
    subject = subject_of(trained)
    found = tenths_of(subject)
    assert len(found.clean) == len(found.robust) == len(found.interval) == 10
    x, y = subject.data.train.images.float() / 255, subject.data.train.labels
    order = norms_of(subject).norm.argsort(stable=True)
    if found.count == len(order):  # a slow machine looks at fewer
        for part, accuracy in zip(order.tensor_split(10), found.clean, strict=True):
            with torch.no_grad():
                right = subject.model(x[part]).argmax(1) == y[part]
            assert accuracy == pytest.approx(float(right.float().mean()))
    assert found.robust[0] >= found.robust[-1]  # small gradients move little
    assert all(low <= share <= high for share, (low, high) in zip(found.robust, found.interval, strict=True))


# The loss around an image


@pytest.mark.parametrize("threat", [atas.Linf(0.1), atas.L2(0.5)])
def test_the_landscape_against_a_loop(threat, robust_digits):
    model, x, y = robust_digits
    found = landscape(model, x[:1], y[:1], threat, index=3)
    assert found.steps[0] == -1
    assert found.steps[-1] == 1
    assert found.steps[POINTS // 2] == 0
    assert found.loss.shape == (POINTS, POINTS)
    here = F.cross_entropy(model(x[:1]), y[:1])
    assert found.loss[POINTS // 2, POINTS // 2] == pytest.approx(float(here), rel=1e-4)
    point = attacks.fgsm(model, x[:1], y[:1], threat)
    there = F.cross_entropy(model(point), y[:1])
    assert found.loss[POINTS // 2, -1] == pytest.approx(float(there), rel=1e-4)


def test_a_bent_surface():
    steps = torch.linspace(-1, 1, POINTS).tolist()
    rising = torch.linspace(-1, 1, POINTS).exp().expand(POINTS, POINTS)
    bump = torch.exp(-8 * (torch.linspace(-1, 1, POINTS) - 0.5) ** 2).expand(POINTS, POINTS)
    assert not Landscape(steps, rising).bends
    assert Landscape(steps, bump).bends
    assert not Landscape(steps, torch.zeros(POINTS, POINTS)).bends


# Confusion


def test_confusion_counts_what_pgd_finds(trained, subject_of):
    subject = subject_of(trained)
    found = confusion(subject)
    assert int(found.counts.sum()) == found.images
    test = subject.data.test
    assert found.images <= len(test)
    if found.images == len(test):  # a slow machine looks at fewer
        assert found.counts.sum(1).tolist() == test.labels.bincount(minlength=10).tolist()
    assert (found.counts.sum(1) > 0).all()
    x, y = test.images[:40].float() / 255, test.labels[:40]
    point = attacks.pgd(subject.model, x, y, subject.evaluation.threat)
    assert torch.equal(subject.model(point).argmax(1) == y, subject.evaluation.correct["pgd10"])


def test_the_most_frequent_mistakes():
    found = Confusion(torch.tensor([[5, 2, 0], [1, 0, 4], [0, 0, 9]]), ("a", "b", "c"), 21)
    assert found.most(2) == [("b", "c", 4, 5), ("a", "b", 2, 7)]
    assert len(found.most(100)) == 3


# Time


def test_how_many_images_fit_the_time():
    pace = Pace(torch.nn.Flatten(), torch.rand(2, 1, 2, 2))
    pace.seconds = 0.01
    assert pace.images(passes=10, seconds=10, most=1000) == 100
    assert pace.images(passes=10, seconds=10, most=50) == 50
    assert pace.images(passes=100, seconds=10, most=50) == 20
    pace.seconds = 1
    with pytest.raises(NotAtHand, match="write the report where there is a GPU"):
        pace.images(passes=10, seconds=10, most=50)
