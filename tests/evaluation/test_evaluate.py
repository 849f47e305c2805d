"""What `evaluate` finds, and that it finds the same whatever the form of its inputs and the state of its caller."""

import copy
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.fake_device import work_elsewhere
from torch import nn
from torch.utils.data import Subset, TensorDataset

import atas
from atas import attacks
from atas.attacks import APGD, FAB, AttackEnsemble
from atas.errors import DataError, UsageError
from atas.evaluation import accuracy_curve, backend, evaluate
from atas.evaluation import curve as curve_module
from atas.evaluation.inputs import ChunkReader, open_source


def verdicts(result):
    return {name: value.tolist() for name, value in result.correct.items()}


def test_a_verdict_is_the_prediction_at_the_attack_s_point(problem, ball, result):
    model, x, y = problem
    model.eval()
    expected = {
        "clean": model(x).argmax(1) == y,
        "fgsm": model(attacks.fgsm(model, x, y, ball)).argmax(1) == y,
        "pgd10": model(attacks.pgd(model, x, y, ball, seed=2)).argmax(1) == y,
    }
    expected["worst"] = expected["clean"] & expected["fgsm"] & expected["pgd10"]
    assert list(result.correct) == ["clean", "fgsm", "pgd10", "worst"]
    assert verdicts(result) == {name: value.tolist() for name, value in expected.items()}
    assert all(value.dtype == torch.bool and value.device.type == "cpu" for value in result.correct.values())
    assert result.accuracy["clean"] == 0.9
    assert 0.1 < result.accuracy["pgd10"] < 0.8, "the case must tell attacks apart"


def test_worst_is_no_better_than_any(result):
    assert all(result.accuracy["worst"] <= accuracy for accuracy in result.accuracy.values())


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 7, 30, 1000])
def test_verdicts_do_not_depend_on_the_batch_size(problem, ball, batch_size):
    model, x, y = problem
    expected = evaluate(model, x, y, ball, attacks=("pgd10x2",), batch_size=11)
    found = evaluate(model, x, y, ball, attacks=("pgd10x2",), batch_size=batch_size)
    assert verdicts(found) == verdicts(expected)
    assert found.data == expected.data
    assert found.protocol["batch_size"] == batch_size


def test_verdicts_do_not_depend_on_other_attacks(problem, ball, result):
    alone = evaluate(*problem, ball, attacks=["pgd10"], seed=2)
    assert torch.equal(alone.correct["pgd10"], result.correct["pgd10"])
    turned = evaluate(*problem, ball, attacks=["pgd10", "clean", "fgsm", "pgd10"], seed=2)
    assert list(turned.correct) == ["clean", "pgd10", "fgsm", "worst"]
    assert {k: turned.correct[k].tolist() for k in result.correct} == verdicts(result)


def test_a_longer_pgd_goes_on_where_a_shorter_one_ended(problem, ball):
    model, passes = problem[0], []
    hook = model.register_forward_pre_hook(lambda _, arguments: passes.append(len(arguments[0])))
    try:
        apart = [evaluate(*problem, ball, attacks=[name], seed=2) for name in ("pgd4", "pgd10", "pgd30x2")]
        cost, _ = sum(passes), passes.clear()
        both = evaluate(*problem, ball, attacks=["pgd4", "pgd10", "pgd30x2"], seed=2)
    finally:
        hook.remove()
    for alone in apart:
        name = list(alone.correct)[1]
        assert torch.equal(both.correct[name], alone.correct[name])
        assert both.queries[name] == alone.queries[name]
    assert sum(passes) <= cost - 30 * (4 + 10)


def test_restarts_are_the_worst_over_single_restarts(problem, ball):
    model, x, y = problem
    several = {n: evaluate(model, x, y, ball, attacks=[f"pgd2x{n}"]).correct[f"pgd2x{n}"] for n in (1, 2, 3, 4)}
    model.eval()
    single = []
    for restart in range(4):
        points = ball.random_start(x, atas.core.rng.CounterRNG(0, torch.tensor(restart), torch.arange(len(x))))
        for _ in range(2):
            gradient, _ = atas.core.autograd.input_gradient(model, points, y)
            points = ball.project(ball.step(points, gradient, ball.eps / 5), x)
        single.append(model(points).argmax(1) == y)
    for n, found in several.items():
        assert torch.equal(found, torch.stack(single[:n]).all(0))
    assert several[4].sum() < several[1].sum(), "the case must be one where restarts help"


def test_a_linear_model_s_robust_accuracy_is_found_exactly(generator):
    """With two classes: right by more than eps times the sum of the weights' differences; far from the box's sides."""
    eps, n = 0.05, 300
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 2))
    model[1].weight.data.normal_(generator=generator)
    model[1].bias.data = -model[1].weight.data.sum(1) / 2
    x = 0.1 + 0.8 * torch.rand(n, 2, 2, 2, generator=generator)
    y = torch.randint(2, (n,), generator=generator)
    weights = model[1].weight.data.double()
    difference = (x.flatten(1).double() - 0.5) @ (weights[0] - weights[1])
    margin = difference * (1 - 2 * y) - eps * (weights[0] - weights[1]).abs().sum()
    assert margin.abs().min() > 1e-4
    result = evaluate(model, x, y, atas.Linf(eps), attacks=["pgd10"])
    assert torch.equal(result.correct["pgd10"], margin > 0)
    assert result.accuracy["pgd10"] == (margin > 0).double().mean()


@pytest.mark.parametrize(
    "form",
    [
        lambda u, y: (u, y),
        lambda u, y: (u.numpy(), y.numpy()),
        lambda u, y: ((u.float() / 255).numpy().astype("f8"), y.numpy().astype("u1")),
        lambda u, y: (u.float() / 255, y.tolist()),
        lambda u, y: ((u.float() / 255).requires_grad_(), y.int()),
        lambda u, y: (np.flip(np.flip(u.numpy(), 0).copy(), 0), y),
        lambda u, y: ((u.float() / 255).to(memory_format=torch.channels_last), y),
        lambda u, y: (TensorDataset(u.float() / 255, y), None),
        lambda u, y: (TensorDataset(u, y), None),
        lambda u, y: (Subset(TensorDataset(u, y), range(len(u))), None),
        lambda u, y: ([(image.numpy(), int(label)) for image, label in zip(u, y, strict=True)], None),
        lambda u, y: (SimpleNamespace(images=u, labels=y), None),
        lambda u, y: (atas.data.Split(u, y, tuple("abcd")), None),
    ],
    ids=[
        "uint8",
        "numpy-uint8",
        "numpy-float64",
        "list-of-labels",
        "requires-grad",
        "backwards",
        "channels-last",
        "dataset",
        "dataset-uint8",
        "subset",
        "pairs",
        "images-and-labels",
        "split",
    ],
)
def test_every_form_of_the_data_gives_the_same(problem, images, ball, result, form):
    model, _, y = problem
    found = evaluate(model, *form(images, y), ball, attacks=("fgsm", "pgd10"), batch_size=8, seed=2)
    assert verdicts(found) == verdicts(result)
    assert found.data == result.data
    assert found.weights == result.weights


def test_arrays_that_cannot_be_written_are_read(problem, images, ball):
    frozen = images.numpy().copy()
    frozen.flags.writeable = False
    model, _, y = problem
    assert evaluate(model, frozen, y, ball, attacks=()).accuracy["clean"] == 0.9


def test_float64_models_are_evaluated_in_float64(problem, images, ball):
    model, _, y = problem
    seen = []
    model.double().register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    found = evaluate(model, images, y, ball, attacks=["fgsm"])
    assert set(seen) == {torch.float64}
    assert found.protocol["precision"] == "float64"
    assert found.data == evaluate(model.float(), images, y, ball, attacks=[]).data


def test_a_model_without_weights_is_evaluated(ball):
    class Mean(nn.Module):
        def forward(self, x):
            mean = x.mean((1, 2, 3))
            return torch.stack([mean, 1 - mean], 1)

    x = torch.tensor([0.2, 0.6, 0.505]).view(3, 1, 1, 1).expand(3, 1, 2, 2)
    found = evaluate(Mean(), x, torch.tensor([1, 0, 0]), ball, attacks=["pgd10"])
    assert found.correct["pgd10"].tolist() == [True, True, False]
    assert found.correct["clean"].all()


def test_the_mode_and_flags_of_the_model_are_restored_also_on_errors(problem, ball):
    model, x, y = problem
    model.train()
    model.bn1.eval()
    model.fc.bias.requires_grad_(False)
    modes, flags = ([m.training for m in model.modules()], [p.requires_grad for p in model.parameters()])
    evaluate(model, x, y, ball, attacks=["fgsm"])

    def stop(status):
        if status.attack == "pgd10":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(model, x, y, ball, progress=stop)
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())


def test_training_mode_does_not_change_the_verdicts(problem, ball, result):
    model, x, y = problem
    found = evaluate(model.train(), x, y, ball, attacks=("fgsm", "pgd10"), seed=2)
    assert verdicts(found) == verdicts(result)
    with torch.inference_mode():
        found = evaluate(model, x.clone(), y.clone(), ball, attacks=("fgsm", "pgd10"), seed=2)
    assert verdicts(found) == verdicts(result)


def test_the_protocol_says_how_it_was_measured(problem):
    found = evaluate(*problem, atas.Linf(8 / 255), attacks=("pgd50x2",), step_size=2 / 255, seed=9, batch_size=20)
    assert found.protocol["attacks"]["clean"] == {}
    assert found.protocol["attacks"]["pgd50x2"] == {
        "steps": 50,
        "step_size": "2/255",
        "step_size_value": 2 / 255,
        "restarts": 2,
        "start": "uniform in the ball",
    }
    assert {k: found.protocol[k] for k in ("seed", "precision", "tf32", "mode", "image_shape", "batch_size")} == {
        "seed": 9,
        "precision": "float32",
        "tf32": False,
        "mode": "eval",
        "image_shape": [3, 6, 5],
        "batch_size": 20,
    }
    assert {"command", "atas", "torch", "python", "device", "cuda", "date"} <= set(found.environment)
    assert found.environment["atas"] == atas.__version__
    assert found.environment["date"].endswith("+00:00")
    assert list(found.seconds) == ["clean", "pgd50x2", "worst"]
    assert found.seconds["worst"] == found.seconds["clean"] + found.seconds["pgd50x2"] > 0
    assert (found.protocol["search_precision"], found.protocol["processes"]) == ("float32", 1)


def test_float32_for_the_search_can_be_asked_for(problem, ball, result):
    found = evaluate(*problem, ball, attacks=("fgsm", "pgd10"), seed=2, precision="float32")
    assert verdicts(found) == verdicts(result)
    assert found.protocol["search_precision"] == "float32"


def test_queries_are_the_passes_that_the_attack_made(problem, ball):
    model, x, y = problem
    found = evaluate(model, x, y, ball, attacks=("fgsm", "pgd10", "pgd5x3"), batch_size=7)
    right = int(evaluate(model, x, y, ball, attacks=["pgd5"]).correct["pgd5"].sum())
    assert {name: found.queries[name] for name in ("clean", "fgsm", "pgd10")} == {"clean": 0, "fgsm": 30, "pgd10": 300}
    assert 150 + 5 * right <= found.queries["pgd5x3"] <= 150 + 10 * right
    assert found.queries["worst"] == sum(found.queries[name] for name in ("clean", "fgsm", "pgd10", "pgd5x3"))


def test_images_that_do_not_fit_into_memory_at_once_give_the_same(problem, ball, result):
    class Watched(TensorDataset):
        def __getitem__(self, position):
            reads.append(position)
            return super().__getitem__(position)

    reads, (model, x, y) = [], problem
    chunk_bytes = 11 * 3 * 6 * 5 * 4
    found = evaluate(model, Watched(x, y), threat=ball, attacks=("fgsm", "pgd10"), seed=2, chunk_bytes=chunk_bytes)
    assert verdicts(found) == verdicts(result)
    assert (found.data, found.queries, found.broken_by) == (result.data, result.queries, result.broken_by)
    assert len(reads) > 2 * 30, "read for the hash, and read again chunk by chunk"


def test_hashes_follow_weights_and_data(problem, ball, result):
    model, x, y = problem
    y2, x2 = y.clone(), x.clone()
    y2[5] += 1
    x2[4, 1, 1, 1] += 1e-3

    def hashes(*args):
        found = evaluate(*args, ball, attacks=[])
        return found.weights, found.data

    assert hashes(model, x, y) == (result.weights, result.data)
    assert hashes(nn.Sequential(model), x, y) == (result.weights, result.data)
    assert hashes(model, x2, y)[1] != result.data
    assert hashes(model, x, y2 % 4)[1] != result.data
    model.bn1.running_mean += 1e-3
    assert hashes(model, x, y)[0] != result.weights


def test_an_attack_of_one_s_own_can_be_given(problem, ball):
    class Grey:
        name = "grey"

        def settings(self, threat):
            return {"eps": threat.eps}

        def __call__(self, model, x, y, threat, *, seed=0, index=None):
            return threat.project(torch.full_like(x, 0.5), x)

    model, x, y = problem
    found = evaluate(model, x, y, ball, attacks=["fgsm", Grey()])
    expected = model(x + (0.5 - x).clamp(-ball.eps, ball.eps)).argmax(1) == y
    assert torch.equal(found.correct["grey"], expected)
    assert found.protocol["attacks"]["grey"] == {"eps": ball.eps}
    for name in ("fgsm", "worst", "clean", "autoattack", "autoattack-rand"):
        Grey.name = name
        with pytest.raises(UsageError, match=f"the name '{name}' is taken"):
            evaluate(model, x, y, ball, attacks=["fgsm", Grey()])
    Grey.name = "fgsm"
    with pytest.raises(UsageError, match="the name 'fgsm' is taken"):
        evaluate(model, x, y, ball, attacks=[Grey(), "fgsm"])
    with pytest.raises(UsageError, match="the name 'autoattack' is taken"):
        evaluate(model, x, y, ball, attacks=[AttackEnsemble("autoattack", (APGD(iterations=2), FAB(iterations=2)))])
    Grey.name = "autoattack-mine"
    assert not evaluate(model, x, y, ball, attacks=[Grey()]).has_autoattack
    with pytest.raises(UsageError, match=r"an attack must be an object; got the class Grey: create it, Grey\(\)"):
        evaluate(model, x, y, ball, attacks=[Grey])


@pytest.mark.parametrize("name", ["", " ", None, 5, ["a"], b"a", "a\nb", "\x1b[31m", "\ud800", "a\0b"])
def test_names_that_no_file_can_hold_are_refused_before_the_work(problem, ball, name):
    class Mine(APGD):
        pass

    Mine.name = name
    seen = []
    for attack in (SimpleNamespace(name=name, settings=str, __call__=print), AttackEnsemble("both", (Mine(), FAB()))):
        with pytest.raises(UsageError, match=r"the name of .* must be a text that can be printed; got"):
            evaluate(*problem, ball, attacks=[attack], progress=seen.append)
    assert not seen
    Mine.name = "clean"
    with pytest.raises(UsageError, match="the name 'clean' is taken; rename the search of 'both'"):
        evaluate(*problem, ball, attacks=[AttackEnsemble("both", (Mine(), FAB()))])


@dataclass(frozen=True)
class Mine:
    """An attack that returns what it is told to."""

    change: Callable[[torch.Tensor], object]
    name = "mine"

    def settings(self, threat):
        return {}

    def __call__(self, model, x, y, threat, *, seed=0, index=None):
        return self.change(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x + 5 / 255, r"the attack 'mine' leaves Linf\(4/255\) or \[0, 1\]"),
        (lambda x: x - 3 / 255, r"leaves Linf\(4/255\) or \[0, 1\]"),
        (lambda x: x.mul(torch.nan), r"leaves Linf\(4/255\) or \[0, 1\]"),
        (lambda x: x[:1], r"must return images of the shape of its input, \(30, 3, 6, 5\); got \(1, 3, 6, 5\)"),
        (lambda x: None, "got NoneType"),
    ],
)
def test_a_point_outside_of_the_ball_is_no_adversarial_input(problem, ball, change, message):
    with pytest.raises(UsageError, match=message):
        evaluate(*problem, ball, attacks=[Mine(change)])


def test_worst_counts_clean_mistakes_that_an_attack_corrects(ball):
    """An attack of one's own may move a misclassified image to the right side of the boundary."""

    class Mean(nn.Module):
        def forward(self, x):
            mean = x.mean((1, 2, 3))
            return torch.stack([mean, 1 - mean], 1)

    x = torch.tensor([0.495, 0.6]).view(2, 1, 1, 1).expand(2, 1, 2, 2)
    found = evaluate(Mean(), x, torch.tensor([0, 0]), ball, attacks=[Mine(lambda x: x + 2 / 255)])
    assert verdicts(found) == {"clean": [False, True], "mine": [True, True], "worst": [False, True]}
    assert found.accuracy["worst"] == 0.5


def test_an_attack_cannot_change_the_images(problem, ball, result):
    model, x, y = problem
    before = x.clone()
    for change in (lambda x: x.add_(4 / 255).clamp_(0, 1), lambda x: x.double() + 1e-8):
        found = evaluate(model, x, y, ball, attacks=[Mine(change), "fgsm", "pgd10"], seed=2)
        assert torch.equal(x, before)
        assert all(torch.equal(found.correct[name], result.correct[name]) for name in ("clean", "fgsm", "pgd10"))
    assert torch.equal(found.correct["mine"], found.correct["clean"])


def test_one_name_may_stand_alone(problem, ball):
    assert list(evaluate(*problem, ball, attacks="fgsm").correct) == ["clean", "fgsm", "worst"]


def test_names_may_be_one_text_as_on_the_command_line(problem, ball):
    assert list(evaluate(*problem, ball, attacks="fgsm, pgd2").correct) == ["clean", "fgsm", "pgd2", "worst"]


def test_a_model_that_cannot_take_the_images_is_named(problem, ball):
    _, x, y = problem
    model = nn.Sequential(nn.Flatten(), nn.Linear(7, 4))
    with pytest.raises(
        UsageError, match=r"cannot take float32 images of shape \(\d+, \d+, \d+\): mat1 and mat2"
    ) as caught:
        evaluate(model, x, y, ball)
    assert "\n" not in str(caught.value)
    assert model.training


def test_a_function_is_no_model(problem, ball):
    model, x, y = problem
    with pytest.raises(UsageError, match=r"must be a torch.nn.Module; got function: wrap it"):
        evaluate(lambda point: model(point), x, y, ball)


def test_a_model_whose_logits_are_not_numbers_is_never_right(problem, ball):
    model, x, y = problem
    model.fc.weight.data.fill_(float("nan"))
    assert set(evaluate(model, x, torch.zeros_like(y), ball, attacks=["fgsm"]).accuracy.values()) == {0.0}


def _with(tensor, value):
    tensor = tensor.clone()
    tensor.view(-1)[-1] = value
    return tensor


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x, y: (x * 255, y), r"the images leave \[0, 1\].* divide uint8 images by 255"),
        (lambda x, y: (_with(x, float("nan")), y), "NaN or infinite"),
        (lambda x, y: (x.long(), y), r"float in \[0, 1\] or uint8; got torch.int64"),
        (lambda x, y: (x[0], y), "one number an image|must be a batch"),
        (lambda x, y: (x, _with(y, 4)), r"outside of 0\.\.3"),
        (lambda x, y: (x, _with(y, -1)), r"outside of 0\.\.3"),
        (lambda x, y: (x, y[:-1]), r"labels must be one number an image, shape \(30,\); got \(29,\)"),
        (lambda x, y: (x, y.float()), "labels must be integers"),
        (lambda x, y: (x, "abc"), "cannot convert the labels \\(str\\) to a tensor"),
        (lambda x, y: (np.array([None] * 30), y), "cannot convert the images \\(an array of object\\) to a tensor"),
        (lambda x, y: (x, None), "labels are missing"),
        (lambda x, y: (x[:0], y[:0]), "the data set is empty"),
        (lambda x, y: ([], None), "the data set is empty"),
        (lambda x, y: (TensorDataset(x, y), y), "must be a tensor or an array; got TensorDataset"),
        (lambda x, y: (iter([]), None), "cannot evaluate on list_iterator"),
        (lambda x, y: (TensorDataset(x), None), "item 0 of the dataset is not a pair"),
        (lambda x, y: (TensorDataset(x * 255, y), None), r"the images leave \[0, 1\]"),
        (lambda x, y: (TensorDataset(x.long(), y), None), "got torch.int64"),
        (lambda x, y: ([(x[0], 1), (x[1, :, 1:], 1)], None), r"image 1 has the shape \(3, 5, 5\)"),
        (lambda x, y: ([("cat.png", 1)], None), "image 0 of the dataset is a str"),
        (lambda x, y: ([(x[0], 1.0)], None), "labels must be integers"),
    ],
)
def test_wrong_data_is_refused(problem, ball, spoil, message):
    model, x, y = problem
    with pytest.raises(DataError, match=message) as caught:
        evaluate(model, *spoil(x, y), ball)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attacks": ["pgd10", "autoatack"]}, "unknown attack 'autoatack'"),
        ({"threat": None}, "the threat model is missing"),
        ({"threat": 8 / 255}, r"the threat model cannot be 0.031.*threat=atas.Linf\(8/255\)"),
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
        ({"step_size": -1.0}, "step_size must be a number above zero"),
        ({"device": "meta"}, r"the model is on cpu and is never moved: move it with model.to\('meta'\)"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not available"),
        ({"precision": "float16"}, "unknown precision 'float16'; .* Known: auto, float32"),
        ({"shard": True}, "shard=True needs a process group"),
    ],
)
def test_wrong_calls_are_refused(problem, ball, change, message):
    with pytest.raises(UsageError, match=message):
        evaluate(*problem, **{"threat": ball, **change})


def test_the_threat_in_place_of_the_labels_is_refused(problem, ball):
    model, x, y = problem
    with pytest.raises(UsageError, match="the threat model is missing"):
        evaluate(model, TensorDataset(x, y), ball)


def test_models_that_no_gradient_can_go_through_are_refused(problem, ball):
    model, x, y = problem
    with torch.inference_mode():
        made_there = copy.deepcopy(model)
    for wrong, message in (
        (model.forward, r"the model must be a torch\.nn\.Module; got method"),
        (made_there, r"the model was made in torch\.inference_mode\(\)"),
    ):
        with pytest.raises(UsageError, match=message):
            evaluate(wrong, x, y, ball)
        with pytest.raises(UsageError, match=message):
            attacks.pgd(wrong, x, y, ball)


class Wrapped(nn.Module):
    """A model that something is done to an image before."""

    def __init__(self, model, before):
        super().__init__()
        self.model, self.before = model, before

    def forward(self, x):
        return self.model(self.before(x))


@pytest.mark.parametrize(
    "before",
    [
        lambda x: x.detach(),
        lambda x: torch.from_numpy(x.detach().numpy().round(2)),
        torch.inference_mode()(lambda x: x.mul(1)),
    ],
    ids=["detached", "numpy", "inference-mode"],
)
@pytest.mark.slow
def test_a_model_without_gradients_gets_a_warning_and_verdicts(problem, ball, tiny, before):
    model, x, y = problem
    wrapped = Wrapped(model, before)
    found = evaluate(wrapped, x, y, ball, attacks=["fgsm", "pgd10", tiny])
    assert "zero-gradients" in {warning.kind for warning in found.warnings}
    assert torch.equal(found.correct["fgsm"], found.correct["clean"])
    assert found.stages["tiny"][3].num_correct < found.stages["tiny"][2].num_correct, "Square needs no gradient"
    assert not wrapped._forward_hooks, "the model is left as it was"


def test_a_model_that_writes_into_its_input_is_refused(problem, ball):
    model, x, y = problem
    before = x.clone()
    with pytest.raises(UsageError, match=r"the model modifies its input in place.* x = x\.clone\(\)"):
        evaluate(Wrapped(model, lambda x: x.sub_(0.5)), x, y, ball)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision_are_refused(problem, ball, dtype):
    model, x, y = problem
    with pytest.raises(UsageError, match=r"verdicts need float32: pass model\.float\(\)"):
        evaluate(model.to(dtype), x, y, ball)


@pytest.mark.parametrize("output", [lambda z: (z, z), lambda z: z[:, :1], lambda z: z.sum(1), lambda z: {"logits": z}])
def test_models_that_return_no_logits_are_refused(problem, ball, output):
    model, x, y = problem
    model.register_forward_hook(lambda _, __, logits: output(logits))
    with pytest.raises(UsageError, match="the model must return"):
        evaluate(model, x, y, ball)


def test_checks_see_all_classes_of_a_sorted_set():
    """A folder is read class by class."""
    x, y = torch.rand(1000, 1, 2, 2), torch.arange(1000) // 100
    for held in (False, True):
        reader = ChunkReader(open_source(x, y), torch.float32)
        if held:
            reader.read(range(1000))
        rows, some, labels = reader.sample(256)
        assert labels.unique().tolist() == list(range(10))
        assert 200 <= len(some) <= 256
        assert torch.equal(some, x[list(rows)])
    assert len(ChunkReader(open_source(x[:7], y[:7]), torch.float32).sample(256)[0]) == 7


def test_a_budget_of_zero_has_a_line_too(problem):
    model, x, y = problem
    assert "eps = 0" in evaluate(model, x, y, atas.Linf(0.0), attacks=["pgd10"]).sentence()


@pytest.mark.gpu
def test_evaluate_finds_the_same_on_a_gpu(problem, images, ball, result):
    model, _, y = problem
    model.cuda()
    for x, labels in ((images, y), (images.cuda(), y.cuda())):
        found = evaluate(model, x, labels, ball, attacks=("fgsm", "pgd10"), batch_size=8, seed=2)
        assert verdicts(found) == verdicts(result)
        assert (found.data, found.weights) == (result.data, result.weights)
        assert found.environment["device"] == torch.cuda.get_device_name()
    with pytest.raises(UsageError, match="the model is on cuda:0 and is never moved"):
        evaluate(model, images, y, ball, device="cpu")
    assert evaluate(model, images, y, ball, attacks=[], device="cuda").protocol["batch_size"] == 1024


@pytest.fixture
def every_kind(problem, ball, tiny):
    """Evaluate with targets, masks, kept images, corruptions and details, and along a curve, on a device."""

    def run(device):
        model, x, y = problem
        mask = torch.zeros(len(x), 1, *x.shape[2:])
        mask[..., :3] = 1
        attacks = ("fgsm", "pgd10", tiny)
        cases = [
            {"attacks": attacks, "keep": True, "corruptions": ["gaussian-noise", "defocus-blur", "pixelate", "jpeg"]},
            {"attacks": attacks, "targets": 1},
            {"attacks": attacks, "threat": ball.masked(mask)},
            {"attacks": ("pgd10", APGD(iterations=8)), "threat": atas.L2(0.2).masked(mask[0])},
        ]
        model = copy.deepcopy(model).to(device)
        results = [evaluate(model, x, y, **{"threat": ball, **case}) for case in cases]
        curve = accuracy_curve(model, x, y, ball, eps=[0, 1 / 255, 4 / 255], attack="pgd10")
        assert results[0].details.landscapes is not None
        assert {type(points) for points in results[0].adversarial.values()} == {torch.Tensor}
        assert {points.device.type for points in results[0].adversarial.values()} == {"cpu"}
        return [*(verdicts for result in results for verdicts in result.correct.values()), curve.smallest < torch.inf]

    return run


@pytest.mark.slow
def test_every_kind_of_evaluation_finds_the_same_on_another_device(every_kind, monkeypatch):
    """On a fake one, which refuses tensors of two devices in one operation."""
    expected = every_kind("cpu")
    with work_elsewhere(monkeypatch, backend, curve_module) as device:
        found = every_kind(device)
    assert all(map(torch.equal, found, expected))


@pytest.mark.gpu
def test_every_kind_of_evaluation_finds_the_same_on_a_gpu(every_kind):
    """Two images in thirty may differ."""
    for expected, found in zip(every_kind("cpu"), every_kind("cuda"), strict=True):
        assert int((found != expected).sum()) <= 2


def test_evaluations_in_threads_are_each_as_alone(small_net):
    """The mode of a model and the precision of PyTorch belong to the process."""
    model, x = small_net().train(), torch.rand(6, 3, 8, 8)
    y = torch.arange(6) % 4
    expected = evaluate(model, x, y, atas.Linf(0.1), attacks=("pgd2",))
    seen = []
    model.register_forward_hook(lambda module, *_: seen.append(module.training))
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: evaluate(model, x, y, atas.Linf(0.1), attacks=("pgd2",)), range(3)))
    assert all(torch.equal(result.correct["pgd2"], expected.correct["pgd2"]) for result in results)
    assert not any(seen)
    assert model.training


def test_a_waiting_evaluation_says_so(small_net):
    model, x, y, said, began = small_net().eval(), torch.rand(2, 3, 8, 8), torch.arange(2), [], threading.Event()

    def other(status):
        began.set()
        while not said:
            time.sleep(0.001)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(evaluate, model, x, y, atas.Linf(0.1), attacks=("pgd2",), progress=other)
        began.wait()
        evaluate(model, x, y, atas.Linf(0.1), attacks=("pgd2",), progress=lambda status: said.append(status.note))
        first.result()
    assert said[0] == "waiting for another evaluation in this process ..."


def test_an_attack_gets_the_positions_of_its_images(problem, ball):
    """In several chunks and batches; so does a corruption."""

    @dataclass
    class Recorder:
        name: str = "recorder"

        def settings(self, threat):
            return {}

        def __call__(self, model, x, y, threat, *, seed=0, index=None):
            seen.extend(zip(index.tolist(), x.sum((1, 2, 3)).tolist(), y.tolist(), strict=True))
            return x

    model, x, y = problem
    seen = []
    result = evaluate(
        model, x, y, ball, attacks=[Recorder()], corruptions="impulse-noise", batch_size=3, chunk_bytes=3000
    )
    assert seen[: len(x)] == list(zip(range(len(x)), x.sum((1, 2, 3)).tolist(), y.tolist(), strict=True))
    whole = evaluate(model, x, y, ball, attacks=[], corruptions="impulse-noise")
    assert result.corruptions == whole.corruptions
