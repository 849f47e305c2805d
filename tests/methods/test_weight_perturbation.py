"""Weight perturbation: the algorithm of AWP in float64, exact restoration, and what does not change."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import atas
from atas.errors import UsageError
from atas.methods import OptimizerUpdate, WeightPerturbation
from atas.methods.weight_perturbation import FORMS

SHAPE, EXAMPLES, RATE, MOMENTUM, DECAY = (3, 8, 10), 11, 0.05, 0.9, 0.01
LINF = atas.Linf(8 / 255)
SMALL = {"free": {"replays": 2}, "yopo": {"outer": 2, "inner": 2}, "pgd": {"steps": 2}, "trades": {"steps": 2}}
SMALL["atas-plus"] = SMALL["liet"] = SMALL["fgsm-uap"] = {"classes": 4}
SMALL["mart"] = {"steps": 2}
METHODS = {name: atas.methods.get(name) for name in atas.methods.names()}
CASES = [(name, form) for name, method in METHODS.items() for form in FORMS if form in method.weight_perturbations]


def make(name, perturbation=None, **hyper):
    method = atas.methods.create(name, LINF, EXAMPLES, SHAPE, pad=0, seed=3, **SMALL.get(name, {}), **hyper)
    method.weight_perturbation = perturbation
    method.start_epoch(6, 30)
    return method


def sgd(model, nesterov=False):
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY, nesterov=nesterov)


@pytest.fixture
def batches(make_images):
    images = make_images(EXAMPLES, SHAPE, dtype=torch.float64)
    labels = torch.randint(4, (EXAMPLES,), generator=torch.Generator().manual_seed(5))
    order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(6))
    return [(images[index], labels[index], index) for index in order.split(6)] * 2


def run(method, model, batches, dtype=torch.float64):
    optimizer = sgd(model)
    method.to(dtype)
    for x, y, index in batches:
        method.step(model, optimizer, x.to(dtype), y, index)
    return model


def same_state(first, second):
    one, other = first.state_dict(), second.state_dict()
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


class SlowAWP:
    """The step of the paper, by copies of the model: no offsets in place, no contexts, one tensor after another."""

    def __init__(self, model, gamma, power=None):
        self.model, self.gamma, self.power = model, gamma, power
        self.speed = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}

    def length(self, name):
        """Relative to the weight; with a power, by the place of the layer."""
        if self.power is None:
            return self.gamma
        names = [name for name, weight in self.model.named_parameters() if weight.dim() > 1]
        return self.gamma * (1 - (np.log(names.index(name) + 1) / np.log(len(names))) ** self.power)

    def gradient(self, model, x, y):
        loss = F.cross_entropy(model(x), y)
        found = torch.autograd.grad(loss, list(model.parameters()))
        return loss.detach(), dict(zip(dict(model.named_parameters()), found, strict=True))

    def step(self, x, y, directions=None):
        if directions is None:
            _, directions = self.gradient(copy.deepcopy(self.model), x, y)
        proxy = copy.deepcopy(self.model)
        for name, weight in proxy.named_parameters():
            if weight.dim() > 1:
                direction = directions[name]
                length, norm = (direction**2).sum() ** 0.5, (weight.detach() ** 2).sum() ** 0.5
                if length > 0:
                    weight.data = weight.data + self.length(name) * norm * direction / length
        loss, gradients = self.gradient(proxy, x, y)
        for name, buffer in self.model.named_buffers():
            buffer.data = dict(proxy.named_buffers())[name].clone()  # the statistics of one pass
        for name, weight in self.model.named_parameters():
            self.speed[name] = MOMENTUM * self.speed[name] + gradients[name] + DECAY * weight.data
            weight.data = weight.data - RATE * self.speed[name]
        return loss


def fgsm_points(model, x, y):
    """One step of eps, attacked in train mode; also the weight gradients of that pass."""
    point = x.clone().requires_grad_(True)
    loss = F.cross_entropy(model(point), y, reduction="sum")
    gradient, *weights = torch.autograd.grad(loss, [point, *model.parameters()])
    ahead = (x + LINF.eps * gradient.sign()).clamp(x - LINF.eps, x + LINF.eps).clamp(0, 1)
    return ahead, dict(zip(dict(model.named_parameters()), weights, strict=True))


@pytest.mark.parametrize("power", [None, 0.3, 2.0])
@pytest.mark.parametrize("form", FORMS)
def test_the_step_is_that_of_the_paper(form, power, small_net, batches):
    """FGSM for four steps; the second half of the batches sees weights that have moved."""
    model = small_net().double().train()
    slow = SlowAWP(copy.deepcopy(model), gamma=0.05, power=power)
    method, optimizer = make("fgsm", WeightPerturbation(0.05, form, depth_power=power)).double(), sgd(model)
    for x, y, index in batches:
        output = method.step(model, optimizer, x, y, index)
        inputs, attack = fgsm_points(slow.model, x, y)
        torch.testing.assert_close(output.inputs, inputs, atol=1e-10, rtol=0)
        directions = {"ascent": None, "attack": attack, "momentum": slow.speed}[form]
        loss = slow.step(inputs, y, directions)
        torch.testing.assert_close(output.loss, loss, atol=1e-10, rtol=1e-8)
    for name, value in slow.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, atol=1e-10, rtol=1e-8, msg=name)


@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_length_of_zero_changes_no_bit(name, form, small_net, batches):
    plain = run(make(name), small_net().train(), batches, torch.float32)
    with_none = run(make(name, WeightPerturbation(0.0, form)), small_net().train(), batches, torch.float32)
    later = run(make(name, WeightPerturbation(0.1, form, from_epoch=7)), small_net().train(), batches, torch.float32)
    same_state(plain, with_none)
    same_state(plain, later)


@pytest.mark.parametrize(("form", "more"), [("ascent", 1), ("attack", 0), ("momentum", 0)])
def test_a_step_has_no_pass_more_than_it_needs(form, more, small_net, batches):
    """None before the first epoch with perturbed weights."""
    model, passes = small_net().train(), []
    model.register_forward_hook(lambda *_: passes.append(1))
    method, (x, y, index) = make("fgsm", WeightPerturbation(0.1, form, from_epoch=7)), batches[0]
    for epoch, count in ((6, 2), (7, 2 + more)):
        method.start_epoch(epoch, 30)
        method.step(model, sgd(model), x.float(), y, index)
        assert len(passes) == count
        passes.clear()


@pytest.mark.parametrize(("name", "form"), CASES)
def test_every_method_learns_at_other_weights(name, form, small_net, batches):
    plain = run(make(name), small_net().train(), batches, torch.float32)
    moved = run(make(name, WeightPerturbation(0.1, form, from_epoch=6)), small_net().train(), batches, torch.float32)
    for (key, weight), other in zip(plain.named_parameters(), moved.parameters(), strict=True):
        if weight.dim() > 1:
            assert not torch.equal(weight, other), key
    counts = [value for key, value in moved.named_buffers() if key.endswith("num_batches_tracked")]
    assert counts == [value for key, value in plain.named_buffers() if key.endswith("num_batches_tracked")]


@pytest.mark.parametrize("form", FORMS)
def test_ascent_raises_the_loss_and_the_weights_come_back_to_the_bit(form, small_net, batches):
    model = small_net().train()
    x, y, _ = batches[0]
    x = x.float()
    optimizer = sgd(model)
    with torch.no_grad():
        model.conv1.weight[0] = -0.0
        model.conv1.weight[1] = 1e-42
    OptimizerUpdate(optimizer)(F.cross_entropy(model(x), y))  # momentum
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def objective():
        return F.cross_entropy(model(x), y)

    unmoved = objective().item()
    for name, buffer in model.named_buffers():
        buffer.copy_(statistics[name])
    gradients = torch.autograd.grad(objective(), list(model.parameters()))
    for name, buffer in model.named_buffers():
        buffer.copy_(statistics[name])
    with WeightPerturbation(0.05, form).around(model, optimizer, objective, attack_gradients=gradients):
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, statistics[name]), name
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                moved = float(torch.linalg.vector_norm(weight.detach() - before[name]))
                assert moved == pytest.approx(0.05 * float(torch.linalg.vector_norm(before[name])), rel=1e-4)
            else:
                assert torch.equal(weight, before[name])
        if form != "momentum":
            assert objective().item() > unmoved
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name])
        assert torch.equal(weight.signbit(), before[name].signbit())
        assert weight.grad is None


def test_a_loop_with_a_method_s_loss_at_perturbed_weights_is_its_step(small_net, batches):
    """With targets and a consistency term, whose state the further evaluation of the loss must not change."""
    parts, perturbation = {"consistency": atas.methods.Consistency(1.0)}, WeightPerturbation(0.05)
    whole = make("atas-plus", perturbation, **parts)
    stepped = run(whole, small_net().double().train(), batches)
    method, model = make("atas-plus", **parts).double(), small_net().double().train()
    optimizer = sgd(model)
    for x, y, index in batches:
        x_adv = method.perturb(model, x, y, index)

        def objective(method=method, x_adv=x_adv, y=y, index=index):
            return method.loss(model(x_adv), y, index)

        def further(objective=objective):
            with method.keep_targets():
                return objective()

        optimizer.zero_grad()
        with perturbation.around(model, optimizer, further):
            objective().backward()
        optimizer.step()
    same_state(stepped, model)
    same_state(whole, method)


def test_weights_come_back_after_an_error(small_net, batches):
    model = small_net().train()
    before = copy.deepcopy(model.state_dict())
    x, y, _ = batches[0]
    around = WeightPerturbation(0.1).around(model, sgd(model), lambda: F.cross_entropy(model(x.float()), y))
    with pytest.raises(KeyError), around:
        raise KeyError
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value), name


def test_a_loop_of_one_s_own_is_the_step(small_net, batches):
    model, other = small_net().train(), small_net().train()
    method, bare = make("fgsm-rs", WeightPerturbation(0.02)), make("fgsm-rs")
    optimizer, others = sgd(model), sgd(other)
    for x, y, index in batches:
        x = x.float()
        method.step(model, optimizer, x, y, index)
        inputs = bare.perturb(other, x, y, index)
        others.zero_grad()
        with WeightPerturbation(0.02).around(other, others, lambda: F.cross_entropy(other(inputs), y)):  # noqa: B023
            F.cross_entropy(other(inputs), y).backward()
        others.step()
    same_state(model, other)


def moves(model, perturbation):
    """How far each weight of two or more dimensions moves, relative to its norm; the rest must not move."""
    weights = dict(model.named_parameters())
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    directions = [torch.ones_like(weight) if weight.requires_grad else None for weight in weights.values()]
    with perturbation.around(model, sgd(model), attack_gradients=[d for d in directions if d is not None]):
        found = {name: float((w.detach() - before[name]).norm() / before[name].norm()) for name, w in weights.items()}
    assert not any(found[name] for name, weight in weights.items() if weight.dim() < 2)
    return [found[name] for name, weight in weights.items() if weight.dim() > 1]


def test_moves_become_shorter_from_layer_to_layer(small_net):
    """None in the last, all of gamma in the first or only one; a frozen layer does not count."""
    model, perturbation = small_net().double(), WeightPerturbation(0.1, "attack", depth_power=0.3)
    second = 0.1 * (1 - (np.log(2) / np.log(3)) ** 0.3)
    assert moves(model, perturbation) == pytest.approx([0.1, second, 0.0], abs=1e-12)
    model.conv1.requires_grad_(False)
    assert moves(model, perturbation) == pytest.approx([0.0, 0.1, 0.0], abs=1e-12)
    assert moves(nn.Sequential(nn.Linear(3, 2).double()), perturbation) == pytest.approx([0.1])


def test_gradients_that_were_accumulated_stay(small_net, batches):
    model = small_net().train()
    x, y, _ = batches[0]

    def objective():
        return F.cross_entropy(model(x.float()), y)

    objective().backward()
    before = [weight.grad.clone() for weight in model.parameters()]
    with WeightPerturbation(0.02).around(model, sgd(model), objective):
        for weight, gradient in zip(model.parameters(), before, strict=True):
            assert torch.equal(weight.grad, gradient)


def test_autocast_sees_the_moved_weights():
    """It caches casts of weights, which would hide a change in place."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    x, y, optimizer = torch.rand(4, 3, 2, 2), torch.tensor([0, 1, 2, 3]), sgd(model)

    def objective():
        return F.cross_entropy(model(x), y)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        with WeightPerturbation(0.5).around(model, optimizer, objective):
            inside = objective()
        outside = objective()
    assert inside > outside + 0.1


def test_the_moments_of_adam_are_a_momentum(small_net, batches):
    model = small_net().train()
    method, optimizer = make("fgsm", WeightPerturbation(0.02, "momentum")), torch.optim.AdamW(model.parameters())
    for x, y, index in batches:
        method.step(model, optimizer, x.float(), y, index)
    update = OptimizerUpdate(optimizer)
    assert torch.equal(update.momentum[0], optimizer.state[update.weights[0]]["exp_avg"])


def test_the_default_is_what_the_authors_have_with_trades():
    assert (
        repr(WeightPerturbation()) == "WeightPerturbation(gamma=0.005, form='ascent', from_epoch=0, depth_power=None)"
    )


def test_a_step_of_one_s_own_says_what_it_implements():
    class Own(atas.methods.FGSM):
        def training_step(self, model, update, batch):
            raise NotImplementedError

    class Saying(Own):
        weight_perturbations = ("momentum",)

    class Named:
        def __init_subclass__(cls, label, **keywords):
            super().__init_subclass__(**keywords)
            cls.label = label

    class Attacking(atas.methods.FGSM, Named, label="mixed"):
        def attack(self, model, batch):
            return batch.x

    assert (Own.weight_perturbations, Saying.weight_perturbations) == ((), ("momentum",))
    assert (Attacking.weight_perturbations, Attacking.label) == (FORMS, "mixed")
    with pytest.raises(UsageError, match="Own cannot perturb weights in the form ascent; forms that it supports: none"):
        Own(LINF, EXAMPLES, SHAPE).weight_perturbation = WeightPerturbation()


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda net, batch: WeightPerturbation(-0.1), "gamma >= 0"),
        (lambda net, batch: WeightPerturbation(depth_power=0.0), "depth_power > 0"),
        (lambda net, batch: WeightPerturbation(form="ascend"), "did you mean 'ascent'"),
        (lambda net, batch: make("yopo", WeightPerturbation()), "YOPO cannot perturb weights in the form ascent"),
        (lambda net, batch: make("standard", WeightPerturbation(form="attack")), "it supports: ascent, momentum"),
        (lambda net, batch: make("atas", WeightPerturbation()).perturb(net, *batch), "use method.step"),
        (
            lambda net, batch: make("fgsm", WeightPerturbation(form="momentum")).step(
                net, torch.optim.SGD(net.parameters(), lr=0.1), *batch
            ),
            "SGD has no momentum",
        ),
    ],
)
def test_wrong_use_is_said(act, words, small_net, batches):
    x, y, index = batches[0]
    with pytest.raises(UsageError, match=words):
        act(small_net().train(), (x.float(), y, index))


def test_ascent_leaves_what_targets_remember_to_the_training_loss(small_net, generator):
    """The loss that gives the direction is evaluated at the same points, and must not count as a further visit."""
    x, y = torch.rand(EXAMPLES, *SHAPE, generator=generator), torch.randint(4, (EXAMPLES,), generator=generator)
    index = torch.arange(EXAMPLES)
    averages = []
    for perturbation in (None, WeightPerturbation(0.0)):
        method, model = make("atas-plus", perturbation, share=0.5), small_net().train()
        for _ in range(2):
            method.step(model, sgd(model), x, y, index)
        averages.append(method.targets.average)
    assert torch.equal(*averages)
