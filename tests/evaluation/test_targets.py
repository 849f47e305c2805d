"""Evaluations whose attacks push the images towards target classes."""

import json

import pytest
import torch

import atas
from atas.errors import DataError, UsageError
from atas.evaluation import Evaluation, evaluate


class Pairs(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self._x, self._y = x, y

    def __len__(self):
        return len(self._x)

    def __getitem__(self, i):
        return self._x[i], int(self._y[i])


def test_verdicts_are_whether_the_target_is_predicted(problem, tiny):
    model, x, y = problem
    ball, chosen = atas.Linf(0.1), y != 2
    result = evaluate(model, x, y, ball, attacks=["fgsm", "pgd3x2", tiny, "apgd-t"], targets=2, chunk_bytes=2000)
    assert result.targeted
    assert result.n == int(chosen.sum())
    assert result.protocol["targets"] == {"class": 2, "left_out": int((~chosen).sum())}
    with torch.no_grad():
        assert torch.equal(result.correct["clean"], model(x[chosen]).argmax(1) != 2)
        points = atas.attacks.fgsm(model, x[chosen], y[chosen], ball, targets=2)
        assert torch.equal(result.correct["fgsm"], model(points).argmax(1) != 2)
    assert result.accuracy["worst"] < result.accuracy["clean"]
    same = evaluate(model, Pairs(x, y), None, ball, attacks=["fgsm"], targets=2)
    assert torch.equal(same.correct["fgsm"], result.correct["fgsm"])


@pytest.mark.slow
def test_a_class_per_image(problem, ball):
    model, x, y = problem
    targets = (y + 1) % 4
    result = evaluate(model, x, y, ball, attacks=["apgd-ce"], targets=targets)
    attack = atas.attacks.APGD(ball)
    with torch.no_grad():
        expected = model(attack(model, x, y, targets=targets)).argmax(1) != targets
    assert torch.equal(result.correct["apgd-ce"], expected)
    assert torch.equal(
        evaluate(model, x, y, ball, attacks=["apgd-ce"], targets=targets.numpy()).correct["worst"], expected
    )


def test_the_table_says_what_the_figure_means(problem, ball, tmp_path):
    result = evaluate(*problem, ball, attacks=["fgsm"], targets=1)
    for text in (str(result), result.markdown()):
        assert "not pushed to the target" in text
        assert "target class 1" in text
    assert result.sentence().startswith("Images not pushed to the target in percent")
    result.save(tmp_path / "a.json")
    loaded = Evaluation.load(tmp_path / "a.json")
    assert loaded.targeted
    assert str(loaded) == str(result)
    ordinary = evaluate(*problem, ball, attacks=["fgsm"])
    assert not ordinary.targeted
    assert "targets" not in ordinary.protocol
    assert "accuracy" in str(ordinary)


@pytest.mark.slow
def test_the_progress_of_other_targets_is_not_used(problem, ball, tmp_path):
    path, notes = tmp_path / "p.json", []

    def stop(status):
        if status.attack == "pgd10":
            raise KeyboardInterrupt

    for targets in (1, None):
        with pytest.raises(KeyboardInterrupt):
            evaluate(*problem, ball, attacks=["apgd-ce", "pgd10"], targets=targets, progress=stop, progress_file=path)
        assert json.loads(path.read_text())["identity"]["targets"] == (
            None if targets is None else {"class": 1, "left_out": int((problem[2] == 1).sum())}
        )
    evaluate(*problem, ball, attacks=["apgd-ce", "pgd10"], targets=1, progress=notes.append, progress_file=path)
    assert "targets" in notes[0].note


def test_wrong_targets_are_refused(problem, ball):
    model, x, y = problem
    with pytest.raises(DataError, match="the target of image 0 is its label"):
        evaluate(model, x, y, ball, targets=y)
    with pytest.raises(DataError, match="every image has the label 1, the target class"):
        evaluate(model, x, torch.ones_like(y), ball, targets=1)
    with pytest.raises(DataError, match="targets must be classes that the model has, 0 to 3; got 9 to 9"):
        evaluate(model, x, y, ball, targets=9)
    with pytest.raises(DataError, match="one class per image"):
        evaluate(model, x, y, ball, targets=y[:3])


def test_an_attack_that_takes_no_targets_is_refused(problem, ball):
    class Mine:
        name = "mine"

        def settings(self, threat):
            return {}

        def __call__(self, model, x, y, threat, *, seed=0, index=None):
            return x

    with pytest.raises(UsageError, match="the attack 'mine' takes no targets"):
        evaluate(*problem, ball, attacks=[Mine()], targets=1)


def test_targets_that_are_no_classes_are_refused(problem, ball):
    for wrong in ([1] * 30, 1.0, True, "cat"):
        with pytest.raises(UsageError, match="targets must be one class, or a tensor with one class per image; got"):
            evaluate(*problem, ball, targets=wrong)


def test_no_accuracy_at_chance_is_announced_of_targets(problem, ball):
    """Images that resist are no images that are classified correctly."""
    model, x, y = problem
    with torch.no_grad():
        targets = torch.where(model(x).argmax(1) == y, (y + 1) % 4, model(x).argmax(1))
    notes = []
    for labels in (y, (y + 1) % 4):
        clash = targets == labels
        evaluate(
            model,
            x[~clash],
            labels[~clash],
            ball,
            attacks=["fgsm"],
            targets=targets[~clash],
            progress=lambda status: notes.append(status.note or ""),
        )
    assert not any("at chance" in note for note in notes)


@pytest.mark.parametrize("classes", [2, 11])
def test_success_is_counted_by_a_slow_loop(make_images, classes):
    """In float64, image by image, on the points that were kept."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(24, classes)).double()
    x, targets = make_images(9, (2, 4, 3), dtype=torch.float64), torch.arange(9) % classes
    y = (targets + 1) % classes
    result = evaluate(
        model, x, y, atas.Linf(0.2), attacks=["fgsm", "apgd-t", "fab-t"], targets=targets, keep=True, batch_size=4
    )
    points = atas.attacks.fgsm(model, x, y, atas.Linf(0.2), targets=targets)
    torch.testing.assert_close(result.adversarial["fgsm"], points, rtol=0, atol=1e-12)
    weight, bias = model[1].weight.detach().numpy(), model[1].bias.detach().numpy()
    for name in ("clean", "fgsm", "apgd-t", "fab-t"):
        points = x if name == "clean" else result.adversarial[name]
        for i in range(len(x)):
            logits = weight @ points[i].numpy().ravel() + bias
            pushed = all(logits[targets[i]] > logit for other, logit in enumerate(logits) if other != targets[i])
            assert bool(result.correct[name][i]) != pushed
