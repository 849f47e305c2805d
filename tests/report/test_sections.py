"""What is computed when the page is made: against the evaluation, against plain loops, and within the time given."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers.run_files import recipe_text

import atas
from atas import attacks, data
from atas.report.attack_examples import attack_examples, sample_by_outcome
from atas.report.measurements import (
    POINTS,
    ConfusionMatrix,
    LossLandscape,
    accuracy_by_norm_decile,
    confusion_matrix,
    gradient_norms,
    loss_landscape,
)
from atas.report.run_view import Throughput, Unavailable
from atas.training import checkpoint

# The gallery


def test_attacks_end_as_they_did_in_the_evaluation(trained, view_of):
    view = view_of(trained)
    found = attack_examples(view)
    evaluation = view.evaluation
    assert [one.name for one in found.results] == ["fgsm", "pgd10", "apgd-ce"]
    assert found.skipped == []
    assert found.broken_by == [evaluation.broken_by["worst"][place] for place in found.index]
    for one in found.results:
        assert one.robust == evaluation.correct[one.name][found.index].tolist(), one.name
        assert float((one.adversarial - found.images).abs().max()) <= 0.1 + 1e-6
    clean = [label == said for label, said in zip(found.labels, found.clean.label, strict=True)]
    assert clean == evaluation.correct["clean"][found.index].tolist()
    test = data.load("digits").test
    assert torch.equal(found.images, test.images[found.index].float() / 255)
    with torch.no_grad():
        confidence = view.model(found.images).softmax(1).max(1).values
    assert found.clean.confidence == pytest.approx(confidence.tolist())


def test_a_run_without_evaluation_is_attacked_all_the_same(copy_of, view_of):
    found = attack_examples(view_of(copy_of(without=["evaluation.json"])))
    assert [one.name for one in found.results] == ["fgsm", "pgd10"]
    for row, reason in enumerate(found.broken_by):
        right = [found.clean.label[row] == found.labels[row], *(one.robust[row] for one in found.results)]
        expected = next(
            (name for name, holds in zip(("clean", "fgsm", "pgd10"), right, strict=True) if not holds), None
        )
        assert reason == expected


def test_gallery_skips_attacks_that_are_slow_or_unknown(trained, view_of):
    view = view_of(trained)
    view.evaluation.correct["mine"] = view.evaluation.correct["fgsm"]
    view.__dict__["throughput"] = Throughput(view.model, torch.rand(2, 1, 8, 8))
    view.throughput.seconds_per_image = 0.5  # 24 passes of FGSM are 12 seconds, and 240 of PGD-10 are 120
    found = attack_examples(view)
    assert [one.name for one in found.results] == ["fgsm"]
    assert found.skipped == ["pgd10", "apgd-ce", "mine"]


def test_other_weights_and_other_images_are_told(copy_of, view_of, edit_evaluation):
    folder = copy_of()
    view = view_of(folder)
    assert view.weights_differ is False
    edit_evaluation(folder, weights="others")
    with pytest.raises(Unavailable, match="other weights"):
        attack_examples(view_of(folder))
    edit_evaluation(folder, weights=view.evaluation.weights, data="others")
    with pytest.raises(Unavailable, match="not those of the evaluation"):
        attack_examples(view_of(folder))


def test_examples_of_every_kind():
    reasons = [None] * 50 + ["clean"] * 3 + ["fgsm"]
    chosen = sample_by_outcome(reasons, 8)
    assert len(chosen) == 8
    assert chosen == sorted(set(chosen))
    assert {reasons[place] for place in chosen} == {None, "clean", "fgsm"}
    assert sample_by_outcome(["fgsm"], 8) == [0]
    assert sample_by_outcome([None] * 100, 3) == [0, 50, 99]  # data may be sorted by class
    assert sample_by_outcome(["clean", None, "fgsm"], 2) == [0, 1]


# Tenths of the gradient norm


def test_norms_are_those_that_the_method_remembers(trained, view_of):
    norms = gradient_norms(view_of(trained))
    tensors, _ = checkpoint.load(trained / "checkpoints" / "last.safetensors")
    assert torch.equal(norms.norm, tensors["method.norms.average"].sqrt())
    assert norms.index.tolist() == list(range(1297))


def test_norms_of_a_run_that_held_images_out_are_of_the_others(copy_of, view_of):
    folder = copy_of()
    recipe = recipe_text(folder).replace('on_collapse = "warn"', 'on_collapse = "stop"')
    (folder / "recipe.toml").write_text(recipe)
    with pytest.raises(Unavailable, match="not those of the run"):
        gradient_norms(view_of(folder))  # 1,297 remembered, 1,237 left to train on


def test_norms_of_other_methods_are_measured_at_the_images(copy_of, view_of):
    view = view_of(copy_of(without=["checkpoints/last.safetensors"]))
    norms = gradient_norms(view)
    x, y = (part[norms.index[:5]] for part in (view.data.train.images, view.data.train.labels))
    x = (x.float() / 255).requires_grad_(True)
    F.cross_entropy(view.model(x), y, reduction="sum").backward()
    assert torch.allclose(norms.norm[:5], x.grad.flatten(1).norm(dim=1), rtol=1e-4)
    assert norms.step_size is None


def test_a_damaged_checkpoint_is_told(copy_of, view_of):
    folder = copy_of()
    (folder / "checkpoints" / "last.safetensors").write_bytes(b"nothing")
    with pytest.raises(Unavailable, match="Cannot read the checkpoint"):
        gradient_norms(view_of(folder))


@pytest.mark.slow
def test_accuracy_by_tenth(trained, view_of):
    view = view_of(trained)
    found = accuracy_by_norm_decile(view)
    assert len(found.clean) == len(found.robust) == len(found.interval) == 10
    x, y = view.data.train.images.float() / 255, view.data.train.labels
    order = gradient_norms(view).norm.argsort(stable=True)
    if found.count == len(order):  # a slow machine looks at fewer
        for part, accuracy in zip(order.tensor_split(10), found.clean, strict=True):
            with torch.no_grad():
                right = view.model(x[part]).argmax(1) == y[part]
            assert accuracy == pytest.approx(float(right.float().mean()))
    assert found.robust[0] >= found.robust[-1]  # small gradients move little
    assert all(low <= share <= high for share, (low, high) in zip(found.robust, found.interval, strict=True))


# The loss around an image


@pytest.mark.parametrize("threat", [atas.Linf(0.1), atas.L2(0.5)])
def test_the_landscape_against_a_loop(threat, robust_digits):
    model, x, y = robust_digits
    found = loss_landscape(model, x[:1], y[:1], threat, index=3)
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
    assert not LossLandscape(steps, rising).peaks_inside
    assert LossLandscape(steps, bump).peaks_inside
    assert not LossLandscape(steps, torch.zeros(POINTS, POINTS)).peaks_inside


# Confusion


@pytest.mark.slow
def test_confusion_counts_what_pgd_finds(trained, view_of):
    view = view_of(trained)
    found = confusion_matrix(view)
    assert int(found.counts.sum()) == found.num_images
    test = view.data.test
    assert found.num_images <= len(test)
    if found.num_images == len(test):  # a slow machine looks at fewer
        assert found.counts.sum(1).tolist() == test.labels.bincount(minlength=10).tolist()
    assert (found.counts.sum(1) > 0).all()
    x, y = test.images[:40].float() / 255, test.labels[:40]
    point = attacks.pgd(view.model, x, y, view.evaluation.threat)
    assert torch.equal(view.model(point).argmax(1) == y, view.evaluation.correct["pgd10"])


def test_the_most_frequent_mistakes():
    found = ConfusionMatrix(torch.tensor([[5, 2, 0], [1, 0, 4], [0, 0, 9]]), ("a", "b", "c"), 21)
    assert found.top_mistakes(2) == [("b", "c", 4, 5), ("a", "b", 2, 7)]
    assert len(found.top_mistakes(100)) == 3


# Time


def test_how_many_images_fit_the_time():
    throughput = Throughput(torch.nn.Flatten(), torch.rand(2, 1, 2, 2))
    throughput.seconds_per_image = 0.01
    assert throughput.max_images(passes=10, seconds=10, limit=1000) == 100
    assert throughput.max_images(passes=10, seconds=10, limit=50) == 50
    assert throughput.max_images(passes=100, seconds=10, limit=50) == 20
    throughput.seconds_per_image = 1
    with pytest.raises(Unavailable, match="run atas report on a GPU"):
        throughput.max_images(passes=10, seconds=10, limit=50)


def test_norms_that_are_kept_do_not_keep_model_and_data(trained, view_of):
    view = view_of(trained, quick=True)
    norms = gradient_norms(view)
    assert gradient_norms(view) is norms, "they are measured once"
    left = weakref.ref(view)
    del view
    gc.collect()
    assert left() is None
