"""Accuracy as a function of the budget, and the smallest perturbation of each image."""

import io
import json

import pytest
import torch
from rich.console import Console
from torch import nn

import atas
from atas.attacks import APGD, PGD, AttackEnsemble
from atas.errors import UsageError
from atas.evaluation import accuracy_curve, evaluate
from atas.evaluation.result import load_results

EPS = (0, 1 / 255, 2 / 255, 4 / 255, 8 / 255)


@pytest.fixture
def linear():
    """A model of two classes and images whose smallest perturbations are known: margin over the dual norm."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).double()
    model[1].weight.data.normal_(generator=generator)
    weight = (model[1].weight[0] - model[1].weight[1]).detach()
    x = 0.4 + 0.2 * torch.rand(60, 3, 2, 2, generator=generator, dtype=torch.float64)
    model[1].bias.data = torch.stack([-(x.flatten(1) @ weight).median(), torch.zeros((), dtype=torch.float64)])
    difference = x.flatten(1) @ weight + model[1].bias.detach()[0]
    return (
        model,
        x,
        (difference < 0).long(),
        {"linf": difference.abs() / weight.abs().sum(), "l2": difference.abs() / weight.norm()},
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "attack"), [(atas.Linf, "pgd20x2"), (atas.L2, "pgd20"), (atas.L2, "fab-t")])
def test_the_smallest_perturbations_of_a_linear_model(linear, kind, attack):
    model, x, y, smallest = linear
    exact = smallest[kind.name]
    largest = float(exact.quantile(0.8))
    curve = accuracy_curve(model, x, y, kind(largest), attack=attack)
    assert curve.eps == pytest.approx([largest * (k + 1) / 8 for k in range(8)])
    found = curve.smallest < torch.inf
    assert not found[exact > largest].any()
    assert found[exact < 0.97 * largest].all()
    assert (curve.smallest[found] >= exact[found] * (1 - 1e-9)).all()
    assert (curve.smallest[found] / exact[found]).median() < 1.03
    assert curve.accuracy == tuple(float((curve.smallest > eps).double().mean()) for eps in curve.eps)


@pytest.mark.slow
def test_no_budget_is_judged_better_than_by_its_own_evaluation(problem):
    model, x, y = problem
    curve = accuracy_curve(model, x, y, atas.Linf(8 / 255), eps=EPS, attack="pgd5")
    assert list(curve.accuracy) == sorted(curve.accuracy, reverse=True)
    for eps in EPS[1:]:
        alone = evaluate(model, x, y, atas.Linf(eps), attacks=["pgd5"]).correct["worst"]
        assert not ((curve.smallest > eps) & ~alone).any()
    with torch.no_grad():
        assert torch.equal(curve.smallest > 0, model(x).argmax(1) == y)
    assert curve.accuracy[0] > curve.accuracy[2] > curve.accuracy[-1]
    assert curve.interval[1] == atas.evaluation.wilson(curve.num_correct[1], len(x))


@pytest.mark.slow
def test_several_searches_and_a_mask(problem, tiny):
    model, x, y = problem
    curve = accuracy_curve(model, x, y, atas.Linf(8 / 255), eps=EPS, attack=tiny)
    mask = torch.zeros(6, 5)
    mask[:2] = 1
    masked = accuracy_curve(model, x, y, atas.Linf(8 / 255).masked(mask), eps=EPS, attack=tiny)
    assert sum(masked.accuracy) > sum(curve.accuracy)
    assert masked.accuracy[0] == curve.accuracy[0]


@pytest.mark.parametrize("eps", [[0], [0.01], [0.01, 0]])
def test_one_budget(problem, eps):
    curve = accuracy_curve(*problem, atas.Linf(0.01), eps=eps, attack="pgd3")
    assert curve.eps == tuple(sorted(eps))
    assert curve.accuracy[0] >= curve.accuracy[-1]


@pytest.mark.slow
def test_a_stopped_curve_resumes(problem, tmp_path):
    def run(progress):
        return accuracy_curve(
            *problem,
            atas.Linf(8 / 255),
            eps=EPS,
            attack="apgd-ce",
            progress=progress,
            progress_file=tmp_path / "p.json",
        )

    def stop(status):
        if status.stage.endswith("4/255"):
            raise KeyboardInterrupt

    expected = run(None)
    with pytest.raises(KeyboardInterrupt):
        run(stop)
    stages = []
    found = run(lambda status: stages.append((status.stage, status.note or "")))
    assert any("resuming" in note for _, note in stages)
    assert torch.equal(found.smallest, expected.smallest)
    found.save(tmp_path / "curve.json")
    assert [file.name for file in tmp_path.iterdir()] == ["curve.json"]


def test_the_file(problem, tmp_path):
    curve = accuracy_curve(*problem, atas.Linf(2 / 255), eps=EPS[:3], attack="pgd3")
    curve.save(tmp_path / "mine.json")
    values = json.loads((tmp_path / "mine.json").read_text())
    assert values["eps"] == list(EPS[:3])
    assert values["accuracy"] == list(curve.accuracy)
    assert [value is None for value in values["smallest"]] == (curve.smallest == torch.inf).tolist()
    assert load_results(tmp_path) == [], "a curve is no result"
    for text in (str(curve), repr(curve)):
        assert "pgd3" in text or "2/255" in text


@pytest.mark.parametrize(
    ("eps", "shown"), [((0, 0.1, 0.2), ["0", "0.1", "0.2"]), ((0, 1 / 255, 0.1), ["0/255", "1/255", "25.5/255"])]
)
def test_all_sizes_have_the_unit_of_the_budgets(problem, eps, shown):
    curve = accuracy_curve(*problem, atas.Linf(eps[-1]), eps=eps, attack="pgd3")
    assert [row[0] for row in curve.rows()] == shown
    assert ("/255" in curve.sentence()) == ("/255" in shown[0])


def test_the_sentence_is_the_median(problem):
    curve = accuracy_curve(*problem, atas.Linf(30 / 255), eps=[30 / 255], attack="pgd3")
    assert curve.sentence() == "Half of the images have an adversarial perturbation of at most " + (
        f"{255 * float(curve.smallest.median()):.3g}/255 (linf)."
    )
    none = accuracy_curve(*problem, atas.Linf(0.01 / 255), eps=[0.01 / 255], attack="pgd3")
    assert "was found for more than half of the images" in none.sentence()
    model, x, y = problem
    wrong = accuracy_curve(model, x, (y + 1) % 4, atas.Linf(0.01), eps=[0], attack="pgd3")
    assert wrong.sentence() == "The model is wrong on half of the images without a perturbation."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eps": []}, "eps is a list of budgets"),
        ({"eps": "0,1"}, "eps is a list of budgets"),
        ({"eps": [0.2]}, r"eps must lie between 0 and the budget of Linf\(0.1\); got 0.2"),
        ({"eps": [-0.01]}, "eps must lie between 0"),
        ({"eps": [0.05, 0.05 + 1e-12]}, "two budgets of eps are almost equal"),
        ({"eps": ["a"]}, "eps must be a finite number; got 'a'"),
        ({"attack": "fgsm"}, "a curve needs an attack of searches.* got 'fgsm'"),
        ({"attack": "pdg50"}, "unknown attack 'pdg50'"),
        ({"threat": None}, "the threat model is one such as"),
    ],
)
def test_wrong_arguments_are_refused(problem, arguments, message):
    with pytest.raises(UsageError, match=message):
        accuracy_curve(*problem, **{"threat": atas.Linf(0.1)} | arguments)


def test_an_ensemble_with_its_own_name(problem):
    mine = AttackEnsemble("mine", (APGD(iterations=3), APGD(loss="dlr", iterations=3)))
    assert accuracy_curve(*problem, atas.Linf(0.02), eps=[0.01, 0.02], attack=mine).attack == "mine"
    curve = accuracy_curve(*problem, atas.Linf(0.02), eps=[0.02], attack=AttackEnsemble("[/b]", mine.stages))
    printed = io.StringIO()
    Console(file=printed).print(curve.table())
    assert "[/b], linf, 30 examples" in printed.getvalue()


def test_at_no_budget_accuracy_is_that_of_clean_images(problem):
    """Also if the model is wrong on an image: its smallest perturbation is 0, and so is the budget."""
    model, x, y = problem
    y = torch.where(torch.arange(len(y)) % 3 == 0, (y + 1) % 4, y)
    curve = accuracy_curve(model, x, y, atas.Linf(4 / 255), eps=EPS[:4], attack="pgd3")
    with torch.no_grad():
        assert curve.num_correct[0] == int((model(x).argmax(1) == y).sum()) < len(y)


class Edge(nn.Module):
    """Predicts class 0 above a threshold, and class 1 from the next smaller number on."""

    def __init__(self, threshold):
        super().__init__()
        self.threshold = torch.nextafter(threshold, torch.ones(())).squeeze()

    def forward(self, x):
        above = x.flatten(1)[:, :1] - self.threshold
        return torch.cat([above, torch.zeros_like(above)], 1)


def test_a_perturbation_at_the_edge_of_a_budget_counts_as_inside():
    """The whole budget is needed, and its difference in float32 may be larger than the budget."""
    rounded_up = 0
    for eps in (0.1, 0.3, 1 / 255, 7 / 255):
        for value in torch.linspace(0.31, 0.97, 5):
            x = value.view(1, 1, 1, 1)
            point = x - eps
            rounded_up += float(x - point) > eps
            curve = accuracy_curve(
                Edge(point), x, torch.zeros(1).long(), atas.Linf(eps), eps=[eps / 2, eps], attack="pgd20"
            )
            assert curve.accuracy == (1.0, 0.0)
            assert eps * (1 - 1e-5) < curve.smallest[0] <= eps
    assert rounded_up


def test_an_attack_for_another_threat_model_is_refused(problem):
    for attack in (PGD(0.3, steps=2), PGD(atas.L2(0.1), steps=2)):
        with pytest.raises(UsageError, match=r"the attack 'pgd2' was created for .*, not for Linf\(0.1\)"):
            accuracy_curve(*problem, atas.Linf(0.1), attack=attack)


@pytest.mark.slow
def test_many_restarts_and_too_many_searches(problem, tiny):
    assert len(accuracy_curve(*problem, atas.Linf(0.1), attack="pgd1x10").eps) == 8
    with pytest.raises(UsageError, match="'tiny' with 4 searches at each of 16 budgets has more: pass fewer budgets"):
        accuracy_curve(*problem, atas.Linf(0.1), eps=[k / 255 for k in range(1, 17)], attack=tiny)


def test_a_network_that_takes_no_empty_batch(problem):
    """Where nothing is broken there is nothing to shorten."""

    class Refusing(nn.Sequential):
        def forward(self, x):
            assert len(x)
            return super().forward(x)

    model, x, y = problem
    curve = accuracy_curve(Refusing(model), x, y, atas.Linf(1e-6), eps=[0, 1e-6], attack="pgd2")
    assert curve.accuracy[0] == curve.accuracy[1] > 0
