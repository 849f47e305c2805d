"""Every method against the slow reference, value by value in float64: inputs, loss, weight gradients, weights,
BatchNorm statistics and what is remembered, over several steps."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import atas
from atas.core.augment import View
from atas.core.autograd import set_mode
from atas.core.rng import CounterRNG, Stream
from atas.errors import UsageError
from atas.methods import Batch
from atas.methods.fgsm_ga import default_weight

from . import reference
from .reference import Ball, Network

# The same settings are compared in all balls, whether they are sensible there or not.
pytestmark = pytest.mark.filterwarnings("ignore::atas.errors.SettingsWarning")

SHAPE, PAD, EXAMPLES, RATE = (3, 8, 10), 2, 11, 0.05
LINF, L2 = atas.Linf(8 / 255), atas.L2(0.5)
CASES = [
    pytest.param(LINF, 1.0, id="linf"),
    pytest.param(L2, 1.0, id="l2"),
    pytest.param(LINF, 0.5, id="linf-shrunk"),
    pytest.param(L2, 0.5, id="l2-shrunk"),
]


class Recorder:
    """An update of plain gradient descent that keeps the gradients of each."""

    def __init__(self, model, rate):
        self._weights = dict(model.named_parameters())
        self._rate = rate
        self._collected = {name: torch.zeros_like(weight) for name, weight in self._weights.items()}
        self.updates = []

    def backward(self, loss, *inputs):
        found = torch.autograd.grad(loss, [*self._weights.values(), *inputs], allow_unused=True)
        for name, gradient in zip(self._weights, found, strict=False):
            if gradient is not None:
                self._collected[name] += gradient
        return found[len(self._weights) :]

    def apply(self):
        self.updates.append(self._collected)
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight -= self._rate * self._collected[name]
        self._collected = {name: torch.zeros_like(weight) for name, weight in self._weights.items()}

    def __call__(self, loss, *inputs):
        gradients = self.backward(loss, *inputs)
        self.apply()
        return gradients

    def total(self, *sums):
        return [value.detach() for value in sums]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-8)


class ComparedMethod:
    """A method, a network and data, and the same network for the reference."""

    def __init__(self, name, threat, scale, net, images, *, epochs=30, rate=RATE, **hyper):
        self.images, self.epochs, self.rate = images, epochs, rate
        self.labels = torch.randint(4, (len(images),), generator=torch.Generator().manual_seed(5))
        self.model = net.double().train()
        self.net = Network(self.model)
        self.ball = Ball(threat.name, threat.eps)
        self.method = atas.methods.create(name, threat, len(images), images.shape[1:], pad=PAD, seed=3, **hyper)
        self.method.double()
        if scale != 1:
            self.method.shrink_steps(scale)

    def batches(self, epoch, sizes=(6, 5)):
        """A shuffled epoch: indices and views, whose offsets reach both ends."""
        generator = torch.Generator().manual_seed(100 + epoch)
        order = torch.randperm(len(self.images), generator=generator).split(list(sizes))
        for index in order:
            top, left = torch.randint(2 * PAD + 1, (2, len(index)), generator=generator)
            flip = torch.arange(len(index)) % 2 == epoch % 2
            top[0], left[0], top[1], left[1] = 0, 2 * PAD, 2 * PAD, 0
            yield index, View(top, left, flip, PAD)

    def noise(self, epoch, index):
        """The random start, which is given: uniform numbers in the ball."""
        return self.method.threat.sample(CounterRNG(3, torch.tensor(epoch), index), self.images.shape[1:]).double()

    def compare(self, epochs, refer):
        """Train through these epochs; `refer(epoch, x, y, index, view)` is the reference's step. Yields outcomes."""
        compared = 0
        for epoch in epochs:
            self.method.start_epoch(epoch, self.epochs)
            for index, view in self.batches(epoch):
                yield epoch, self.step(epoch, index, view, refer)
                compared += 1
        assert compared == 2 * len(epochs)

    def step(self, epoch, index, view, refer):
        x, y = self.window(index, view), self.labels[index]
        recorder = Recorder(self.model, self.rate)
        step = self.method.training_step(self.model, recorder, Batch(view.apply(self.images, index), y, index, view))
        expected = refer(epoch, x, y, index, view)
        close(step.inputs, expected.inputs)
        close(step.loss, expected.loss)
        close(step.logits, expected.logits)
        assert len(recorder.updates) == len(expected.updates)
        for actual, wanted in zip(recorder.updates, expected.updates, strict=True):
            close(actual, wanted)
        close(dict(self.model.named_parameters()), {k: v.detach() for k, v in self.net.weights.items()})
        close(dict(self.model.named_buffers()), self.net.statistics)
        assert not step.inputs.requires_grad
        assert not step.logits.requires_grad
        return expected

    def window(self, index, view):
        """The augmented images, by loops."""
        height, width = self.images.shape[2:]
        return torch.stack(
            [
                reference.look(reference.pad_image(self.images[i], PAD), one, height, width)
                for i, one in zip(index.tolist(), triples(view), strict=True)
            ]
        )


def triples(view):
    return list(zip(view.top.tolist(), view.left.tolist(), view.flip.tolist(), strict=True))


@pytest.fixture
def compared_method(small_net, make_images):
    def make(name, threat, scale=1.0, *, net=None, sharpness=6.0, examples=EXAMPLES, **hyper):
        images = make_images(examples, SHAPE, dtype=torch.float64)
        net = (net or small_net(sharpness=sharpness)).double()
        with torch.no_grad():  # no class is the favourite
            net.fc.bias -= net.eval()(images).mean(0)
        return ComparedMethod(name, threat, scale, net, images, **hyper)

    return make


def test_standard(compared_method):
    s = compared_method("standard", LINF)
    for _ in s.compare(range(2), lambda epoch, x, y, index, view: reference.standard(s.net, x, y, RATE)):
        pass


@pytest.mark.parametrize(("threat", "scale"), CASES)
def test_fgsm(compared_method, threat, scale):
    s = compared_method("fgsm", threat, scale)
    for _ in s.compare(
        range(2), lambda epoch, x, y, index, view: reference.fgsm(s.net, s.ball, x, y, RATE, scale * threat.eps)
    ):
        pass


@pytest.mark.parametrize(("threat", "scale"), CASES)
def test_fgsm_with_a_step_beyond_the_ball(compared_method, threat, scale):
    s = compared_method("fgsm", threat, scale, step_size="2 eps")
    s.ball = Ball(threat.name, 2 * threat.eps)
    for _ in s.compare(
        range(2), lambda epoch, x, y, index, view: reference.fgsm(s.net, s.ball, x, y, RATE, 2 * scale * threat.eps)
    ):
        pass


@pytest.mark.parametrize(("threat", "scale"), CASES)
def test_fgsm_rs(compared_method, threat, scale):
    s = compared_method("fgsm-rs", threat, scale)

    def refer(epoch, x, y, index, view):
        return reference.fgsm_rs(s.net, s.ball, s.noise(epoch, index), x, y, RATE, scale * 1.25 * threat.eps)

    for _ in s.compare(range(2), refer):
        pass


@pytest.mark.parametrize(("threat", "scale"), CASES)
def test_fgsm_rs_with_a_step_of_ones_own(compared_method, threat, scale):
    s = compared_method("fgsm-rs", threat, scale, step_size=0.3 * threat.eps)

    def refer(epoch, x, y, index, view):
        return reference.fgsm_rs(s.net, s.ball, s.noise(epoch, index), x, y, RATE, scale * 0.3 * threat.eps)

    for _ in s.compare(range(1), refer):
        pass


@pytest.mark.parametrize(("threat", "scale"), CASES)
def test_pgd(compared_method, threat, scale):
    s = compared_method("pgd", threat, scale)

    def refer(epoch, x, y, index, view):
        noise = s.noise(epoch, index)
        return reference.pgd(s.net, s.ball, noise, x, y, RATE, step=scale * threat.eps / 4, steps=10)

    for _ in s.compare(range(1), refer):
        pass


def test_pgd_takes_other_steps(compared_method):
    s = compared_method("pgd", LINF, steps=3, step_size=3 / 255)

    def refer(epoch, x, y, index, view):
        return reference.pgd(s.net, s.ball, s.noise(epoch, index), x, y, RATE, step=3 / 255, steps=3)

    for _ in s.compare(range(1), refer):
        pass


def test_pgd_in_eval_mode_as_in_the_released_code(compared_method):
    """The running statistics see the final inputs only."""
    s = compared_method("pgd", LINF, attack_mode="eval")

    def refer(epoch, x, y, index, view):
        noise = s.noise(epoch, index)
        return reference.pgd(s.net, s.ball, noise, x, y, RATE, step=LINF.eps / 4, steps=10, training=False)

    for _ in s.compare(range(1), refer):
        pass


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.parametrize("settings", [{}, {"c": 0.3, "max_step": 0.2, "beta": 0.8}], ids=["default", "other"])
def test_fgsm_rs_adaptive(compared_method, threat, scale, settings):
    s = compared_method("fgsm-rs-adaptive", threat, scale, **settings)
    usual = {"c": 1.28, "max_step": 16 / 255 if threat is LINF else 1.0, "beta": 0.5}
    norms = torch.zeros(EXAMPLES, dtype=torch.float64)

    def refer(epoch, x, y, index, view):
        noise = s.noise(epoch, index)
        return reference.fgsm_rs_adaptive(
            s.net, s.ball, norms, noise, x, y, index, RATE, scale=scale, **{**usual, **settings}
        )

    seen = torch.zeros(EXAMPLES, dtype=torch.float64)
    batches = [index for epoch in range(3) for index, _ in s.batches(epoch)]
    for (_, expected), index in zip(s.compare(range(3), refer), batches, strict=True):
        seen[index] = expected.notes["sizes"]
        close(s.method.step_sizes, seen)
        close(s.method.gradient_norms, norms.sqrt())
    assert seen.min() < 0.9 * seen.max(), "the step sizes should differ for this to test anything"


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.slow
def test_fgsm_ga(compared_method, threat, scale):
    s = compared_method("fgsm-ga", threat, scale, weight=0.7)

    def refer(epoch, x, y, index, view):
        noise = s.noise(epoch, index)
        return reference.fgsm_ga(s.net, s.ball, noise, x, y, RATE, step=scale * threat.eps, weight=0.7)

    for _, expected in s.compare(range(2), refer):
        assert len(expected.notes["counted"]) == len(expected.inputs)


@pytest.mark.parametrize("eps", [1, 4, 8, 12, 16])
def test_fgsm_ga_weighs_as_the_authors_do(eps):
    published = {1: 0.027, 4: 0.063, 8: 0.200, 12: 0.632, 16: 2.0}
    assert default_weight(eps / 255) == pytest.approx(math.exp(eps * math.log(10) / 8 + math.log(0.02)))
    assert default_weight(eps / 255) == pytest.approx(published[eps], abs=5e-4)
    method = atas.methods.create("fgsm-ga", atas.Linf(eps / 255), 1, SHAPE)
    assert method.weight == pytest.approx(published[eps], abs=5e-4)


@pytest.mark.parametrize("batch_norm", [True, False], ids=["batch-norm", "plain"])
def test_fgsm_ga_leaves_out_examples_without_a_gradient(compared_method, small_net, batch_norm):
    """A black image through a first layer that only answers to light: its gradient is zero, here and nearby."""
    net = small_net(batch_norm=False, activation=F.relu, sharpness=6.0)
    if batch_norm:
        net.bn2 = small_net().bn2
    net.conv1.weight.data.abs_()
    net.conv1.bias.data.fill_(-1.5)
    s = compared_method("fgsm-ga", LINF, net=net, weight=0.7)
    s.images[[4, 7]] = 0

    def refer(epoch, x, y, index, view):
        return reference.fgsm_ga(s.net, s.ball, s.noise(epoch, index), x, y, RATE, step=LINF.eps, weight=0.7)

    s.method.start_epoch(0)
    index = torch.tensor([0, 4, 2, 7, 9])
    expected = s.step(0, index, View.centre(5, PAD), refer)
    assert expected.notes["counted"] == [0, 2, 4]
    # Only such examples: the regulariser is zero, and nothing is NaN.
    expected = s.step(0, torch.tensor([4, 7]), View.centre(2, PAD), refer)
    assert expected.notes["counted"] == []
    assert all(torch.isfinite(weight).all() for weight in s.model.parameters())


def test_fgsm_ga_second_order_by_finite_differences(compared_method):
    """The regulariser as a plain function of the weights, at weights moved to and fro in random directions."""
    weight, h = 0.7, 1e-5
    s = compared_method("fgsm-ga", LINF, weight=weight)
    s.method.start_epoch(0)
    index, view = next(s.batches(0))
    x, y, noise = s.window(index, view), s.labels[index], s.noise(0, index)
    net = Network(s.model)
    first, _ = reference.input_gradients(net, x, y, training=True)
    inputs = s.ball.move(x, first, LINF.eps, x)

    def total(direction, size):
        moved = Network(s.model)
        with torch.no_grad():
            for name, value in moved.weights.items():
                value += size * direction[name]
        second, _ = reference.input_gradients(moved, x + noise, y, training=True)
        cosines = F.cosine_similarity(first.flatten(1), second.flatten(1))
        return (reference.losses(moved(inputs, True), y).mean() + weight * (1 - cosines.mean())).item()

    generator = torch.Generator().manual_seed(1)
    directions = [
        {name: torch.randn(value.shape, generator=generator, dtype=value.dtype) for name, value in net.weights.items()}
        for _ in range(4)
    ]
    slopes = [(total(d, h) - total(d, -h)) / (2 * h) for d in directions]
    recorder = Recorder(s.model, RATE)
    s.method.training_step(s.model, recorder, Batch(x, y, index, view))
    (found,) = recorder.updates
    for direction, slope in zip(directions, slopes, strict=True):
        assert float(sum((found[name] * direction[name]).sum() for name in found)) == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.parametrize("checkpoints", [3, 4, 1])
def test_ssat(compared_method, threat, scale, checkpoints):
    settings = {} if checkpoints == 3 else {"checkpoints": checkpoints}
    s = compared_method("ssat", threat, scale, examples=48, **settings)
    index = torch.arange(48)
    at_image = s.net(s.images, False).argmax(1)
    at_start = s.net(s.ball.project(s.images + s.noise(0, index), s.images), False).argmax(1)
    turned, steady = index[at_start != at_image], index[at_start == at_image]
    s.labels = at_image.clone()  # most are right where they are
    s.labels[turned[::2]] = at_start[turned[::2]]  # some only at their random start
    s.labels[steady[::12]] = (at_image[steady[::12]] + 1) % 4  # and some nowhere

    def refer(epoch, x, y, index, view):
        noise = s.noise(epoch, index)
        return reference.ssat(s.net, s.ball, noise, x, y, RATE, scale * 1.25 * threat.eps, checkpoints)

    s.method.start_epoch(0)
    expected = s.step(0, index, View.centre(48, PAD), refer)
    branches = expected.notes["branches"]
    assert set(branches) == set(range(checkpoints + 1)), "an example should fall into each branch"
    cases = set(zip((branch > 0 for branch in branches), expected.notes["right_at_x"], strict=True))
    assert len(cases) == 4, "right at the random start or not, and right at the image or not"


@pytest.mark.parametrize(("threat", "scale"), CASES)
def test_trades(compared_method, threat, scale):
    s = compared_method("trades", threat, scale)

    def refer(epoch, x, y, index, view):
        noise = CounterRNG(3, torch.tensor(epoch), index).normal(Stream.START, SHAPE).double()
        return reference.trades(s.net, s.ball, noise, x, y, RATE, step=scale * threat.eps / 4, steps=10, beta=6.0)

    for _ in s.compare(range(1), refer):
        pass


def test_trades_with_other_settings(compared_method):
    s = compared_method("trades", LINF, beta=1.5, steps=2, step_size=0.01)

    def refer(epoch, x, y, index, view):
        noise = CounterRNG(3, torch.tensor(epoch), index).normal(Stream.START, SHAPE).double()
        return reference.trades(s.net, s.ball, noise, x, y, RATE, step=0.01, steps=2, beta=1.5)

    for _ in s.compare(range(1), refer):
        pass


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.parametrize("settings", [{}, {"noise": "3 eps", "step_size": 0.02}], ids=["default", "other"])
def test_n_fgsm(compared_method, threat, scale, settings):
    s = compared_method("n-fgsm", threat, scale, **settings)
    noisy = threat.with_eps((3 if settings else 2) * threat.eps)

    def refer(epoch, x, y, index, view):
        noise = noisy.sample(CounterRNG(3, torch.tensor(epoch), index), SHAPE).double()
        return reference.n_fgsm(s.net, s.ball, noise, x, y, RATE, scale * settings.get("step_size", threat.eps))

    for _ in s.compare(range(2), refer):
        pass


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.parametrize("settings", [{}, {"beta": 1.5, "steps": 2, "step_size": 0.01}], ids=["default", "other"])
def test_mart(compared_method, threat, scale, settings):
    s = compared_method("mart", threat, scale, **settings)
    own = {"beta": 5.0, "steps": 10, "step": threat.eps / 4}
    if settings:
        own = {"beta": 1.5, "steps": 2, "step": 0.01}
    own["step"] *= scale

    def refer(epoch, x, y, index, view):
        noise = CounterRNG(3, torch.tensor(epoch), index).normal(Stream.START, SHAPE).double()
        return reference.mart(s.net, s.ball, noise, x, y, RATE, **own)

    for _ in s.compare(range(1), refer):
        pass


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.parametrize("name", ["gat", "nuat"])
def test_gat_and_nuat(compared_method, name, threat, scale):
    """Ten epochs in all, in which the weights change; the second batch of an epoch is guided."""
    s = compared_method(name, threat, scale, epochs=10)
    distance = reference.squared_distance if name == "gat" else reference.nuclear_distance
    weights = {"gat": {0: 10.0, 8: 10.0, 9: 40.0}, "nuat": {0: 0.0, 8: 4.0, 9: 4.5}}[name]
    counts = dict.fromkeys(weights, 0)

    def refer(epoch, x, y, index, view):
        guide = weights[epoch] * (counts[epoch] % 2)
        counts[epoch] += 1
        signs = CounterRNG(3, torch.tensor(epoch), index).normal(Stream.START, SHAPE).double()
        return reference.guided(
            s.net, s.ball, signs, x, y, RATE, step=scale * threat.eps, weight=weights[epoch], guide=guide,
            distance=distance,
        )  # fmt: skip

    for _ in s.compare(list(weights), refer):
        pass
    assert set(counts.values()) == {2}


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.parametrize("inside", [True, False])
def test_liet(compared_method, threat, scale, inside):
    """Eight batches, of which the first, third, ... of an epoch renew the perturbations of the classes."""
    own = {"smoothing": 0.3, "weight": 7.0, "ratio": (0.2, 0.9), "refresh_every": 2}
    s = compared_method("liet", threat, scale, classes=4, epochs=5, inside=inside, **own)
    state, noisy = {"epoch": None}, threat if inside else threat.with_eps(2 * threat.eps)

    def uniform(epoch, index, stream, shape):
        return CounterRNG(3, torch.tensor(epoch), index).uniform(stream, shape).double()

    def refer(epoch, x, y, index, view):
        if state["epoch"] != epoch:
            state.update(epoch=epoch, count=0)
        count = state["count"]
        if count % 2 == 0:
            numbers = 2 * EXAMPLES + 4 * count + torch.arange(4)
            weights = uniform(epoch, numbers, Stream.TARGET, (4,))
            state["patterns"] = reference.liet_patterns(s.net, s.ball, weights, SHAPE, 0.3)
        ratio, sign = uniform(epoch, torch.tensor([count]), Stream.BATCH, (2,))[0]
        chance = {
            "noise": noisy.sample(CounterRNG(3, torch.tensor(epoch), index), SHAPE).double(),
            "replaced": uniform(epoch, index, Stream.MASK, SHAPE) < 0.2 + 0.7 * ratio,
            "sign": -1 if sign < 0.5 else 1,
            "attack": uniform(epoch, index + EXAMPLES, Stream.TARGET, (4,)),
            "train": uniform(epoch, index, Stream.TARGET, (4,)),
        }
        state["count"] += 1
        state["signs"] = state.get("signs", set()) | {chance["sign"]}
        return reference.liet(
            s.net, s.ball, state["patterns"], chance, x, y, RATE, step=scale * threat.eps, smoothing=0.3,
            weight=7.0 * (epoch + 1) / 5, reach=None if inside else Ball(threat.name, 3 * threat.eps),
        )  # fmt: skip

    for _ in s.compare(range(4), refer):
        close(s.method.patterns, state["patterns"])
    assert state["signs"] == {-1, 1}


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"layers": ("conv1", "conv2"), "step_size": "0.4 eps", "layer_step_size": "0.7 eps"}, {"layers": ("conv2",)}],
    ids=["default", "other", "second-layer"],
)
def test_slat(compared_method, threat, scale, settings):
    """Half of the steps are longer than the ball, those of `other` shorter; values at the ends of their range stay."""
    s = compared_method("slat", threat, scale, **settings)
    pixels, hidden = (0.4, 0.7) if "step_size" in settings else (0.9, 1.8)

    def refer(epoch, x, y, index, view):
        return reference.slat(
            s.net, s.ball, settings.get("layers", ("conv1",)), x, y, RATE, step=scale * pixels * threat.eps,
            layer_step=scale * hidden * threat.eps,
        )  # fmt: skip

    for _, expected in s.compare(range(3), refer):
        assert 0 < expected.notes["cut"] < 0.5 * expected.notes["moved"]


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.parametrize(
    "settings", [{}, {"weight": 3.0, "label_factor": 0.5, "label_floor": 0.3}], ids=["default", "other"]
)
def test_tdat(compared_method, threat, scale, settings):
    """Batches of 6 and 5: the sixth perturbation waits for the next batch of six."""
    s = compared_method("tdat", threat, scale, epochs=10, batch_size=6, **settings)
    carried = s.method.carried.clone()
    length = threat.distance(carried, torch.zeros_like(carried))
    torch.testing.assert_close(length, torch.full_like(length, threat.eps), atol=1e-7, rtol=1e-6)
    factor, floor = settings.get("label_factor", 0.6), settings.get("label_floor", 0.15)
    kept = {epoch: max(factor * math.tan(1 - epoch / 10), floor) for epoch in (0, 4, 9)}
    assert kept[9] == floor

    def refer(epoch, x, y, index, view):
        return reference.tdat(
            s.net, s.ball, carried, x, y, RATE, step=scale * threat.eps, kept=kept[epoch],
            weight=settings.get("weight", 0.65),
        )  # fmt: skip

    for _ in s.compare(list(kept), refer):
        close(s.method.carried, carried)


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.parametrize("settings", [{}, {"replays": 3, "step_size": 0.02}], ids=["default", "other"])
def test_free(compared_method, threat, scale, settings):
    """Batches of 6 and 5: the sixth perturbation waits for the next batch of six."""
    s = compared_method("free", threat, scale, batch_size=6, **settings)
    carried = torch.zeros(6, *SHAPE, dtype=torch.float64)
    step, replays = settings.get("step_size", threat.eps), settings.get("replays", 8)
    assert s.method.updates_per_step == replays

    def refer(epoch, x, y, index, view):
        return reference.free(s.net, s.ball, carried, x, y, RATE, step=scale * step, replays=replays)

    for _ in s.compare(range(2), refer):
        close(s.method.carried, carried)
    assert carried.abs().amax((1, 2, 3)).min() > 0


@pytest.mark.parametrize("clamp", ["inputs", "carried"])
def test_free_as_released(compared_method, clamp):
    """Images have black and white pixels, where the versions differ."""
    s = compared_method("free", LINF, batch_size=6, clamp=clamp)
    s.images.sub_(0.5).mul_(4).add_(0.5).clamp_(0, 1)
    carried, left = torch.zeros(6, *SHAPE, dtype=torch.float64), 0

    def refer(epoch, x, y, index, view):
        return reference.free_as_released(s.net, LINF.eps, carried, x, y, RATE, step=LINF.eps, replays=8, clamp=clamp)

    for _, outcome in s.compare(range(2), refer):
        close(s.method.carried, carried)
        left += int(((outcome.inputs < 0) | (outcome.inputs > 1)).sum())
    assert left == 0  # the last of eight replays is inside, either way


@pytest.mark.parametrize(("clamp", "inside"), [("both", True), ("inputs", True), ("carried", False)])
def test_the_first_inputs_of_a_batch_leave_the_range_in_one_version_of_free(compared_method, clamp, inside):
    s = compared_method("free", LINF, batch_size=6, clamp=clamp, replays=1)
    s.images.sub_(0.5).mul_(4).add_(0.5).clamp_(0, 1)
    s.method.start_epoch(0, 30)
    s.method.carried.uniform_(-LINF.eps, LINF.eps, generator=torch.Generator().manual_seed(0))
    index, view = next(iter(s.batches(0)))
    batch = Batch(view.apply(s.images, index), s.labels[index], index, view)
    inputs = s.method.training_step(s.model, Recorder(s.model, s.rate), batch).inputs
    assert bool(((inputs >= 0) & (inputs <= 1)).all()) == inside


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"outer": 2, "inner": 4, "step_size": 0.01},
        {"layer": "conv2", "outer": 2},
        {"first_layer_twice": True},
        {"first_layer_twice": True, "layer": "conv2", "outer": 2},
    ],
    ids=["default", "other", "second-layer", "twice", "second-layer-twice"],
)
def test_yopo(compared_method, threat, scale, settings):
    s = compared_method("yopo", threat, scale, **settings)
    step = settings.get("step_size", 2 / 255 if threat is LINF else threat.eps / 4)

    def refer(epoch, x, y, index, view):
        return reference.yopo(
            s.net,
            s.ball,
            s.noise(epoch, index),
            x,
            y,
            RATE,
            step=scale * step,
            outer=settings.get("outer", 5),
            inner=settings.get("inner", 3),
            layer=settings.get("layer", "conv1"),
            first_layer_twice=settings.get("first_layer_twice", False),
        )

    for _ in s.compare(range(1), refer):
        pass


def test_yopo_takes_the_first_layer_before_an_activation_in_place(compared_method, small_net):
    s = compared_method(
        "yopo", LINF, net=small_net(batch_norm=False, activation=lambda x: F.relu(x, inplace=True), sharpness=6.0)
    )
    s.net.activation = F.relu

    def refer(epoch, x, y, index, view):
        noise = s.noise(epoch, index)
        return reference.yopo(s.net, s.ball, noise, x, y, RATE, step=2 / 255, outer=5, inner=3, layer="conv1")

    for _ in s.compare(range(1), refer):
        pass


def drawn(s, epoch, index, draw):
    """Random numbers of a later draw within a step."""
    return CounterRNG(3, torch.tensor(epoch), index + draw * len(s.images))


def noises(s, epoch, index, count):
    """Several random points of the ball for each example."""
    return [s.method.threat.sample(drawn(s, epoch, index, k), SHAPE).double() for k in range(count)]


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.parametrize("frame", ["view", "image"])
@pytest.mark.slow
def test_fgsm_pgi(compared_method, threat, scale, frame):
    s = compared_method("fgsm-pgi", threat, scale, frame=frame, dtype=torch.float32)
    corners = s.method.memory.delta.clone()
    if threat is LINF:
        close(corners.abs(), torch.full_like(corners, LINF.eps).float().double())
        assert 0.4 < (corners > 0).double().mean() < 0.6
    else:
        assert threat.distance(corners, torch.zeros_like(corners)).tolist() == pytest.approx([threat.eps] * EXAMPLES)
    settings = {"step": scale * threat.eps, "true": 0.6, "weight": 10.0, "decay": 0.3}
    slow = reference.Pgi(s.ball, corners, PAD, **settings)

    def refer(epoch, x, y, index, view):
        return slow.step(s.net, x, y, index, triples(view) if frame == "image" else None, RATE)

    for _ in s.compare(range(3), refer):
        close(s.method.memory.delta, slow.stored)
        close(s.method.momentum.delta * slow.momenta.abs().max() ** -1, slow.momenta / slow.momenta.abs().max())
    assert slow.momenta.abs().amax((1, 2, 3)).min() > 0


def test_fgsm_pgi_with_other_settings(compared_method):
    given = {"smoothing": 0.1, "weight": 2.0, "momentum": 0.8, "step_size": 0.01}
    s = compared_method("fgsm-pgi", LINF, dtype=torch.float32, **given)
    settings = {"step": 0.01, "true": 0.9, "weight": 2.0, "decay": 0.8}
    slow = reference.Pgi(s.ball, s.method.memory.delta, PAD, **settings)
    for _ in s.compare(range(2), lambda epoch, x, y, index, view: slow.step(s.net, x, y, index, None, RATE)):
        close(s.method.memory.delta, slow.stored)


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.parametrize(
    "settings", [{}, {"smoothing": 0.2, "weight": 1.0, "momentum": 0.8, "threshold": 0.9}], ids=["default", "other"]
)
@pytest.mark.slow
def test_fgsm_pgk(compared_method, threat, scale, settings):
    """Accuracies of small batches: the attack lowers some, and leaves others as they are."""
    s = compared_method("fgsm-pgk", threat, scale, dtype=torch.float32, sharpness=40.0, rate=0.01, **settings)
    with torch.no_grad(), set_mode(s.model, training=False):
        s.labels[2:] = s.model(s.images[2:]).argmax(1)
    slow = reference.Pgk(
        s.ball, s.method.memory.delta, PAD, step=scale * threat.eps, true=1 - settings.get("smoothing", 0.5),
        weight=settings.get("weight", 5.6), decay=settings.get("momentum", 0.3),
    )  # fmt: skip
    ratios = set()
    for _ in s.compare(range(6), lambda epoch, x, y, index, view: slow.step(s.net, x, y, index, None, 0.01)):
        close(s.method.memory.delta, slow.stored)
        close(s.method.momentum.delta * slow.momenta.abs().max() ** -1, slow.momenta / slow.momenta.abs().max())
        close(s.method.accuracy_ratio, torch.tensor(slow.ratio, dtype=torch.float64))
        decay = slow.average_decay(0.9, settings.get("threshold", 0.82))
        close(s.method.average_decay(0.9), torch.tensor(decay, dtype=torch.float64))
        ratios.add(slow.ratio)
    if threat is LINF and scale == 1:
        assert min(ratios) < settings.get("threshold", 0.82) <= max(ratios)


OTHER_CONSTRAINT = {"gamma": 0.06, "ratio": 20.0, "stride": 0, "drops": (0.1, 0.2), "smoothing": 0.1}
CONSTRAINTS = pytest.mark.parametrize(
    ("settings", "active"),
    [({}, range(2, 27)), (OTHER_CONSTRAINT, [1, 2, 4, 5, *range(7, 30)])],
    ids=["default", "other"],
)


def constrain(s, refer, settings, active):
    """Compare eight epochs of ConvergeSmooth, with all of its branches."""
    constraint = reference.Constraint(
        settings.get("gamma", 0.03), settings.get("ratio", 1.0), 1 - settings.get("smoothing", 0.4), active
    )

    def step(epoch, x, y, index, view):
        constraint.begin(epoch)
        return refer(constraint, epoch, x, y, index)

    for _ in s.compare(range(8), step):
        close(s.method.last_mean, torch.tensor(constraint.mean, dtype=torch.float64))
        close(s.method.change, torch.tensor(constraint.change, dtype=torch.float64))
        yield constraint
    assert set(constraint.signs) == {-1, 0, 1}
    for epoch in range(30):
        s.method.start_epoch(epoch, 30)
        assert bool(s.method.is_active) == (epoch in active), epoch


@pytest.mark.parametrize(("threat", "scale"), CASES)
@CONSTRAINTS
@pytest.mark.slow
def test_fgsm_rs_cs(compared_method, threat, scale, settings, active):
    s = compared_method("fgsm-rs-cs", threat, scale, **settings)

    def refer(constraint, epoch, x, y, index):
        noise = s.noise(epoch, index)
        return reference.fgsm_rs_cs(
            s.net, s.ball, noise, x, y, RATE, step=scale * threat.eps, constraint=constraint
        )  # fmt: skip

    for _ in constrain(s, refer, settings, active):
        pass


@pytest.mark.parametrize(("threat", "scale"), CASES)
@CONSTRAINTS
@pytest.mark.parametrize("weight", [0.0, 10.0])
@pytest.mark.slow
def test_fgsm_mep_cs(compared_method, threat, scale, settings, active, weight):
    s = compared_method("fgsm-mep-cs", threat, scale, dtype=torch.float32, weight=weight, **settings)
    slow = reference.MepCs(
        s.ball, s.method.memory.delta, PAD, step=scale * threat.eps, true=1 - settings.get("smoothing", 0.4),
        weight=weight, decay=0.3,
    )  # fmt: skip

    def refer(constraint, epoch, x, y, index):
        slow.constraint = constraint
        return slow.step(s.net, x, y, index, None, RATE)

    for _ in constrain(s, refer, settings, active):
        close(s.method.memory.delta, slow.stored)


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.parametrize(
    ("frame", "settings"),
    [("view", {}), ("image", {"smoothing": 0.1, "weight": 3.0, "stretch": 6.0})],
    ids=["default", "other"],
)
def test_fgsm_pco(compared_method, threat, scale, frame, settings):
    s = compared_method("fgsm-pco", threat, scale, frame=frame, dtype=torch.float32, **settings)
    corners = s.method.memory.delta.clone()
    distances = threat.distance(corners, torch.zeros_like(corners))
    assert distances.tolist() == pytest.approx([threat.eps] * EXAMPLES)
    expected = {"smoothing": 0.4, "weight": 10.0, "stretch": 1.5} | settings
    slow = reference.Pco(s.ball, corners, PAD, step=scale * threat.eps, true=1 - expected.pop("smoothing"), **expected)

    def refer(epoch, x, y, index, view):
        return slow.step(s.net, x, y, index, triples(view) if frame == "image" else None, RATE)

    notes = []
    for _, outcome in s.compare(range(3), refer):
        close(s.method.memory.delta, slow.stored)
        notes.append(outcome.notes)
    assert any(note["outside"] for note in notes)
    assert {note["larger"] for note in notes} == ({True, False} if settings else {True})


def test_fgsm_pco_never_begins_anew():
    method = atas.methods.create("fgsm-pco", LINF, 3, SHAPE)
    before = method.memory.delta.clone()
    for epoch in range(110):
        method.start_epoch(epoch, 110)
    assert torch.equal(before, method.memory.delta)


def test_fgsm_pco_compares_with_the_examples_of_all_processes(compared_method):
    """The sign of its term is that of the sum over all processes, whatever the sign in this one."""
    s = compared_method("fgsm-pco", LINF)
    s.method.start_epoch(0, 30)
    batch = Batch(s.images, s.labels, torch.arange(EXAMPLES), View.centre(EXAMPLES, PAD))
    kept = {name: value.clone() for name, value in s.method.state_dict().items()}

    def loss_with(total):
        s.method.load_state_dict(kept)
        update = Recorder(s.model, 0.0)
        update.total = lambda *sums: [total * torch.ones_like(value) for value in sums] if total else list(sums)
        return s.method.training_step(s.model, update, batch).loss

    alone, found = loss_with(None), {sign: loss_with(sign) for sign in (1.0, -1.0)}
    close(alone, found[1.0])
    assert found[-1.0] < found[1.0] - 1e-6


@pytest.mark.parametrize(("reset_every", "expected"), [(40, [40, 80]), (10, [10, 20, 30, 40, 50, 60, 70, 80, 90, 100])])
@pytest.mark.parametrize("name", ["fgsm-pgi", "fgsm-pgk", "fgsm-mep-cs"])
def test_when_fgsm_pgi_begins_anew(name, reset_every, expected):
    """Also momentum, and in the epochs that the authors' program resets in, which it counts from 0."""
    method, resets = atas.methods.create(name, LINF, 3, SHAPE, reset_every=reset_every), []
    for epoch in range(110):
        method.momentum.delta.fill_(1)
        before = method.memory.delta.clone()
        method.start_epoch(epoch, 110)
        if not torch.equal(before, method.memory.delta):
            assert set(method.memory.delta.unique().tolist()) == {-127, 127}
            resets.append(epoch)
        assert bool(method.momentum.delta.any()) == (epoch not in expected)
    assert resets == expected


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"smoothing": 0.1, "weight": 2.0, "momentum": 0.8, "step_size": 0.01, "radius": "0.7 eps"}],
    ids=["default", "other"],
)
@pytest.mark.parametrize("shared_by", ["class", "all"])
@pytest.mark.slow
def test_fgsm_uap(compared_method, small_net, threat, scale, settings, shared_by):
    """Batches of 6 and 5 of six classes, of which some are in one of the batches alone."""
    net = small_net(sharpness=6.0, classes=6)
    s = compared_method("fgsm-uap", threat, scale, net=net, classes=6, shared_by=shared_by, **settings)
    s.labels = torch.tensor([0, 1, 2, 3, 4, 5, 0, 0, 1, 1, 2])
    first, radius = s.method.universal.clone(), threat.eps * (0.7 if settings else 1.25)
    assert len(first) == (6 if shared_by == "class" else 1)
    length = threat.distance(first, torch.zeros_like(first))
    torch.testing.assert_close(length, torch.full_like(length, radius), atol=1e-7, rtol=1e-6)
    if threat is LINF:
        assert (first.abs() > 0.99 * radius).all()
    slow = reference.Uap(
        s.ball, first, radius=radius, step=scale * settings.get("step_size", threat.eps),
        kept=1 - settings.get("smoothing", 0.4) * 5 / 6, weight=settings.get("weight", 10.0),
        decay=settings.get("momentum", 0.3),
    )  # fmt: skip
    absent = 0

    def refer(epoch, x, y, index, view):
        groups = y.tolist() if shared_by == "class" else [0] * len(y)
        return slow.step(s.net, x, y, groups, RATE, scale * radius)

    for _, expected in s.compare(range(3), refer):
        close(s.method.universal, slow.universal)
        close(s.method.momentum / slow.momenta.abs().max(), slow.momenta / slow.momenta.abs().max())
        absent += len(first) - len(expected.notes["groups"])
    assert slow.momenta.abs().amax((1, 2, 3)).min() > 0
    assert bool(absent) == (shared_by == "class")


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.parametrize("settings", [{}, {"quantile": 0.7, "step_size": "0.5 eps"}], ids=["default", "other"])
def test_zerograd(compared_method, threat, scale, settings):
    s = compared_method("zerograd", threat, scale, **settings)
    quantile, step = (0.7, 0.5 * threat.eps) if settings else (0.35, 2 * threat.eps)

    def refer(epoch, x, y, index, view):
        noise = s.noise(epoch, index)
        return reference.zerograd(s.net, s.ball, noise, x, y, RATE, step=scale * step, quantile=quantile)

    zeros = sum(expected.notes["zeros"] for _, expected in s.compare(range(2), refer))
    assert zeros / (2 * s.images.numel()) == pytest.approx(quantile, abs=0.01)


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.parametrize("settings", [{}, {"starts": 2}], ids=["default", "other"])
def test_multigrad(compared_method, threat, scale, settings):
    s = compared_method("multigrad", threat, scale, sharpness=30.0, **settings)
    starts = settings.get("starts", 3)

    def refer(epoch, x, y, index, view):
        several = noises(s, epoch, index, starts)
        return reference.multigrad(s.net, s.ball, several, x, y, RATE, step=scale * 2 * threat.eps)

    agreed = sum(expected.notes["agreed"] for _, expected in s.compare(range(2), refer))
    assert 0.1 < agreed / (2 * s.images.numel()) < 0.99


class Hinges(torch.nn.Module):
    """Two classes, and a gradient that is exactly zero below 0.5 and has one sign per pixel above."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(math.prod(SHAPE), 2, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        return F.relu(x - 0.5).flatten(1) @ self.weight


def test_multigrad_leaves_pixels_without_a_gradient_at_one_point(compared_method, small_net):
    s = compared_method("multigrad", LINF, net=small_net())
    s.method.start_epoch(0)
    index, x = torch.arange(EXAMPLES), torch.full((EXAMPLES, *SHAPE), 0.5, dtype=torch.float64)
    moved = s.method.perturb(Hinges().double(), x, s.labels % 2, index) != x
    seen = torch.stack([noise > 0 for noise in noises(s, 0, index, 3)]).sum(0)
    assert torch.equal(moved, seen == 3)
    assert (seen == 2).any()


ELLE = [{}, {"adaptive": False}, {"weight": 50.0, "decay": 0.5, "sensitivity": 0.3}]


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.parametrize("settings", ELLE, ids=["adaptive", "constant", "sensitive"])
@pytest.mark.slow
def test_elle(compared_method, threat, scale, settings):
    given = {} if threat is LINF else {"weight": 1000.0 if "adaptive" in settings else 4000.0}
    s = compared_method("elle", threat, scale, sharpness=20.0, rate=0.01, **given | settings)
    usual = {"adaptive": True, "weight": 1000.0 if "adaptive" in settings else 4000.0}
    slow = reference.Elle(s.ball, step=scale * threat.eps, **{**usual, **settings})

    def refer(epoch, x, y, index, view):
        part = drawn(s, epoch, index, 2).uniform(Stream.START).double()
        return slow.step(s.net, noises(s, epoch, index, 2), part, x, y, s.rate)

    weights = []
    for _ in s.compare(range(6), refer):
        close(s.method.penalty_weight, torch.tensor(slow.weight, dtype=torch.float64))
        weights.append(slow.weight)
    if "sensitivity" in settings:
        assert 50.0 in weights[3:], "the penalty should jump"
        assert any(0 < weight < 50 for weight in weights), "and decay"


def test_when_the_weight_of_elle_jumps(compared_method, monkeypatch):
    """Penalties are given: after three, one that is barely above mean + 2 std of all earlier ones is a jump."""
    s, history, weights = compared_method("elle", LINF), [], [0.0]
    s.method.start_epoch(0)
    for penalty in (1.0, 2.0, 9.0, "above", 3.0, "below", "above", "below"):
        if isinstance(penalty, str):
            mean, deviation = sum(history) / len(history), torch.tensor(history).double().std(correction=0).item()
            penalty = mean + 2 * deviation * (1.001 if penalty == "above" else 0.999)
            weights.append(4000.0 if penalty > mean + 2 * deviation else 0.99 * weights[-1])
        else:
            weights.append(0.99 * weights[-1])
        history.append(penalty)
        monkeypatch.setattr("atas.methods.elle.squared_errors", lambda logits, y, part, r=penalty: r + 0 * part)
        index, view = next(iter(s.batches(0)))
        batch = Batch(view.apply(s.images, index), s.labels[index], index, view)
        s.method.training_step(s.model, Recorder(s.model, s.rate), batch)
        assert float(s.method.penalty_weight) == pytest.approx(weights[-1])
    assert weights.count(4000.0) == 2


def test_the_published_weights_of_elle_and_aaer():
    budgets = {2: 1000, 8: 1000, 10: 5000, 20: 5000, 22: 10000, 26: 10000}
    for eps, weight in budgets.items():
        ball = atas.Linf(eps / 255)
        assert atas.methods.create("elle", ball, 2, SHAPE, adaptive=False).weight == weight
        assert atas.methods.create("elle", ball, 2, SHAPE).weight == 4000
    published = {
        ("n-fgsm", 8): (1.5, 0.15), ("n-fgsm", 12): (5.0, 0.55), ("n-fgsm", 16): (8.5, 1.5),
        ("fgsm-rs", 8): (2.5, 1.5), ("fgsm-rs", 12): (5.0, 2.75), ("fgsm-rs", 16): (7.0, 3.25),
        ("n-fgsm", 32): (2.75, 0.75), ("fgsm-rs", 32): (5.75, 1.5), ("n-fgsm", 10): (3.25, 0.35),
        ("n-fgsm", 4): (1.5, 0.15), ("n-fgsm", 24): (5.625, 1.125), ("n-fgsm", 40): (2.75, 0.75),
    }  # fmt: skip
    for (attack_by, eps), weights in published.items():
        method = atas.methods.create("aaer", atas.Linf(eps / 255), 2, SHAPE, attack_by=attack_by, loss_weight="auto")
        assert (method.loss_weight, method.logit_weight) == pytest.approx(weights)
        assert method.step_size == pytest.approx(eps / 255 * (1 if attack_by == "n-fgsm" else 1.25))
    assert atas.methods.create("aaer", LINF, 2, SHAPE).loss_weight == 0


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.parametrize("attack_by", ["n-fgsm", "fgsm-rs"])
@pytest.mark.parametrize("weights", [{"logit_weight": 0.7}, {"logit_weight": 0.5, "loss_weight": 1.5}])
def test_aaer(compared_method, threat, scale, attack_by, weights):
    s = compared_method("aaer", threat, scale, sharpness=60.0, rate=0.01, attack_by=attack_by, **weights)
    free = attack_by == "n-fgsm"

    def refer(epoch, x, y, index, view):
        return reference.aaer(
            s.net, s.ball, s.noise(epoch, index), x, y, s.rate, step=scale * threat.eps * (1 if free else 1.25),
            free=free, loss_weight=weights.get("loss_weight", 0.0), logit_weight=weights["logit_weight"],
        )  # fmt: skip

    found = [expected.notes for _, expected in s.compare(range(4), refer)]
    assert any(notes["abnormal"] for notes in found), "some examples should be abnormal"


class Wavy(torch.nn.Module):
    """A network whose loss goes up and down within the ball."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(math.prod(SHAPE), 4, generator=torch.Generator().manual_seed(0)))
        self.bias = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return 2 * torch.sin(10 * x.flatten(1) @ self.weight) + self.bias


@pytest.mark.parametrize(("seed", "higher"), [(0, False), (9, True)])
def test_aaer_in_a_network_with_many_abnormal_examples(compared_method, small_net, seed, higher):
    """The mean variation of the abnormal ones decides, not each one's own; without the other kind there is no term."""
    weights = {"loss_weight": 1.5, "logit_weight": 0.5}
    s = compared_method("aaer", LINF, net=small_net(), **weights)
    model, s.method.seed = Wavy().double(), seed
    s.method.start_epoch(0, 30)

    def compare(rows):
        x, y = s.images[rows], s.labels[rows]
        noise = s.method.threat.sample(CounterRNG(seed, torch.tensor(0), rows), SHAPE).double()
        before = model((x + 2 * noise).clip(0, 1)).detach()
        logits = model(s.method.perturb(model, x, y, rows))
        expected, notes = reference.aaer_loss(before, logits, y, **weights)
        found = s.method.loss(logits, y, rows)
        close(found, expected)
        close(torch.autograd.grad(found, model.weight, retain_graph=True), torch.autograd.grad(expected, model.weight))
        return notes

    notes = compare(torch.arange(EXAMPLES))
    few = torch.tensor(notes["abnormal"])
    rest = torch.tensor([i for i in range(EXAMPLES) if i not in notes["abnormal"]])
    own, limit = notes["variations"][few], notes["variations"][rest].mean()
    assert own.min() < limit < own.max()
    assert (own.mean() > limit) == higher
    for rows in (few, rest):
        assert compare(rows)["excess"] is None


def test_aaer_compares_with_the_examples_of_all_processes(compared_method, small_net):
    """Two parts of a batch, weighted by their sizes, have the loss and the gradient of the whole."""
    s = compared_method("aaer", LINF, net=small_net(), logit_weight=0.5)
    s.model = Wavy().double()
    s.method.start_epoch(0, 30)
    found, sums = [], {}

    def loss_of(rows):
        x, y = s.images[rows], s.labels[rows]
        loss = s.method.loss(s.model(s.method.perturb(s.model, x, y, rows)), y, rows)
        return loss, torch.autograd.grad(loss, list(s.model.parameters()))

    def note(*values):
        sums[len(sums)] = torch.stack([value.detach() for value in values])
        return list(sums[len(sums) - 1])

    parts = torch.arange(EXAMPLES).split([6, 5])
    s.method._update = SimpleNamespace(total=note)
    whole, gradients = loss_of(torch.arange(EXAMPLES))
    for part in parts:
        loss_of(part)
    close(sums[1] + sums[2], sums[0])
    assert 0 < sums[0][2] < EXAMPLES, "some examples should be abnormal"
    s.method._update = SimpleNamespace(total=lambda *values: list(sums[0]))
    found = [(len(part) / EXAMPLES, *loss_of(part)) for part in parts]
    close(sum(share * loss for share, loss, _ in found), whole)
    for row, gradient in enumerate(gradients):
        close(sum(share * parts[row] for share, _, parts in found), gradient)


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.parametrize("settings", [{}, {"decay": 0.5, "curvature": 0.05, "max_step": 0.1}], ids=["default", "other"])
def test_sora(compared_method, threat, scale, settings):
    s = compared_method("sora", threat, scale, sharpness=100.0, rate=0.01, **settings)
    linearity, sizes = [0.99], []

    def refer(epoch, x, y, index, view):
        part = drawn(s, epoch, index, 1).uniform(Stream.START, SHAPE).double()
        return reference.sora(
            s.net, s.ball, linearity, s.noise(epoch, index), part, x, y, s.rate, scale=scale,
            longest=settings.get("max_step", 2 * threat.eps), curvature=settings.get("curvature", 0.02),
            share=1 - settings.get("decay", 0.95),
        )  # fmt: skip

    assert s.method.linearity == pytest.approx(linearity[0])
    for epoch, first in ((0, 0.99), (1, 0.9), (2, -0.5)):  # which this network's own loss is too linear to come to
        linearity[0] = first
        s.method.linearity.fill_(first)
        for _, expected in s.compare([epoch], refer):
            close(s.method.linearity, torch.tensor(linearity[0], dtype=torch.float64))
            sizes.append(expected.notes["size"])
            assert linearity[0] != first
    assert sizes[0] == scale * settings.get("max_step", 2 * threat.eps)
    assert sizes[2] < 0.6 * sizes[0]
    assert sizes[4] < 0.1 * sizes[0]


def fresh(s, epoch):
    """The noise of a reset, which is given."""
    draw = CounterRNG(3, torch.tensor(epoch), torch.arange(EXAMPLES))
    return s.method.threat.sample(draw, s.method.memory.delta.shape[1:], reset=True).double()


def remember(s, slow, epochs):
    """Train with memory, from `epochs`; the slow one sees its reset noise. Compares the canvases after each step."""

    def refer(epoch, x, y, index, view):
        if epoch != refer.epoch:
            refer.epoch = epoch
            slow.begin(epoch, lambda epoch: fresh(s, epoch))
        outcome = slow.step(s.net, s.images, y, index, triples(view), s.rate, epoch)
        close(x, outcome.notes["x"])
        return outcome

    refer.epoch = None
    for epoch, expected in s.compare(epochs, refer):
        close(s.method.memory.delta, slow.canvases)
        yield epoch, expected


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.parametrize("settings", [{}, {"step_size": 0.02}], ids=["default", "other"])
@pytest.mark.slow
def test_atta(compared_method, threat, scale, settings):
    s = compared_method("atta", threat, scale, epochs=4, reset_every=2, dtype=torch.float32, **settings)
    step = settings.get("step_size", 4 / 255 if threat is LINF else threat.eps / 2)
    slow = reference.Atta(s.ball, s.method.memory.delta, PAD, 2, 4, step=scale * step)
    for _ in remember(s, slow, range(4)):
        pass
    assert slow.resets == [1]


@pytest.mark.parametrize(("mode", "write_back"), [("train", True), ("auto", False), ("train", False)])
@pytest.mark.parametrize("name", ["atta", "atas"])
def test_memory_with_the_attack_in_train_mode_and_without_writing_back(compared_method, name, mode, write_back):
    settings = {"attack_mode": mode, "write_back": write_back, "dtype": torch.float32, "reset_every": 2}
    released = {"c": 1.28, "max_step": 16 / 255, "beta": 0.5, "clip": (4 / 255, 14 / 255), "warmup_epochs": 5}
    s = compared_method(name, LINF, epochs=8, **settings, **(released if name == "atas" else {}))
    if name == "atta":
        slow = reference.Atta(s.ball, s.method.memory.delta, PAD, 2, 8, step=4 / 255)
    else:
        slow = reference.Atas(s.ball, s.method.memory.delta, PAD, 2, 8, scale=1.0, **released)
    slow.training, slow.write_back = mode == "train", write_back
    first = s.method.memory.delta.clone()
    for epoch, _ in remember(s, slow, range(4, 7)):
        if epoch == 4:
            assert torch.equal(s.method.memory.delta, first) == (not write_back)
    assert slow.resets == [5]


@pytest.mark.parametrize("name", ["pgd", "atta", "atas"])
def test_an_unknown_mode_or_clamp_is_refused(name):
    with pytest.raises(UsageError, match="attack_mode must be 'auto' or 'train' or 'eval'; got 'evil'"):
        atas.methods.create(name, LINF, 4, SHAPE, attack_mode="evil")
    with pytest.raises(UsageError, match="clamp must be 'both' or 'inputs' or 'carried'; got 'input'"):
        atas.methods.create("free", LINF, 4, SHAPE, clamp="input")


def test_atta_steps_half_of_eps_at_every_budget(compared_method):
    for eps in (4 / 255, 16 / 255):
        s = compared_method("atta", atas.Linf(eps), dtype=torch.float32)
        slow = reference.Atta(s.ball, s.method.memory.delta, PAD, 10, 30, step=eps / 2)
        for _ in remember(s, slow, range(1)):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("threat", [LINF, L2], ids=["linf", "l2"])
def test_atas_through_thirty_epochs(compared_method, threat):
    """The released method from start to end: five epochs of warm-up, then clipped adaptive steps, two resets."""
    s = compared_method("atas", threat, sharpness=30.0, rate=0.001, dtype=torch.float32)
    linf = threat is LINF
    clip = (4 / 255, 14 / 255) if linf else (0.25, 0.875)
    slow = reference.Atas(
        s.ball, s.method.memory.delta, PAD, 10, 30,
        c=1.28, max_step=16 / 255 if linf else 1.0, beta=0.5, clip=clip, warmup_epochs=5, scale=1.0,
    )  # fmt: skip
    seen, raw = torch.zeros(EXAMPLES, dtype=torch.float64), []
    batches = (index for epoch in range(30) for index, _ in s.batches(epoch))
    before = slow.norms.clone()
    for (epoch, expected), index in zip(remember(s, slow, range(30)), batches, strict=True):
        seen[index] = expected.notes["sizes"]
        close(s.method.step_sizes, seen)
        close(s.method.gradient_norms, slow.norms.sqrt())
        if epoch < 5:
            close(seen[index], torch.full_like(seen[index], threat.eps))
            assert not slow.norms.any()
        else:
            raw.append(expected.notes["raw"])
        if epoch in (9, 19):  # a reset leaves v as it was: beta times the old one, at least
            assert (slow.norms[index] >= 0.5 * before[index]).all()
        before = slow.norms.clone()
    assert slow.resets == [9, 19]
    raw = torch.cat(raw)
    below, above = raw < clip[0], raw > clip[1]
    assert below.any(), "the lower end of the clip should be at work"
    assert above.any(), "the upper end of the clip should be at work"
    assert (~below & ~above).any(), "and some steps should be free"


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.parametrize(
    "settings",
    [
        {"warmup_epochs": 1},
        {"warmup_epochs": 0, "clip": None, "beta": 0.9, "c": 0.3, "max_step": 0.1},
        {"warmup_epochs": 0, "clip": (0.02, 0.03), "beta": 0.0},
    ],
    ids=["warm", "free", "narrow"],
)
@pytest.mark.slow
def test_atas_with_other_settings(compared_method, threat, scale, settings):
    s = compared_method("atas", threat, scale, epochs=4, reset_every=2, dtype=torch.float32, **settings)
    linf = threat is LINF
    usual = {
        "c": 1.28,
        "max_step": 16 / 255 if linf else 1.0,
        "beta": 0.5,
        "clip": (4 / 255, 14 / 255) if linf else (0.25, 0.875),
    }
    slow = reference.Atas(s.ball, s.method.memory.delta, PAD, 2, 4, scale=scale, **{**usual, **settings})
    for _ in remember(s, slow, range(4)):
        close(s.method.gradient_norms, slow.norms.sqrt())
    assert slow.resets == [1]


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.slow
def test_atas_literal(compared_method, threat, scale):
    """Algorithm 1: adaptive from the first epoch on, no clip."""
    s = compared_method("atas-literal", threat, scale, dtype=torch.float32)
    max_step = 16 / 255 if threat is LINF else 1.0
    slow = reference.Atas(
        s.ball, s.method.memory.delta, PAD, 10, 30,
        c=1.28, max_step=max_step, beta=0.5, clip=None, warmup_epochs=0, scale=scale,
    )  # fmt: skip
    for epoch in (0, 1, 8, 9, 10, 29):
        for _ in remember(s, slow, [epoch]):
            close(s.method.gradient_norms, slow.norms.sqrt())
    assert slow.resets == [9]


@pytest.mark.parametrize(("threat", "scale"), CASES)
@pytest.mark.parametrize(
    "settings", [{}, {"smoothing": 0.0, "share": 0.9, "decay": 0.5, "from_epoch": 0}], ids=["default", "other"]
)
@pytest.mark.slow
def test_atas_plus(compared_method, threat, scale, settings):
    s = compared_method("atas-plus", threat, scale, dtype=torch.float32, classes=4, **settings)
    linf = threat is LINF
    clip = (4 / 255, 14 / 255) if linf else (0.25, 0.875)
    slow = reference.Atas(
        s.ball, s.method.memory.delta, PAD, 10, 30,
        c=1.28, max_step=16 / 255 if linf else 1.0, beta=0.5, clip=clip, warmup_epochs=5, scale=scale,
    )  # fmt: skip
    slow.targets = reference.Targets(4, **{"smoothing": 0.1, "share": 0.4, "decay": 0.7, "from_epoch": 5} | settings)
    for epoch in (0, 1, 4, 5, 6):
        for _ in remember(s, slow, [epoch]):
            for i, average in slow.targets.averages.items():
                close(s.method.targets.average[i], average)
    assert len(slow.targets.averages) == EXAMPLES


@pytest.mark.parametrize("name", ["atas", "atas-literal", "atas-plus", "atta"])
@pytest.mark.parametrize(
    ("reset_every", "epochs", "expected"),
    [
        (10, 30, [9, 19]),
        (10, 31, [9, 19, 29]),
        (10, None, [9, 19, 29]),
        (10, 90, [9, 19, 29]),
        (7, 30, [6, 13, 20, 27]),
        (15, 30, [14]),
    ],
)
def test_when_the_memory_is_reset(name, reset_every, epochs, expected):
    hyper = {"classes": 4} if name == "atas-plus" else {}
    method = atas.methods.create(name, LINF, 3, SHAPE, pad=PAD, reset_every=reset_every, **hyper)
    resets = []
    for epoch in range(30):
        before = method.memory.delta.clone()
        method.start_epoch(epoch, epochs)
        if not torch.equal(before, method.memory.delta):
            resets.append(epoch)
    assert resets == expected


@pytest.mark.parametrize("name", atas.methods.names())
def test_step_with_an_optimiser_is_learn_with_gradient_descent(small_net, make_images, name):
    """`step` does the same as `learn`, with torch's optimiser: momentum and weight decay come after."""
    images, labels, index = make_images(5, SHAPE, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0]), torch.arange(5)
    states = []
    for with_optimizer in (True, False):
        hyper = {"replays": 1} if name == "free" else {}
        hyper |= {"classes": 4} if atas.methods.takes_classes(name) else {}
        method = atas.methods.create(name, LINF, 5, SHAPE, pad=PAD, **hyper).double()
        method.start_epoch(0, 30)
        model = small_net().double().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=0.01)
        for _ in range(2):
            if with_optimizer:
                method.step(model, optimizer, images, labels, index)
            else:
                recorder = Recorder(model, rate=0.0)
                method.training_step(model, recorder, Batch(images, labels, index, View.centre(5, PAD)))
                (gradients,) = recorder.updates
                for key, weight in model.named_parameters():
                    weight.grad = gradients[key]
                optimizer.step()
        states.append(model.state_dict())
    close(*states)
