"""The consistency term: equal to a slow reference, the same in one's own loop and in `step`."""

import pytest
import torch

import atas
from atas.core.dispatch import use_fast_ops
from atas.core.validation import check_logits
from atas.errors import UsageError
from atas.methods import Consistency
from atas.methods.consistency import DISTANCES

SHAPE, EXAMPLES = (3, 8, 10), 12
WITH_A_START = ["fgsm", "fgsm-rs", "fgsm-rs-adaptive", "atta", "atas", "atas-literal", "atas-plus", "pgd"]
OWN = {"pgd": {"steps": 2}, "atas-plus": {"classes": 4}}


def slow(distance, z, start):
    """One example at a time, in float64."""
    p, q = (torch.softmax(row.double(), 0) for row in (z, start))
    if distance == "logits":
        return sum((a - b) ** 2 for a, b in zip(z.double(), start.double(), strict=True))
    if distance == "probabilities":
        return sum((a - b) ** 2 for a, b in zip(p, q, strict=True))
    middle = (p + q) / 2
    return sum((p * (p / middle).log() + q * (q / middle).log()) / 2)


def make(name, term, **hyper):
    method = atas.methods.create(
        name, atas.Linf(8 / 255), EXAMPLES, SHAPE, pad=2, consistency=term, **OWN.get(name, {}), **hyper
    )
    method.start_epoch(6, 30)
    return method


@pytest.mark.parametrize("distance", DISTANCES)
def test_distances_equal_a_slow_reference(distance):
    generator = torch.Generator().manual_seed(0)
    z, start = 4 * torch.randn(2, 5, 7, generator=generator)
    term = Consistency(3.0, distance=distance)
    expected = 3 * sum(slow(distance, *pair) for pair in zip(z, start, strict=True)) / 5
    torch.testing.assert_close(term(z, start).double(), expected, atol=1e-5, rtol=1e-5)
    assert term(z, z) == pytest.approx(0, abs=1e-6)
    with use_fast_ops():
        torch.testing.assert_close(term(z, start).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("distance", DISTANCES)
def test_distances_of_half_precision_are_computed_in_float32(distance):
    z, start = (8 * torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))).bfloat16()
    term = Consistency(1.0, distance=distance)
    found = term(z, start)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, term(z.float(), start.float()), atol=0, rtol=0)


@pytest.mark.parametrize("distance", DISTANCES)
def test_sure_predictions_have_finite_gradients(distance):
    z = torch.tensor([[1e3, 0.0, -1e3]], requires_grad=True)
    Consistency(1.0, distance=distance)(z, -z.detach()).backward()
    assert torch.isfinite(z.grad).all()


def test_the_weight_rises_over_a_share_of_the_training():
    method = make("atas", Consistency(1.0, ramp=0.5))
    scales = []
    for epoch in range(10):
        method.start_epoch(epoch, 10)
        scales.append(float(method.consistency.scale))
    assert scales == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1, 1])
    method.start_epoch(3, 10)  # as after a resume
    assert float(method.consistency.scale) == pytest.approx(0.8)
    with pytest.raises(UsageError, match="number of epochs"):
        method.start_epoch(3)
    assert not any("consistency" in name for name in method.state_dict())


@pytest.mark.parametrize("name", WITH_A_START)
def test_own_loop_and_step_are_the_same_training(small_net, make_images, name):
    x, y, index = make_images(6, SHAPE), torch.arange(6) % 4, torch.arange(6)
    states, losses = [], []
    for own in (True, False):
        method, model = make(name, Consistency(2.0, distance="js")), small_net().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(2):
            if own:
                loss = method.loss(model(method.perturb(model, x, y, index)), y, index)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            else:
                loss = method.step(model, optimizer, x, y, index).loss
            losses.append(loss.detach())
        states.append({**model.state_dict(), **method.state_dict()})
    assert torch.equal(torch.stack(losses[:2]), torch.stack(losses[2:]))
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("name", WITH_A_START)
def test_the_term_compares_with_the_start_of_the_attack(small_net, make_images, name):
    """The loss with the term, less the loss without it; the start's logits are of the attack's mode."""
    x, y, index = make_images(6, SHAPE), torch.arange(6) % 4, torch.arange(6)
    seen, modes = [], []
    model = small_net().train()
    model.register_forward_hook(lambda _module, _inputs, output: seen.append(check_logits(output.detach(), 6)))
    model.register_forward_hook(lambda module, _inputs, _output: modes.append(module.training))
    steps = []
    for term in (Consistency(2.0, distance="logits"), None):
        torch.manual_seed(0)
        model.load_state_dict(small_net().state_dict())
        seen.clear()
        steps.append(make(name, term).step(model, torch.optim.SGD(model.parameters(), lr=0.0), x, y, index))
    expected = 2 * sum(slow("logits", *pair) for pair in zip(seen[-1], seen[0], strict=True)) / 6
    torch.testing.assert_close((steps[0].loss - steps[1].loss).double(), expected, atol=1e-5, rtol=1e-4)
    assert (modes[0], modes[-1]) == (make(name, None).attack_mode == "train", True)


def test_through_both_takes_one_more_pass_with_gradients(small_net, make_images):
    x, y, index = make_images(6, SHAPE), torch.arange(6) % 4, torch.arange(6)
    gradients = []
    for through in ("trained", "both"):
        model, recorded = small_net().train(), []
        model.fc.register_forward_hook(lambda _m, _i, output, seen=recorded: seen.append(output.requires_grad))
        method = make("atas", Consistency(2.0, through=through))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = model.fc.weight.detach().clone()
        method.step(model, optimizer, x, y, index)
        gradients.append(before - model.fc.weight)
        assert len(recorded) == (3 if through == "both" else 2)
    assert not torch.equal(*gradients)
    with pytest.raises(UsageError, match=r"method\.step"):
        method.perturb(model, x, y, index)


@pytest.mark.parametrize("through", ["trained", "both"])
@pytest.mark.parametrize("distance", DISTANCES)
def test_the_gradient_of_the_term(small_net, make_images, distance, through):
    """FGSM, whose start is the image and whose attack is in train mode; the start is a constant or not."""
    x, y, index = make_images(6, SHAPE, dtype=torch.float64), torch.arange(6) % 4, torch.arange(6)
    model, slow_model = small_net().double().train(), small_net().double().train()
    method = make("fgsm", Consistency(2.0, distance=distance, through=through)).double()
    inputs = method.step(model, torch.optim.SGD(model.parameters(), lr=1.0), x, y, index).inputs
    start, z = slow_model(x), slow_model(inputs)
    start = start if through == "both" else start.detach()
    term = sum(slow(distance, *pair) for pair in zip(z, start, strict=True)) / 6
    loss = torch.nn.functional.cross_entropy(z, y) + 2 * term
    expected = torch.autograd.grad(loss, list(slow_model.parameters()))
    for before, after, gradient in zip(slow_model.parameters(), model.parameters(), expected, strict=True):
        torch.testing.assert_close(before - after, gradient, atol=1e-10, rtol=1e-8)


def test_wrong_use_is_named(small_net, make_images):
    with pytest.raises(UsageError, match="TRADES has no start"):
        make("trades", Consistency(1.0))
    with pytest.raises(UsageError, match=r"method\.perturb on it first"):
        make("atas", Consistency(1.0)).loss(torch.zeros(2, 4), torch.tensor([0, 1]), torch.tensor([0, 1]))
    method, model = make("atas", Consistency(1.0)), small_net()
    x, y, index = make_images(6, SHAPE), torch.arange(6) % 4, torch.arange(6)
    logits = model(method.perturb(model, x, y, index))
    with method.keep_targets():
        method.loss(logits, y, index)
    method.loss(logits, y, index)
    with pytest.raises(UsageError, match="first"):  # the start is of that batch alone
        method.loss(logits, y, index)
    for wrong, words in (({"weight": -1.0}, "weight >= 0"), ({"ramp": 2.0}, "ramp in"), ({"distance": "kl"}, "kl")):
        with pytest.raises(UsageError, match=words):
            Consistency(**{"weight": 1.0, **wrong})
