"""What an evaluation stores beside its verdicts: it shows those verdicts, and damage is noticed."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import atas
from atas.attacks import PGD
from atas.core.thumbnails import perturbation_thumbnails, thumbnails
from atas.errors import DataError, UsageError
from atas.evaluation import evaluate
from atas.evaluation import examples as module
from atas.evaluation.examples import choose_examples, loss_landscape

ATTACKS = ("fgsm", "pgd10")


_once = []


@pytest.fixture
def stored(problem, ball, tiny):
    """A result with its details, made once."""
    if not _once:
        _once.append(evaluate(*problem, ball, attacks=(*ATTACKS, tiny), batch_size=8, seed=2))
    return _once[0]


class Named(list):
    """A data set of pairs with names of its classes."""

    classes = ("ant", "bee", "cat", "dog")


def test_predictions_agree_with_the_verdicts(problem, stored):
    model, x, y = problem
    details = stored.details
    assert torch.equal(details.labels, y)
    assert list(details.predicted) == ["clean", "fgsm", "pgd10", "tiny"]
    for name, predicted in details.predicted.items():
        assert torch.equal(predicted == y, stored.correct[name]), name
    with torch.no_grad():
        assert torch.equal(details.predicted["clean"], model(x).argmax(1))
        points = atas.attacks.fgsm(model, x, y, stored.threat)
        assert torch.equal(details.predicted["fgsm"], model(points).argmax(1))
        points = PGD(steps=10)(model, x, y, stored.threat, seed=2)
        assert torch.equal(details.predicted["pgd10"], model(points).argmax(1))


@pytest.mark.slow
def test_corruptions_and_kept_images_change_no_details(problem, ball, tiny, stored, tmp_path):
    asked = {"attacks": (*ATTACKS, tiny), "batch_size": 8, "seed": 2}
    result = evaluate(*problem, ball, **asked, corruptions=["contrast", "impulse-noise"], keep=True)
    assert list(result.details.predicted) == list(stored.details.predicted)
    for name, predicted in stored.details.predicted.items():
        assert torch.equal(result.details.predicted[name], predicted)
        found, expected = (one.details.examples.attacks[name] for one in (result, stored))
        assert torch.equal(found.adversarial, expected.adversarial)
    assert torch.equal(result.details.landscapes.loss, stored.details.landscapes.loss)
    result.save(tmp_path / "a.json")
    assert atas.Evaluation.load(tmp_path / "a.json").details is not None


def test_no_details_with_targets_or_a_mask_or_if_they_are_not_wanted(problem, ball):
    masked = ball.masked(torch.ones(problem[1].shape[-2:]))
    for threat, options in ((ball, {"targets": 1}), (masked, {}), (ball, {"details": False})):
        assert evaluate(*problem, threat, attacks=["fgsm"], **options).details is None


def test_examples_are_what_the_attacks_found(problem, stored):
    model, x, y = problem
    examples = stored.details.examples
    rows = examples.index
    assert len(rows) == 24
    assert {stored.broken_by["worst"][row] for row in rows.tolist()} == set(stored.broken_by["worst"])
    assert torch.equal(examples.attacks["clean"].adversarial, thumbnails(x[rows]))
    for name, attack in (("fgsm", atas.attacks.create("fgsm")), ("pgd10", PGD(steps=10))):
        images, points = examples.attacks[name], attack(model, x, y, stored.threat, seed=2)[rows]
        assert (images.adversarial.int() - thumbnails(points).int()).abs().max() <= 1  # batches round differently
        assert (images.perturbation.int() - perturbation_thumbnails(points - x[rows]).int()).abs().max() <= 1
        with torch.no_grad():
            confidence, label = model(points).softmax(1).max(1)
        assert torch.equal(images.label, label)
        torch.testing.assert_close(images.confidence, confidence, rtol=1e-3, atol=1e-4)
    for name, images in examples.attacks.items():
        assert torch.equal(images.label == y[rows], stored.correct[name][rows]), name
        shifted = (images.adversarial.int() - examples.attacks["clean"].adversarial.int()).abs()
        assert shifted.max() <= 4, "within 4/255"
    found = examples.attacks["tiny"]
    unbroken = stored.correct["tiny"][rows] | ~stored.correct["clean"][rows]
    changed = (found.perturbation != 128).flatten(1).any(1)
    assert torch.equal(changed, ~unbroken), "a search that finds nothing changes nothing"


def test_the_sample_is_all_that_is_recorded(problem, ball, monkeypatch, stored, tiny):
    """With a sample of two, all others are searched for again, with the same outcomes."""
    monkeypatch.setattr("atas.evaluation.evaluator.RECORDED_EXAMPLES", 2)
    again = evaluate(*problem, ball, attacks=(*ATTACKS, tiny), batch_size=8, seed=2)
    examples = again.details.examples
    assert len(examples.index) == 24
    assert {0, 15} <= set(examples.index.tolist()), "recorded examples come first"
    for name, images in examples.attacks.items():
        assert torch.equal(images.label == problem[2][examples.index], again.correct[name][examples.index]), name
    assert all(
        torch.equal(again.details.predicted[name], stored.details.predicted[name])
        for name in stored.correct
        if name in ("clean", *ATTACKS)
    )


def test_landscapes_are_the_loss_around_examples(problem, stored):
    model, x, y = problem
    landscapes = stored.details.landscapes
    assert set(landscapes.index.tolist()) <= set(stored.details.examples.index.tolist())
    for row, loss in zip(landscapes.index.tolist(), landscapes.loss, strict=True):
        point = x[row : row + 1].clone().requires_grad_(True)
        here = F.cross_entropy(model(point), y[row : row + 1])
        (gradient,) = torch.autograd.grad(here, point)
        there = (point + stored.threat.eps * gradient.sign()).clamp(0, 1)
        assert float(loss[10, 10]) == pytest.approx(here.item(), rel=1e-4)
        assert float(loss[10, 20]) == pytest.approx(F.cross_entropy(model(there), y[row : row + 1]).item(), rel=1e-4)


def test_a_landscape_ends_at_its_deadline(problem, ball):
    model, x, y = problem
    assert loss_landscape(model, x[:1], y[:1], ball, index=0).shape == (21, 21)
    assert loss_landscape(model, x[:1], y[:1], ball, index=0, deadline=0.0) is None


def test_a_slow_network_gets_no_landscapes(problem, ball, monkeypatch):
    monkeypatch.setattr(module, "_LANDSCAPE_SECONDS", -1.0)
    assert evaluate(*problem, ball, attacks="fgsm").details.landscapes is None


def test_examples_of_every_outcome():
    outcomes = [None] * 50 + ["clean"] * 3 + ["fgsm"]
    chosen = choose_examples(outcomes, 8)
    assert len(chosen) == 8
    assert chosen == sorted(set(chosen))
    assert {outcomes[row] for row in chosen} == {None, "clean", "fgsm"}
    assert choose_examples(["fgsm"], 8) == [0]
    assert choose_examples([None] * 100, 3) == [0, 50, 99]  # data may be sorted by class
    assert choose_examples(["clean", None, "fgsm"], 2) == [0, 1]
    assert choose_examples([None] * 10, 3, preferred=[4, 5]) == [0, 4, 5]


def test_it_is_read_as_it_was_written(stored, tmp_path):
    path = tmp_path / "evaluation-x.json"
    stored.save(path)
    found = atas.Evaluation.load(path).details
    for name in ("labels",):
        assert torch.equal(getattr(found, name), getattr(stored.details, name))
    assert {name: values.tolist() for name, values in found.predicted.items()} == {
        name: values.tolist() for name, values in stored.details.predicted.items()
    }
    assert torch.equal(found.landscapes.loss, stored.details.landscapes.loss)
    for name, images in stored.details.examples.attacks.items():
        for key in ("adversarial", "perturbation", "label", "confidence"):
            assert torch.equal(getattr(found.examples.attacks[name], key), getattr(images, key))
    before = (tmp_path / "evaluation-x.safetensors").read_bytes()
    atas.Evaluation.load(path).save(path)
    assert (tmp_path / "evaluation-x.safetensors").read_bytes() == before


def test_names_of_classes(problem, ball):
    model, x, y = problem
    pairs = Named(zip(x, y.tolist(), strict=True))
    details = evaluate(model, pairs, threat=ball, attacks="fgsm").details
    assert details.classes == ("ant", "bee", "cat", "dog")
    assert details.class_name(1) == "bee"
    too_few = SimpleNamespace(images=x, labels=y, classes=["ant"])
    assert evaluate(model, too_few, threat=ball, attacks="fgsm").details.classes == ()


def test_images_of_other_results_are_not_used(stored, tmp_path):
    """As they are after a kill between the two files, or where a result was copied."""
    stored.save(tmp_path / "a.json")
    other = dataclasses.replace(stored, weights="others")
    other.save(tmp_path / "b.json")
    (tmp_path / "b.safetensors").replace(tmp_path / "a.safetensors")
    assert atas.Evaluation.load(tmp_path / "a.json").details is None
    assert atas.Evaluation.load(tmp_path / "b.json").details is None


@pytest.mark.parametrize("place", [0.02, 0.3, 0.6, 0.99])
def test_damage_is_noticed(stored, tmp_path, place):
    stored.save(tmp_path / "result.json")
    path = tmp_path / "result.safetensors"
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 16
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"result\.safetensors is damaged"):
        atas.Evaluation.load(tmp_path / "result.json")
    assert atas.Evaluation.load(tmp_path / "result.json", details=False).accuracy == stored.accuracy
    stored.save(tmp_path / "result.json")  # a damaged file is replaced
    assert atas.Evaluation.load(tmp_path / "result.json").details is not None


@pytest.mark.parametrize("content", [b"", b"nothing", b"\xff" * 100])
def test_no_safetensors_at_all(stored, tmp_path, content):
    stored.save(tmp_path / "result.json")
    (tmp_path / "result.safetensors").write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        atas.Evaluation.load(tmp_path / "result.json")


def test_weights_are_not_replaced(stored, tmp_path):
    path = tmp_path / "net.safetensors"
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(UsageError, match="which holds something else"):
        stored.save(tmp_path / "net.json")
    assert torch.equal(load_file(path)["weight"], torch.ones(2))
    assert not (tmp_path / "net.json").exists()
    with pytest.raises(UsageError, match=r"would replace .*net\.safetensors, which holds something else"):
        stored.save(path)
    with pytest.raises(UsageError, match="a result is a JSON file"):
        stored.save(tmp_path / "new.safetensors")
    dataclasses.replace(stored, details=None).save(tmp_path / "net.json")
    assert atas.Evaluation.load(tmp_path / "net.json").details is None


def test_the_json_is_the_same_with_and_without(stored, tmp_path):
    stored.save(tmp_path / "with.json")
    dataclasses.replace(stored, details=None).save(tmp_path / "without.json")
    assert (tmp_path / "with.json").read_bytes() == (tmp_path / "without.json").read_bytes()
    assert not (tmp_path / "without.safetensors").exists()


class Flat(torch.nn.Module):
    """No gradient, and logits that are NaN for dark images."""

    def forward(self, x):
        mean = x.flatten(1).mean(1, keepdim=True).detach()
        return torch.where(mean < 0.5, torch.nan, torch.cat([mean, 1 - mean], 1))


class Dice(torch.nn.Module):
    def forward(self, x):
        return torch.rand(len(x), 3) + 0 * x.flatten(1)[:, :3]


@pytest.mark.parametrize("model", [Flat(), Dice()])
def test_models_without_gradients_or_with_random_outputs(model, ball, images, tiny, tmp_path):
    result = evaluate(model, images, torch.zeros(30, dtype=torch.int64), ball, attacks=("fgsm", "pgd10x2", tiny))
    for name, predicted in result.details.predicted.items():
        assert torch.equal(predicted == 0, result.correct[name])
    result.save(tmp_path / "result.json")
    assert atas.Evaluation.load(tmp_path / "result.json").details is not None
    if isinstance(model, Flat):
        assert -1 in result.details.predicted["clean"].tolist()


class Moody:
    """An attack of a user's own that fails when it is called again."""

    name = "moody"

    def __init__(self):
        self.calls = 0

    def settings(self, threat):
        return {}

    def __call__(self, model, x, y, threat, *, seed=0, index=None):
        self.calls += 1
        if self.calls > 4:
            raise RuntimeError("enough")
        return x


def test_an_attack_that_fails_later_loses_no_verdicts(problem, ball, monkeypatch):
    monkeypatch.setattr("atas.evaluation.evaluator.RECORDED_EXAMPLES", 3)
    result = evaluate(*problem, ball, attacks=[Moody()], batch_size=8)
    assert len(result.details.examples.index) == 3
    assert result.accuracy["moody"] == result.accuracy["clean"]


@pytest.mark.slow
def test_progress_keeps_predictions(problem, ball, tmp_path, stored, tiny):
    """Also where the file is of a version that did not write them."""
    file = tmp_path / "progress.json"
    options = {"attacks": (*ATTACKS, tiny), "batch_size": 8, "seed": 2, "progress_file": file}

    class StopError(Exception):
        pass

    def stop(status):
        if status.note is None and status.stage == "fab-t":
            raise StopError

    with pytest.raises(StopError):
        evaluate(*problem, ball, progress=stop, **options)
    resumed = evaluate(*problem, ball, **options)
    for name in ("clean", *ATTACKS):
        assert torch.equal(resumed.details.predicted[name], stored.details.predicted[name])
    assert len(resumed.details.examples.index) == 24
    assert all(torch.equal(resumed.correct[name], stored.correct[name]) for name in stored.correct)

    content = json.loads(file.read_text())
    del content["checksum"]
    for record in content["records"].values():
        del record["predicted"]
    file.write_text(json.dumps(content))
    old = evaluate(*problem, ball, **options)
    assert all(torch.equal(old.correct[name], stored.correct[name]) for name in stored.correct)
    assert list(old.details.predicted) == ["clean"]  # which is computed again
    assert len(old.details.examples.index) == 24
    old.save(tmp_path / "old.json")
    assert atas.Evaluation.load(tmp_path / "old.json").details.predicted.keys() == {"clean"}


def test_clean_images_alone(problem, ball):
    details = evaluate(*problem, ball, attacks=()).details
    assert details.landscapes is None
    assert list(details.examples.attacks) == ["clean"]


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [512, 6])
def test_a_resumed_evaluation_shows_the_same_examples(problem, ball, tiny, monkeypatch, tmp_path, recorded):
    monkeypatch.setattr("atas.evaluation.evaluator.RECORDED_EXAMPLES", recorded)
    options = {"attacks": ("fgsm", tiny, "pgd10"), "batch_size": 8, "chunk_bytes": 4000, "seed": 2}
    expected = evaluate(*problem, ball, **options).details

    def stop(status):
        if status.note is None and status.stage == "fab-t":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(*problem, ball, progress=stop, progress_file=tmp_path / "p.json", **options)
    found = evaluate(*problem, ball, progress_file=tmp_path / "p.json", **options).details
    assert torch.equal(found.examples.index, expected.examples.index)
    assert torch.equal(found.landscapes.index, expected.landscapes.index)
    assert all(torch.equal(found.predicted[name], values) for name, values in expected.predicted.items())


def test_images_of_other_verdicts_are_not_used(stored, tmp_path):
    """Of the same weights and images, as after a kill while a result with another seed was written."""
    stored.save(tmp_path / "a.json")
    others = {name: ~verdicts for name, verdicts in stored.correct.items()}
    dataclasses.replace(stored, correct=others, broken_by={}).save(tmp_path / "b.json")
    (tmp_path / "b.safetensors").replace(tmp_path / "a.safetensors")
    assert atas.Evaluation.load(tmp_path / "a.json").details is None


@pytest.mark.parametrize("index", [[30], [-1], [3, 3], [5, 4]])
def test_positions_that_are_none_are_refused(stored, tmp_path, index):
    details = stored.details
    rows = range(len(index))
    attacks = {
        name: dataclasses.replace(images, **{key: value[rows] for key, value in vars(images).items()})
        for name, images in details.examples.attacks.items()
    }
    examples = dataclasses.replace(details.examples, index=torch.tensor(index), attacks=attacks)
    dataclasses.replace(stored, details=dataclasses.replace(details, examples=examples)).save(tmp_path / "a.json")
    with pytest.raises(DataError, match=r"damaged .examples\.index is not a list of positions"):
        atas.Evaluation.load(tmp_path / "a.json")
