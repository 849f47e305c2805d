"""AutoAttack as a whole: against the authors' code, with few classes, and what it leaves behind."""

import pytest
import torch
from torch import nn

from atas import attacks
from atas.attacks import APGD, FAB, AttackEnsemble, Square
from atas.attacks.scheduler import Scheduler
from atas.errors import DataError, UsageError
from atas.threat import L2, Linf

IMAGES = 200
QUERIES = 300
# AutoAttack's searches with a tenth of the work.
STANDARD = AttackEnsemble(
    "standard", (APGD(loss="ce", iterations=10), APGD(loss="t", iterations=10), FAB(iterations=10), Square(queries=20))
)
RAND = AttackEnsemble(
    "rand", (APGD(loss="ce", iterations=10, eot_iterations=3), APGD(loss="dlr", iterations=10, eot_iterations=3))
)
TARGETED = AttackEnsemble("apgd-t", (APGD(loss="t", iterations=30),))


@pytest.fixture
def trained(robust_digits):
    return robust_digits


def ours(model, x, y, ball, searches, seed=0):
    """Which examples hold after each attack."""
    scheduler = Scheduler(model, model, x.device, slots=256, poll_interval=2)
    examples = scheduler.examples(x, y, torch.arange(len(x)))
    broken, holds = examples.misclassified(), []
    for search in searches:
        broken, _ = scheduler.run_stages([search], examples, ball, broken, seed=seed)
        holds.append(~broken)
    return holds


def theirs(model, x, y, ball, names, seed=0):
    """The same by the authors' code."""
    code = pytest.importorskip("pyautoattack", reason="pyautoattack is not installed")
    attack = code.AutoAttack(model, norm={"linf": "Linf", "l2": "L2"}[ball.name], eps=ball.eps, seed=seed)
    attack.square.n_queries = QUERIES
    right, holds = model(x).argmax(1) == y, []
    for name in names:
        attack.attacks_to_run = [name]
        point, _ = attack.run_standard_evaluation(x[right], y[right], batch_size=len(x))
        right[right.clone()] = model(point).argmax(1) == y[right]
        holds.append(right.clone())
    return holds


@pytest.mark.slow
@pytest.mark.parametrize("ball", [Linf(0.18), L2(0.75)], ids=["linf", "l2"])
def test_verdicts_are_those_of_the_authors_code(trained, ball):
    model, x, y = trained
    searches = (APGD(loss="ce"), APGD(loss="t"), FAB(), Square(queries=QUERIES))
    expected = theirs(model, x, y, ball, [search.name for search in searches])
    found = ours(model, x, y, ball, searches)
    for search, mine, authors in zip(searches, found, expected, strict=True):
        count, differ = (5, 8) if search.name == "apgd-ce" else (2, 3)  # one start at random, or all nine targets
        assert abs(int(mine.sum()) - int(authors.sum())) <= count, search.name
        assert (mine != authors).sum() <= differ, search.name
    assert IMAGES / 5 < found[-1].sum() < found[0].sum() < IMAGES / 2


@pytest.fixture
def problem(small_net, make_images):
    model, x = small_net(sharpness=5.0), make_images(6)
    y = model.eval()(x).argmax(1)
    y[0] = (y[0] + 1) % 4
    return model.train(), x, y


def test_versions_are_those_of_the_paper():
    standard, rand = (attacks.create(name).stages for name in ("autoattack", "autoattack-rand"))
    assert [search.name for search in standard] == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert [search.name for search in rand] == ["apgd-ce", "apgd-dlr"]
    ce, targeted, fab, square = standard
    assert (ce.iterations, targeted.iterations, fab.iterations, square.queries) == (100, 100, 100, 5000)
    assert (targeted.num_targets(10), fab.num_targets(10), targeted.num_targets(1000)) == (9, 9, 9)
    assert [search.eot_iterations for search in rand] == [20, 20]


@pytest.mark.parametrize(("version", "name"), [("standard", "autoattack"), ("rand", "autoattack-rand")])
def test_the_function_runs_the_attack_of_an_evaluation(trained, version, name):
    model, x, y = (trained[0], *(part[:4] for part in trained[1:]))
    expected = attacks.create(name)(model, x, y, Linf(0.3), seed=2)
    assert torch.equal(attacks.autoattack(model, x, y, Linf(0.3), version=version, seed=2), expected)
    assert not torch.equal(expected, x)


@pytest.mark.parametrize(
    ("attack", "classes"), [(attack, k) for attack in (STANDARD, TARGETED) for k in (2, 3, 4, 6)] + [(RAND, 2)]
)
def test_exactly_the_robust_examples_of_a_linear_model_hold(generator, attack, classes):
    """Of a linear model the worst point towards a class is known: every pixel goes against the difference."""
    n, eps = 150, 0.08
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, classes)).requires_grad_(False)
    model[1].weight.normal_(generator=generator)
    model[1].bias.copy_(-model[1].weight.sum(1) / 2)
    x = torch.rand(n, 3, 2, 2, generator=generator)
    y = model(x).argmax(1)
    margins = torch.full((n,), torch.inf)
    for other in range(classes):
        difference = model[1].weight[y] - model[1].weight[other]
        worst = model((x.flatten(1) - eps * difference.sign()).clamp(0, 1).view_as(x))
        margin = worst.gather(1, y[:, None])[:, 0] - worst[:, other]
        margins = torch.where(y == other, margins, torch.minimum(margins, margin))
    clear = margins.abs() > 1e-4
    assert clear.sum() > 0.95 * n
    assert 0.1 * n < (margins > 0).sum() < 0.9 * n
    found = attack(model, x, y, Linf(eps))
    assert torch.equal((model(found).argmax(1) == y)[clear], (margins > 0)[clear])


@pytest.mark.slow
def test_the_image_itself_stands_for_what_holds_or_was_wrong_already(trained):
    model, x, y = (trained[0], *(part[:40] for part in trained[1:]))
    clean = model(x).argmax(1) == y
    found = STANDARD(model, x, y, Linf(0.15))
    holds = model(found).argmax(1) == y
    changed = (found != x).flatten(1).any(1)
    assert torch.equal(changed, clean & ~holds)
    assert min(changed.sum(), holds.sum(), (~clean).sum()) > 0
    assert Linf(0.15).distance(found, x).max() <= 0.15 + 1e-6
    assert found.min() >= 0
    assert found.max() <= 1


@pytest.mark.slow
def test_autoattack_does_not_depend_on_the_batch(trained, ball):
    model, x, y = (trained[0].double(), *(part[:24] for part in trained[1:]))
    try:
        together = STANDARD(model, x.double(), y, ball, seed=3)
        part = torch.tensor([20, 3, 7, 11])
        alone = STANDARD(model, x[part].double(), y[part], ball, seed=3, index=part)
    finally:
        model.float()
    torch.testing.assert_close(alone, together[part], rtol=0, atol=1e-9)


def test_modes_flags_gradients_and_statistics_are_left_as_found(problem):
    model, x, y = problem
    model.bn2.eval()
    model.conv1.weight.requires_grad_(False)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    before = x.clone()
    found = STANDARD(model, x.requires_grad_(), y, Linf(0.3))
    assert not found.requires_grad
    assert [m.training for m in model.modules()] == modes
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["conv1.weight"]
    assert all(p.grad is None for p in [*model.parameters(), x])
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(x, before)


@pytest.mark.slow
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_caller_s_gradient_mode_does_not_matter(problem, context):
    model, x, y = problem
    expected = STANDARD(model, x, y, Linf(0.3))
    with context():
        assert torch.equal(STANDARD(model, x.clone(), y.clone(), Linf(0.3)), expected)


@pytest.mark.slow
def test_any_layout_will_do_and_the_model_sees_the_caller_s(generator):
    class Viewing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(60, 3, generator=generator, dtype=torch.float64))

        def forward(self, x):
            return x.view(len(x), 60) @ self.weight if x.is_contiguous() else x.flatten(1) @ self.weight

    x = torch.rand(8, 3, 4, 5, generator=generator, dtype=torch.float64)
    model = Viewing()
    y = model(x).argmax(1)
    expected = STANDARD(model, x, y, L2(0.3))
    layouts, hook = set(), model.register_forward_pre_hook(lambda _, args: layouts.add(args[0].is_contiguous()))
    for other in (x.to(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().transpose(2, 3)):
        found = STANDARD(model, other, y, L2(0.3))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
        assert found.dtype == torch.float64
    assert layouts == {False}
    hook.remove()


@pytest.mark.slow
def test_a_randomised_model(trained):
    """Noise that is small beside the margins changes few verdicts."""

    class Noisy(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x) + 0.05 * torch.randn(len(x), 10)

    model, x, y = (trained[0], *(part[:60] for part in trained[1:]))
    steady = model(RAND(model, x, y, Linf(0.18))).argmax(1) == y
    noisy = model(RAND(Noisy(model), x, y, Linf(0.18))).argmax(1) == y
    assert 0 < steady.sum() < 60
    assert (steady != noisy).sum() <= 6


def test_an_empty_batch_stays_empty(problem, ball):
    model, x, y = problem
    assert attacks.autoattack(model, x[:0], y[:0], ball).shape == (0, *x.shape[1:])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x, y: (x * 255, y), r"the images leave \[0, 1\]"),
        (lambda x, y: ((x * 255).byte(), y), "images must be float"),
        (lambda x, y: (x, y + 4), "outside of"),
        (lambda x, y: (x, y[:-1]), "labels must be one number an image"),
    ],
)
def test_wrong_inputs_are_refused(problem, ball, spoil, message):
    model, x, y = problem
    with pytest.raises(DataError, match=message):
        attacks.autoattack(model, *spoil(x, y), ball)


def test_a_model_without_logits_is_refused(problem, ball):
    model, x, y = problem
    model.register_forward_hook(lambda _, __, logits: (logits,))
    with pytest.raises(UsageError, match="must return a tensor of logits"):
        attacks.autoattack(model, x, y, ball)


def test_other_versions_are_unknown(problem, ball):
    with pytest.raises(UsageError, match="unknown version of AutoAttack 'plus'"):
        attacks.autoattack(*problem, ball, version="plus")


@pytest.mark.gpu
def test_autoattack_runs_on_a_gpu(trained, ball):
    model, x, y = (trained[0].double(), trained[1][:24].double(), trained[2][:24])
    try:
        expected = STANDARD(model, x, y, ball)
        found = STANDARD(model.cuda(), x.cuda(), y.cuda(), ball)
    finally:
        model.cpu().float()
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-5)  # random numbers are drawn in float32
