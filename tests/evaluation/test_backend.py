"""AutoAttack and its searches in an evaluation: figures after each stage, what broke which example, few classes."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import atas
from atas import attacks
from atas.attacks import APGD, AttackEnsemble
from atas.attacks.scheduler import Scheduler
from atas.evaluation import Evaluation, backend, cuda_backend, evaluate, runner, wilson

BALL = atas.Linf(0.15)


@pytest.fixture(scope="module")
def found(robust_digits, quick):
    model, x, y = robust_digits
    return evaluate(model, x, y, BALL, attacks=["pgd10", quick], seed=1)


def test_stages_follow_each_other_and_end_at_the_verdict(found):
    stages = found.stages["quick"]
    assert list(found.stages) == ["quick"], "PGD's restarts are no stages, and a single search has none"
    assert [stage.name for stage in stages] == ["apgd-ce", "apgd-t", "fab-t", "square"]
    right = [stage.num_correct for stage in stages]
    assert right == sorted(right, reverse=True)
    assert right[-1] == found.correct["quick"].sum()
    assert right[1] < right[0] < found.correct["clean"].sum()
    assert all(stage.accuracy == stage.num_correct / 200 for stage in stages)
    assert all(stage.interval == wilson(stage.num_correct, 200) for stage in stages)
    assert sum(stage.queries for stage in stages) == found.queries["quick"]
    assert sum(stage.seconds for stage in stages) == pytest.approx(found.seconds["quick"])
    for stage in stages:
        assert stage.queries >= 200 * found.accuracy["quick"] * (300 if stage.name == "square" else 20)


@pytest.mark.slow
def test_verdicts_are_those_of_the_attack_itself(robust_digits, quick, found):
    model, x, y = robust_digits
    points = quick(model, x, y, BALL, seed=1)
    assert torch.equal(found.correct["quick"], model(points).argmax(1) == y)
    alone = evaluate(model, x, y, BALL, attacks=["pgd10"], seed=1)
    assert torch.equal(alone.correct["pgd10"], found.correct["pgd10"])


def test_result_names_the_attack_that_broke_each_example(found):
    by = found.broken_by["quick"]
    names = ["clean", "apgd-ce", "apgd-t", "fab-t", "square"]
    assert [name is None for name in by] == found.correct["quick"].tolist()
    assert [name != "clean" for name in by] == found.correct["clean"].tolist()
    after = 200
    for name, right in zip(
        names, [found.correct["clean"].sum(), *(s.num_correct for s in found.stages["quick"])], strict=True
    ):
        after -= by.count(name)
        assert after == right
    worst = found.broken_by["worst"]
    assert [name is None for name in worst] == found.correct["worst"].tolist()
    assert set(worst) <= {None, "clean", "pgd10", *(f"quick: {name}" for name in names[1:])}
    assert worst.count("pgd10") == (found.correct["clean"] & ~found.correct["pgd10"]).sum()


@pytest.mark.slow
def test_a_single_search_runs_on_all_examples(robust_digits):
    """Also where another search broke them already: that is what tells it from a stage."""
    model, x, y = robust_digits
    search = APGD(loss="t", iterations=20)
    alone = evaluate(model, x, y, BALL, attacks=[AttackEnsemble("apgd-t", (search,))])
    first = evaluate(model, x, y, BALL, attacks=[AttackEnsemble("both", (APGD(loss="ce", iterations=20), search))])
    assert alone.queries["apgd-t"] > first.stages["both"][1].queries
    assert "apgd-t" not in alone.stages
    assert alone.correct["apgd-t"].sum() >= first.correct["both"].sum()
    assert alone.correct["clean"].sum() > alone.correct["apgd-t"].sum()


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_verdicts_do_not_depend_on_the_batch_size(robust_digits, tiny, batch_size):
    model, x, y = robust_digits
    expected = evaluate(model, x[:12], y[:12], BALL, attacks=[tiny])
    found = evaluate(model, x[:12], y[:12], BALL, attacks=[tiny], batch_size=batch_size)
    assert torch.equal(found.correct["tiny"], expected.correct["tiny"])
    assert found.broken_by == expected.broken_by


def test_every_name_can_be_evaluated(robust_digits):
    model, x, y = robust_digits
    names = [name for name in attacks.names()[:-1] if name != "square"]  # which takes long where examples hold
    found = evaluate(model, x[:2], y[:2], atas.Linf(0.5), attacks=names)
    assert list(found.correct) == [*names, "worst"]
    assert [stage.name for stage in found.stages["autoattack-rand"]] == ["apgd-ce", "apgd-dlr"]
    assert found.accuracy["autoattack"] == found.accuracy["autoattack-rand"] == 0
    assert found.protocol["attacks"]["autoattack"]["square"]["queries"] == 5000
    assert found.protocol["attacks"]["autoattack-rand"]["apgd-ce"]["passes"] == 20


@pytest.mark.parametrize("classes", [2, 3, 4, 9])
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.slow
def test_searches_find_the_robust_examples_of_linear_models_with_few_classes(classes, norm, generator):
    """Of a linear model and a ball that stays inside of [0, 1] the robust examples are known."""
    n = 80
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, classes)).requires_grad_(False)
    model[1].weight.normal_(generator=generator)
    model[1].bias.copy_(-model[1].weight.sum(1) / 2)
    x = 0.4 + 0.2 * torch.rand(n, 3, 2, 2, generator=generator)
    y = model(x).argmax(1)
    y[:5] = (y[:5] + 1) % classes
    logits, distances = model(x), torch.full((n,), torch.inf)
    for other in range(classes):
        difference = model[1].weight[y] - model[1].weight[other]
        slope = torch.linalg.vector_norm(difference, ord=1 if norm == "linf" else 2, dim=1)
        distance = (logits.gather(1, y[:, None])[:, 0] - logits[:, other]) / slope
        distances = torch.where(y == other, distances, torch.minimum(distances, distance))
    ordered = distances.sort().values
    eps = float(ordered[n // 2] + ordered[n // 2 + 1]) / 2
    assert 0 < eps < 0.4
    assert (distances - eps).abs().min() > 1e-5
    battery = AttackEnsemble(
        "quick", (APGD(loss="ce", iterations=10), APGD(loss="t", iterations=30), *attacks.create("fab-t").stages)
    )
    found = evaluate(model, x, y, atas.threat.create(norm, eps), attacks=[battery])
    assert torch.equal(found.correct["quick"], distances > eps)


def test_an_attack_of_one_s_own_with_stages(robust_digits):
    model, x, y = robust_digits
    mine = AttackEnsemble("mine", (APGD(loss="dlr", iterations=5), APGD(loss="ce", iterations=5)))
    found = evaluate(model, x[:20], y[:20], BALL, attacks=[mine])
    assert [stage.name for stage in found.stages["mine"]] == ["apgd-dlr", "apgd-ce"]


def test_a_result_with_stages_survives_its_file(found, tmp_path):
    found.save(tmp_path / "result.json")
    again = Evaluation.load(tmp_path / "result.json")
    assert again.to_json() == found.to_json()
    assert (again.stages, again.broken_by, again.warnings) == (found.stages, found.broken_by, found.warnings)
    document = json.loads((tmp_path / "result.json").read_text())
    assert [stage["after"] for stage in document["stages"]["quick"]] == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert len(document["broken_by"]["quick"]["examples"]) == 200


def test_tables_show_the_stages_below_their_attack(found):
    lines = str(found).splitlines()
    assert [line.split("  ")[0] for line in lines[1:5]] == ["attack", "clean", "pgd10", "quick"]
    labels = [line[:16].rstrip() for line in lines[5:9]]
    assert labels == [f"  after {name}" for name in ("apgd-ce", "apgd-t", "fab-t", "square")]
    stage = found.stages["quick"][1]
    assert f"{100 * stage.accuracy:.2f}%" in lines[6]
    assert f"{stage.num_correct}/200" in lines[6]
    page = found.markdown()
    assert "| quick, after apgd-t |" in page
    assert "No warnings." in page
    assert found.sentence() in page


def test_the_line_for_a_paper(found):
    line = found.sentence()
    low, high = (100 * end for end in found.interval["quick"])
    assert "\n" not in line
    for part in (
        f"quick {100 * found.accuracy['quick']:.2f} ({low:.2f} to {high:.2f})",
        "PGD-10",
        "L-infinity, eps = 0.15, PGD in steps of eps/5, 200 images",
        "seed 1",
        f"weights {found.weights}",
        f"data {found.data}",
    ):
        assert part in line


def network(x):
    return torch.stack([(x * x).sum((1, 2, 3)), x.sin().sum((1, 2, 3))], 1)


@pytest.fixture
def images():
    return torch.rand(6, 1, 3, 3, dtype=torch.float64)


@pytest.mark.slow
def test_any_number_of_images_there_and_back(images):
    form = cuda_backend.compile_network(network, images, backend="aot_eager")
    assert form is not None
    for count in (6, 5, 1, 17):
        x = torch.rand(count, 1, 3, 3, dtype=torch.float64, requires_grad=True)
        torch.testing.assert_close(form(x), network(x))
        found, expected = (torch.autograd.grad(way(x)[:, 0].sum(), x) for way in (form, network))
        torch.testing.assert_close(found, expected)
        with torch.no_grad():
            torch.testing.assert_close(form(x), network(x))


def test_a_network_that_cannot_be_compiled_stays_as_it_is(images):
    def asks_the_host(x):
        return network(x) * (2 if float(x.sum()) > 0 else 1)

    assert cuda_backend.compile_network(asks_the_host, images, backend="aot_eager") is None


def test_autoattack_is_long_and_pgd_is_not():
    passes = {name: runner.total_max_queries([atas.attacks.create(name)], 10) for name in ("pgd50", "autoattack")}
    assert passes["pgd50"] == 50
    assert passes["autoattack"] >= 100 + 900 + 900 + 5000
    assert 1000 * passes["autoattack"] > backend.COMPILE_ABOVE_QUERIES > 10_000 * passes["pgd50"]


@pytest.mark.gpu
def test_the_same_verdicts_on_a_gpu():
    """Compiled or not: half precision only searches."""
    torch.manual_seed(0)
    model = atas.models.create("resnet18", 10).cuda().eval()
    x = torch.rand(48, 3, 64, 64)
    with torch.no_grad():
        y = model(x.cuda()).argmax(1).cpu()
    broken = {"pgd10": [], "apgd-ce": []}
    for queries in (0, backend.COMPILE_ABOVE_QUERIES):
        options = {"precision": "auto", "slots": 20, "images": x, "queries": queries}
        with backend.prepare(model, torch.device("cuda", 0), **options) as scheduler:
            assert scheduler.precision == "float16"
            examples = scheduler.examples(x, y, torch.arange(48))
            for name, outcomes in broken.items():
                stages, none = attacks.create(name).stages, torch.zeros(48, dtype=torch.bool)
                outcomes.append(scheduler.run_stages(stages, examples, atas.Linf(0.2 / 255), none)[0])
    for eager, compiled in broken.values():
        assert int((eager != compiled).sum()) <= 2


@pytest.mark.parametrize("right", ["float16", "bfloat16", None])
def test_the_first_half_precision_that_agrees_is_searched_with(images, right):
    def in_half_precision(dtype):
        return lambda x: network(x) * (1 if str(dtype) == f"torch.{right}" else torch.inf)

    whole = Scheduler(network, network, torch.device("cpu"), slots=2)
    found = cuda_backend.search_in_half_precision(whole, images, in_half_precision, lambda note: None)
    assert found.precision == (right or "float32")
    assert (found.search_model is network) == (right is None)
    refused = {"float16": [], "bfloat16": ["float16"], None: ["float16", "bfloat16"]}[right]
    assert list(found.notes) == [
        f"the network computes something else in {name} (some logits are not finite); searching without it"
        for name in refused
    ]


class _OtherGradient(torch.autograd.Function):
    """Identity whose backward pass changes the gradient."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None


def with_gradient(change):
    """A search model with the right logits and another input gradient."""
    return lambda x: LINEAR(_OtherGradient.apply(x, change))


LINEAR = nn.Sequential(nn.Flatten(), nn.Linear(48, 5)).requires_grad_(False)


def flipped(share):
    """Flip the signs of pixels that hold this share of the rise."""

    def change(gradient):
        flat = gradient.flatten(1).clone()
        order = flat.abs().argsort(1)
        before = flat.abs().gather(1, order).cumsum(1) <= share * flat.abs().sum(1, keepdim=True)
        sign = torch.ones_like(flat).scatter(1, order, torch.where(before, -1.0, 1.0))
        return (flat * sign).view_as(gradient)

    return change


def first_rows(count, value):
    """Replace the gradient of the first images."""

    def change(gradient):
        gradient = gradient.clone()
        gradient[:count] = value
        return gradient

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda gradient: 1e-7 * gradient, None),
        (flipped(0.04), None),
        (flipped(0.15), "signs of the input gradient mislead an attack on 100.0% of 100 images"),
        (lambda gradient: -gradient, "signs of the input gradient mislead an attack on 100.0% of 100 images"),
        (lambda gradient: 0 * gradient, "signs of the input gradient mislead an attack on 100.0% of 100 images"),
        (first_rows(2, 0.0), None),
        (first_rows(3, 0.0), "signs of the input gradient mislead an attack on 3.0% of 100 images"),
        (first_rows(1, torch.nan), "some input gradients are not finite"),
    ],
    ids=["scaled", "few-signs", "many-signs", "reversed", "vanished", "2-of-100", "3-of-100", "nan"],
)
def test_signs_of_input_gradients_must_agree_too(change, reason, generator):
    x = torch.rand(100, 3, 4, 4, generator=generator)
    assert cuda_backend.find_disagreement(with_gradient(change), LINEAR, x, size=100) == reason


@pytest.mark.parametrize(("wrong", "reason"), [(2, None), (3, "the prediction differs on 3.0% of 100 images")])
@pytest.mark.parametrize("size", [100, 7, 1])
def test_predictions_must_agree_whatever_the_size_of_batches(wrong, reason, size, generator):
    x = torch.rand(100, 3, 4, 4, generator=generator)

    def search_model(batch):
        logits = LINEAR(batch)
        is_wrong = (batch.detach()[:, None] == x[:wrong]).flatten(2).all(2).any(1, keepdim=True)
        return torch.where(is_wrong, -logits, logits)

    assert cuda_backend.find_disagreement(search_model, LINEAR, x, size) == reason


def test_images_without_a_gradient_are_no_disagreement():
    x = torch.rand(4, 3, 4, 4)
    assert cuda_backend.find_disagreement(lambda x: 0 * LINEAR(x), lambda x: 0 * LINEAR(x), x, size=4) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_linear_model_may_be_searched_in_half_precision(dtype, generator):
    x = torch.rand(64, 3, 4, 4, generator=generator)
    half = copy.deepcopy(LINEAR).to(dtype)
    assert cuda_backend.find_disagreement(lambda x: half(x.to(dtype)).float(), LINEAR, x, size=64) is None


def test_why_a_search_is_not_in_half_precision_is_part_of_the_result(found, tmp_path):
    assert "search_notes" not in found.protocol
    note = "the network computes something else in float16 (some logits are not finite); searching without it"
    result = replace(found, protocol=found.protocol | {"search_notes": [note]})
    result.save(tmp_path / "result.json")
    assert Evaluation.load(tmp_path / "result.json").protocol["search_notes"] == [note]
    assert f"- note: {note}" in result.markdown()


@pytest.mark.gpu
def test_a_network_of_large_numbers_is_searched_in_bfloat16():
    """Float16 ends at 65,504."""
    torch.manual_seed(0)
    model = atas.models.create("preact-resnet18", 10).cuda().eval()
    x = torch.rand(64, 3, 32, 32)
    with torch.no_grad():
        model.conv1.weight *= 1e6  # on its way past every block it is never normalised
        y = model(x.cuda()).argmax(1).cpu()
    found = evaluate(model, x, y, atas.Linf(0.2 / 255), attacks=["pgd10"])
    assert found.protocol["search_precision"] == "bfloat16"


@pytest.mark.parametrize("failing", [["float16"], ["float16", "bfloat16"]])
def test_a_layer_without_half_precision_does_not_end_the_evaluation(failing, images):
    def in_half_precision(dtype):
        if str(dtype).removeprefix("torch.") in failing:
            raise RuntimeError("expected scalar type Float\nbut found Half")
        return network

    whole, said = Scheduler(network, network, torch.device("cpu"), slots=2), []
    found = cuda_backend.search_in_half_precision(whole, images, in_half_precision, said.append)
    assert found.precision == ("bfloat16" if failing == ["float16"] else "float32")
    assert [sentence.split(";")[0] for sentence in said] == [
        f"the network cannot compute in {name} (expected scalar type Float)" for name in failing
    ]
