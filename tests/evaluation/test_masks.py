"""Evaluations with a mask."""

import pytest
import torch

import atas
from atas.errors import DataError, UsageError
from atas.evaluation import Evaluation, evaluate


@pytest.fixture
def masks():
    return torch.rand(30, 1, 6, 5, generator=torch.Generator().manual_seed(0)) < 0.5


@pytest.mark.slow
def test_verdicts_are_those_of_the_attacks(problem, tiny, masks):
    model, x, y = problem
    ball = atas.Linf(0.1).masked(masks)
    result = evaluate(model, x, y, ball, attacks=["fgsm", "pgd3", tiny], chunk_bytes=3000, batch_size=7)
    for name in ("fgsm", "pgd3"):
        with torch.no_grad():
            expected = model(atas.attacks.create(name)(model, x, y, ball)).argmax(1) == y
        assert torch.equal(result.correct[name], expected)
    free = evaluate(model, x, y, atas.Linf(0.1), attacks=["pgd3"])
    assert free.accuracy["pgd3"] < result.accuracy["pgd3"] < result.accuracy["clean"]


def test_targets_leave_out_images_with_their_masks(problem, masks):
    model, x, y = problem
    ball, chosen = atas.Linf(0.1), y != 2
    expected = evaluate(model, x[chosen], y[chosen], ball.masked(masks[chosen]), attacks=["pgd3"], targets=2)
    found = evaluate(model, x, y, ball.masked(masks), attacks=["pgd3"], targets=2)
    assert torch.equal(found.correct["pgd3"], expected.correct["pgd3"])


def test_the_result_says_that_there_was_a_mask(problem, masks, tmp_path):
    result = evaluate(*problem, atas.Linf(4 / 255).masked(masks[0]), attacks=["fgsm"])
    share = f"Linf(4/255) on {100 * masks[0].float().mean():.4g}% of the pixels"
    assert share in str(result)
    assert result.restricted
    assert result.threat == atas.Linf(4 / 255)
    result.save(tmp_path / "a.json")
    loaded = Evaluation.load(tmp_path / "a.json")
    assert str(loaded) == str(result)
    assert loaded.restricted
    assert "of the pixels" in loaded.sentence()
    assert not evaluate(*problem, atas.Linf(4 / 255), attacks=["fgsm"]).restricted


def test_an_attack_that_changes_other_pixels_is_refused(problem, masks):
    class Mine:
        name = "mine"

        def settings(self, threat):
            return {}

        def __call__(self, model, x, y, threat, *, seed=0, index=None):
            return (x + threat.eps).clamp(0, 1)

    with pytest.raises(UsageError, match=r"the attack 'mine' leaves Linf\(0.2\) on .* of the pixels"):
        evaluate(*problem, atas.Linf(0.2).masked(masks), attacks=[Mine()])


def test_a_mask_that_does_not_fit_is_refused(problem, masks):
    with pytest.raises(DataError, match="does not fit images of shape"):
        evaluate(*problem, atas.Linf(0.2).masked(masks[:7]))


def test_training_with_a_mask_is_refused(masks):
    with pytest.raises(UsageError, match="training has no mask"):
        atas.ATAS(atas.Linf(0.1).masked(masks[0]), 10, (1, 6, 5))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [atas.Linf, atas.L2])
@pytest.mark.parametrize("targets", [None, 2])
def test_kept_points_change_no_other_pixels(problem, tiny, masks, kind, targets):
    """With targets, several chunks and batches, and an image without any pixel that may change."""
    model, x, y = problem
    masks, unchanged = masks.clone(), int((y != 2).nonzero()[3])
    masks[unchanged] = False
    ball = kind(0.3).masked(masks)
    result = evaluate(
        model, x, y, ball, attacks=["fgsm", "pgd3x2", tiny], targets=targets, keep=True, chunk_bytes=3000, batch_size=7
    )
    rows = torch.arange(len(y)) if targets is None else (y != targets).nonzero().flatten()
    image = int((rows == unchanged).nonzero())
    for name, points in result.adversarial.items():
        fixed = ~masks[rows].expand_as(points)
        assert torch.equal(points[fixed], x[rows][fixed]), name
        assert not torch.equal(points, x[rows]), name
        assert bool(result.correct[name][image]) == bool(result.correct["clean"][image])


def test_the_curve_of_an_image_that_cannot_change_is_its_clean_accuracy(problem, masks):
    model, x, y = problem
    masks = masks.clone()
    masks[4:6] = False
    curve = atas.accuracy_curve(model, x, y, atas.Linf(0.2).masked(masks), eps=[0, 0.2], attack="pgd3")
    with torch.no_grad():
        right = model(x).argmax(1) == y
    for image in (4, 5):
        assert (float(curve.smallest[image]) == torch.inf) == bool(right[image])
