"""Warnings: each on a model that is bad in that way, and none on a healthy one."""

import math

import pytest
import torch
from torch import nn

import atas
from atas.attacks import APGD, AttackEnsemble, Square
from atas.evaluation import evaluate
from atas.evaluation import warnings as rules
from atas.evaluation.diagnostics import SAMPLE_SIZE

BALL = atas.Linf(0.15)


class Around(nn.Module):
    """A model with something put before or behind it."""

    def __init__(self, model, before=None, behind=None):
        super().__init__()
        self.model = model
        self.before, self.behind = before or nn.Identity(), behind or nn.Identity()

    def forward(self, x):
        return self.behind(self.model(self.before(x)))


class FewGradients(torch.autograd.Function):
    """The identity, but only a few pixels get a gradient: others at every point, so that many steps help."""

    @staticmethod
    def forward(ctx, x):
        number = torch.arange(x[0].numel()).view_as(x[0])
        ctx.save_for_backward(((number * 0.618 + 1e4 * x.mean((1, 2, 3), keepdim=True)).frac() < 0.15).to(x.dtype))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


def waves(x):
    """Every gradient is right at the image itself and wrong at most other points."""
    k = 2 * math.pi * 16
    return x + 3 * torch.sin(k * x) / k


BAD = {
    "random": {"behind": lambda z: z + 0.1 * torch.randn_like(z)},
    "batch": {"before": lambda x: x - 0.5 * x.mean(0)},
    "softmax": {"behind": lambda z: z.softmax(1)},
    "log-softmax": {"behind": lambda z: z.log_softmax(1)},
    "quantised": {"before": lambda x: (5 * x).round() / 5},
    "saturated": {"behind": lambda z: 1e4 * z},
    "not-a-number": {"behind": lambda z: z + (z[:, :1] - 1e9).sqrt() * 0},
    "infinite": {"behind": lambda z: z * torch.where(z.argmax(1, keepdim=True) == 3, math.inf, 1.0)},
    "waves": {"before": waves},
    "few-gradients": {"before": FewGradients.apply},
}
EXPECTED = {
    "random": {"random"},
    "batch": {"batch"},
    "softmax": {"softmax"},
    "log-softmax": {"softmax"},
    "quantised": {"zero-gradients", "square", "large-budget"},
    "saturated": {"zero-gradients", "exploding-gradients"},
    "not-a-number": {"exploding-gradients", "not-finite"},
    "infinite": {"exploding-gradients", "not-finite"},
    "waves": {"fgsm-stronger", "square"},
    "few-gradients": {"more-steps"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BAD))
def test_a_bad_model_is_recognised(robust_digits, quick, name):
    model, x, y = robust_digits
    attacks = ["pgd10", "pgd50", *([quick] if "square" in EXPECTED[name] else [])]
    found = evaluate(Around(model, **BAD[name]), x, y, BALL, attacks=attacks)
    kinds = {warning.kind for warning in found.warnings}
    assert kinds >= EXPECTED[name], [str(warning) for warning in found.warnings]
    if name in ("random", "batch", "softmax", "log-softmax"):
        assert kinds == EXPECTED[name]
    for warning in found.warnings:
        assert f"warning: {warning}" in str(found)
        assert f"- {warning}" in found.markdown()
        assert {"kind": warning.kind, "text": warning.text} in found.to_json()["warnings"]
        assert warning.kind in found.sentence()


@pytest.mark.slow
@pytest.mark.parametrize("ball", [BALL, atas.Linf(0.02), atas.Linf(0.3), atas.L2(0.75)], ids=str)
def test_a_healthy_model_gives_no_warning(robust_digits, quick, ball):
    model, x, y = robust_digits
    assert not evaluate(model, x, y, ball, attacks=["fgsm", "pgd10", "pgd50"]).warnings
    if ball in (BALL, atas.L2(0.75)):
        found = evaluate(model, x, y, ball, attacks=[quick])
        assert not found.warnings
        assert 0.2 < found.accuracy["quick"] < 0.8 * found.accuracy["clean"]


def test_attacks_are_compared_on_the_same_examples(robust_digits):
    """One of them on a sample, spread over a set that is larger, the other on all of it."""
    model, _, _ = robust_digits
    digits = atas.data.load("digits").test
    x, y = digits.images.float() / 255, digits.labels
    assert len(x) > SAMPLE_SIZE
    found = evaluate(model, x, y, BALL, attacks=["pgd10"])
    assert 0.2 < found.accuracy["pgd10"] < 0.8
    assert not found.warnings


@pytest.fixture
def narrow(generator):
    """A linear model, whose gradients hide nothing, and images that an L2 ball of 0.5 breaks by a narrow margin."""
    direction = nn.functional.normalize(torch.randn(192, generator=generator), dim=0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2)).requires_grad_(False)
    model[1].weight.copy_(torch.stack([direction, -direction]))
    model[1].bias.copy_(torch.stack([-direction.sum(), direction.sum()]) / 2)
    x = 0.5 + 0.5 * torch.linspace(0.93, 0.995, 100)[:, None] * direction
    return model, x.view(100, 3, 8, 8), torch.zeros(100, dtype=torch.int64)


@pytest.mark.parametrize(
    "others", [[], [AttackEnsemble("short", (APGD(loss="ce", iterations=3),))]], ids=["pgd", "search"]
)
def test_ten_steps_are_few_for_l2_whatever_the_model(narrow, others):
    """From a random point on the surface of the ball they do not turn all the way to the gradient."""
    found = evaluate(*narrow, atas.L2(0.5), attacks=["fgsm", "pgd10", "pgd50", *others])
    assert found.accuracy["pgd50"] == found.accuracy["fgsm"] == 0 < 0.3 < found.accuracy["pgd10"]
    assert not found.warnings, [str(warning) for warning in found.warnings]


def test_small_steps_are_a_reason_for_l2_too(narrow):
    found = evaluate(*narrow, atas.L2(0.5), attacks=["pgd10", "pgd50"], step_size=0.05)
    assert "points below pgd20" in str(found)


def test_a_bad_model_is_recognised_for_l2(robust_digits):
    model, x, y = robust_digits
    found = evaluate(Around(model, **BAD["few-gradients"]), x, y, atas.L2(1.0), attacks=["pgd10", "pgd50"])
    assert [warning.kind for warning in found.warnings] == ["more-steps"]


def test_a_class_that_cannot_be_left_is_no_masked_gradient():
    """All that a linear model takes for one class stays so at any budget, and grey is of that class too."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2)).requires_grad_(False)
    model[1].weight.copy_(torch.tensor([[-1.0], [1.0]]) / 16)
    model[1].bias.copy_(torch.tensor([2.0, -2.0]))
    x = torch.rand(40, 1, 4, 4)
    found = evaluate(model, x, torch.zeros(40, dtype=torch.int64), BALL, attacks=["pgd10"])
    assert found.accuracy["pgd10"] == 1
    assert not found.warnings


@pytest.mark.parametrize("seed", range(4))
def test_one_coin_for_a_whole_batch_is_chance_too(robust_digits, seed):
    model, x, y = robust_digits
    torch.manual_seed(seed)
    coin = Around(model, before=lambda x: x.roll(int(torch.randint(2, ())), 3))
    assert [warning.kind for warning in evaluate(coin, x, y, BALL, attacks=()).warnings] == ["random"]


def test_few_images_give_no_warning_either(robust_digits, tiny):
    model, x, y = robust_digits
    for count in (1, 2, 5):
        assert not evaluate(model, x[:count], y[:count], BALL, attacks=["pgd10", "pgd50", tiny]).warnings


class Nothing:
    """A user's attack that changes nothing, under the name of a built-in one."""

    def __init__(self, name):
        self.name = name

    def settings(self, threat):
        return {}

    def __call__(self, model, x, y, threat, *, seed=0, index=None):
        return x


def test_a_users_attack_is_not_compared_as_the_one_whose_name_it_has(robust_digits):
    model, x, y = robust_digits
    found = evaluate(model, x, y, BALL, attacks=[Nothing("pgd10"), "pgd50"])
    assert found.accuracy["pgd10"] - found.accuracy["pgd50"] > 0.1
    assert not found.warnings
    assert not evaluate(model, x, y, BALL, attacks=[Nothing("pgd50"), Nothing("fgsm"), "pgd10"]).warnings


def test_the_sample_stands_in_for_attacks_that_were_not_asked_for(robust_digits):
    model, x, y = robust_digits
    short = AttackEnsemble("short", (APGD(loss="ce", iterations=3),))
    for name, kind in (("waves", "fgsm-stronger"), ("few-gradients", "more-steps")):
        found = evaluate(Around(model, **BAD[name]), x, y, BALL, attacks=[short])
        assert kind in {warning.kind for warning in found.warnings}


@pytest.mark.slow
def test_square_beside_other_attacks_counts_too(robust_digits):
    """But only beside APGD-T: what cross-entropy does not find, a healthy model may well have."""
    model, x, y = robust_digits
    square, targeted = (
        AttackEnsemble("square", (Square(queries=300),)),
        AttackEnsemble("apgd-t", (APGD(loss="t", iterations=5),)),
    )
    bad = Around(model, **BAD["quantised"])
    together = evaluate(bad, x, y, BALL, attacks=[targeted, square])
    assert "square" in {warning.kind for warning in together.warnings}
    alone = evaluate(bad, x, y, BALL, attacks=["pgd10", square])
    assert "square" not in {warning.kind for warning in alone.warnings}


def test_the_checks_cost_little(robust_digits):
    model, x, y = robust_digits
    passes = []
    hook = model.register_forward_pre_hook(lambda _, arguments: passes.append(len(arguments[0])))
    try:
        evaluate(model, x, y, BALL, attacks=["pgd50"])
    finally:
        hook.remove()
    necessary = len(x) * (1 + 50 + 1)
    landscapes = 3 * (21 * 21 + 1)
    assert sum(passes) < 1.2 * necessary + landscapes


def test_without_an_attack_only_the_model_is_looked_at(robust_digits):
    model, x, y = robust_digits
    assert not evaluate(Around(model, **BAD["waves"]), x, y, BALL, attacks=()).warnings
    assert evaluate(Around(model, **BAD["softmax"]), x, y, BALL, attacks=()).warnings[0].kind == "softmax"


def test_warnings_about_the_model_come_before_the_attacks(robust_digits):
    model, x, y = robust_digits
    seen = []
    evaluate(Around(model, **BAD["softmax"]), x, y, BALL, attacks=["pgd10"], progress=seen.append)
    notes = [place for place, status in enumerate(seen) if status.note]
    assert notes == [0]
    assert seen[0].note.startswith("warning: the model returns probabilities")


@pytest.mark.parametrize("damage", ["weights", "labels"])
def test_a_model_at_chance_is_recognised_before_the_attacks(damage, robust_digits):
    """Other weights, or labels in another order: the figures would be of nothing."""
    model, x, y = robust_digits
    behind = (lambda z: z.roll(1, 1)) if damage == "labels" else (lambda z: z[:, :1] * 0 + torch.arange(10.0))
    seen = []
    found = evaluate(Around(model, behind=behind), x, y, BALL, attacks=["fgsm"], progress=seen.append)
    assert "chance" in {warning.kind for warning in found.warnings}
    assert any(status.warning and status.warning.kind == "chance" for status in seen if status.attack == "")
    assert "this model answers at chance" in str(found)


@pytest.mark.parametrize(
    ("num_correct", "counts", "fires"),
    [
        (10, [10] * 10, True),
        (18, [10] * 10, False),  # 95% interval 11.7 to 26.7%
        (90, [90, 10], True),  # the larger class alone gives as much
        (99, [90, 10], False),
        (9000, [9000, 1000], True),
        (9100, [9000, 1000], False),
        (3, [3] * 9, False),  # too few to tell
        (0, [50], False),  # one class alone
    ],
)
def test_chance_is_the_most_frequent_class(num_correct, counts, fires):
    assert bool(rules.check_chance(num_correct, counts)) is fires


def kind(warning):
    return warning and warning.kind


def test_rounding_is_no_different_answer(generator):
    logits = torch.randn(50, 10, generator=generator) * 7
    rounded = logits * (1 + 1e-6 * torch.randn(50, 10, generator=generator))
    assert rules.check_deterministic(logits, rounded, rounded) is None
    assert rules.check_deterministic(logits, logits, logits * 1.001) is None, "another algorithm for another batch"
    assert kind(rules.check_deterministic(logits, logits * 1.001, logits)) == "random"
    assert kind(rules.check_deterministic(logits, logits, logits * 1.1)) == "batch"
    nothing = torch.full((3, 2), torch.nan)
    assert rules.check_deterministic(nothing, nothing, nothing) is None


def test_logits_are_no_probabilities(generator):
    logits = torch.randn(50, 10, generator=generator)
    for fine in (logits, logits.abs(), -logits.abs(), torch.zeros(5, 3), torch.full((5, 3), torch.nan)):
        assert rules.check_logits(fine) is None
    some = logits.softmax(1)
    some[7, 3] = torch.nan
    for output in (logits.softmax(1), logits.log_softmax(1), torch.eye(4), some):
        assert kind(rules.check_logits(output)) == "softmax"
    sure = (200 * logits).softmax(1)
    assert sure.min() == 0
    for output in (sure.log(), (sure + 1e-6).log()):
        assert kind(rules.check_logits(output)) == "softmax"


def test_a_share_of_the_gradients_must_be_bad():
    fine = torch.ones(200)
    for bad, expected in ((0.0, "zero-gradients"), (torch.nan, "exploding-gradients")):
        for count, kinds in ((2, []), (3, [expected])):
            largest = fine.clone()
            largest[:count] = bad
            assert [c.kind for c in rules.check_gradients(largest, largest)] == kinds
    assert [c.kind for c in rules.check_gradients(fine, 1e5 * fine)] == ["exploding-gradients"]


def verdicts(right, n=1000):
    return torch.arange(n) < right


@pytest.mark.parametrize(("fgsm", "pgd", "fires"), [(600, 500, False), (500, 505, False), (490, 515, True)])
def test_fgsm_must_be_stronger_by_more_than_a_point(fgsm, pgd, fires):
    assert bool(rules.check_single_step(verdicts(fgsm), verdicts(pgd), "pgd10")) is fires


@pytest.mark.parametrize(("few", "many", "fires"), [(500, 450, False), (500, 449, True), (450, 500, False)])
def test_more_steps_must_help_by_more_than_five_points(few, many, fires):
    found = rules.check_convergence(verdicts(few), verdicts(many), ("pgd10", "pgd50"))
    assert bool(found) is fires
    if fires:
        assert "pgd50 is 5.1 points below pgd10" in str(found)


def test_a_difference_that_chance_explains_is_none(generator):
    """Sixteen and ten of 100 examples, broken by one alone: six points, and nothing."""
    one, other = torch.ones(100, dtype=torch.bool), torch.ones(100, dtype=torch.bool)
    one[:10], other[10:26] = False, False
    assert rules.check_convergence(one, other, ("pgd10", "pgd50")) is None
    more = torch.ones(300, dtype=torch.bool)
    assert rules.check_single_step(torch.cat([other, more]), torch.cat([one, more]), "pgd10") is None


@pytest.mark.parametrize(("lead", "fires"), [(50, True), (38, False)], ids=["2.5", "1.9"])
def test_a_lead_counts_from_two_standard_deviations(lead, fires):
    """Of 500 examples, 400 are broken by one attack alone: chance alone gives a lead of 20, one deviation."""
    one, other = torch.ones(500, dtype=torch.bool), torch.ones(500, dtype=torch.bool)
    one[: 200 - lead // 2], other[200 - lead // 2 : 400] = False, False
    assert bool(rules.check_convergence(one, other, ("pgd10", "pgd50"))) is fires
    assert ("breaks more examples" in str(rules.check_single_step(other, one, "pgd10"))) is fires


@pytest.mark.parametrize(("alone", "fires"), [(50, False), (51, True)])
def test_fgsm_must_not_break_much_that_pgd_does_not(alone, fires):
    """Though both break as many."""
    fgsm, pgd = torch.ones(1000, dtype=torch.bool), torch.ones(1000, dtype=torch.bool)
    fgsm[:alone], pgd[200 : 200 + alone] = False, False
    found = rules.check_single_step(fgsm, pgd, "pgd50")
    assert bool(found) is fires
    if fires:
        assert "FGSM breaks 51 of 1000 examples that pgd50 does not break" in str(found)


@pytest.mark.parametrize(("broken", "n", "fires"), [(10, 1000, False), (11, 1000, True), (2, 50, False), (3, 50, True)])
def test_square_must_go_more_than_a_point_further(broken, n, fires):
    assert bool(rules.check_black_box(broken, n)) is fires


def test_one_example_is_enough_at_a_large_budget():
    assert rules.check_large_budget(0, 16, 0.5) is None
    assert "1 of 16 examples stay correct" in str(rules.check_large_budget(1, 16, 0.5))


def test_an_attack_on_all_images_is_compared_with_one_on_the_sample(monkeypatch, tiny):
    """On the same images: in sorted data, the first ones are no sample."""
    monkeypatch.setattr("atas.evaluation.evaluator.SAMPLE_SIZE", 30)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).double()
    model[1].weight.data = torch.tensor([[1.0] * 4, [-1.0] * 4]).double()
    model[1].bias.data = torch.tensor([-2.0, 2.0]).double()
    x = (0.5 + torch.linspace(0.3, 0.01, 90).double()).view(90, 1, 1, 1).expand(90, 1, 2, 2)
    result = evaluate(model, x, torch.zeros(90).long(), atas.Linf(0.2), attacks=["pgd10", tiny])
    assert 0.2 < result.accuracy["worst"] < 0.5, "the first images are robust"
    assert not {"fgsm-stronger", "more-steps"} & {warning.kind for warning in result.warnings}


def test_a_gradient_where_nothing_may_change_is_no_reason():
    """The loss rises by too much where a pixel counts a million times."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).double()
    model[1].weight.data = torch.tensor([[1.0, 1, 1, 1e7], [0, 0, 0, 0]]).double()
    x = torch.rand(20, 1, 2, 2, dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0]])
    for threat, fires in ((atas.Linf(0.1), True), (atas.Linf(0.1).masked(mask), False)):
        warnings = evaluate(model, x, torch.ones(20).long(), threat, attacks=["fgsm"]).warnings
        assert ("exploding-gradients" in {warning.kind for warning in warnings}) == fires
