"""One step function for all engines: compiled parts give what plain ones give; the optimiser is torch's."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import atas
from atas.core.dispatch import use_fast_ops
from atas.data.loader import DeviceLoader
from atas.errors import UsageError
from atas.methods import WeightPerturbation
from atas.models import Normalize, WideResNet
from atas.ops.jvp import loss_jvp
from atas.ops.networks import CompiledNetwork
from atas.ops.precision import low_precision_copy
from atas.recipes import OptimizerConfig, load
from atas.training.build import build
from atas.training.engine import Engine
from atas.training.optim import SGD, FusedSGD

SHAPE, EXAMPLES, BATCH = (3, 8, 8), 14, 6


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 64, 4),
    )


def make_engine(
    name: str, device: str = "cpu", kind: type[Engine] = Engine, model: nn.Module | None = None, values=None
) -> Engine:
    usual = {"engine.precision": "float32", "training.batch_size": BATCH, "training.epochs": 9, "data.pad": 2}
    recipe = "plus-30s" if name == "atas-plus" else name
    settings = load(f"cifar10-preact-resnet18-{recipe}").with_values(usual | (values or {}))
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (EXAMPLES, *SHAPE), dtype=torch.uint8, generator=generator)
    labels = torch.randint(4, (EXAMPLES,), generator=generator)
    place = torch.device(device)
    batches = DeviceLoader(images, labels, batch_size=BATCH, pad=2, flip=True, seed=0, device=place)
    own = dict(settings.method.settings)
    own |= {"batch_size": BATCH} if "batch_size" in atas.methods.settings(name) else {}
    own |= {"classes": 4} if atas.methods.takes_classes(name) else {}
    method = atas.methods.create(name, settings.threat, EXAMPLES, SHAPE, pad=2, device=place, **own)
    return kind(settings, (model or network()).to(place), method, batches)


@pytest.fixture(scope="module")
def _one_compiler():
    """What trainings have in common, such as their views, is compiled once, as in a process that trains many models."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=4096):
        yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("_one_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it itself
@pytest.mark.parametrize("name", [name for name in atas.methods.names() if atas.methods.get(name).compilable])
def test_a_compiled_step_is_the_plain_step(name):
    """Through the very parts that the captured engine compiles, here with a backend that needs no compiler."""
    plain, compiled = make_engine(name), make_engine(name)
    compiled.network = CompiledNetwork(compiled.compute_model, "aot_eager")
    for engine, backend in ((plain, None), (compiled, "aot_eager")):
        with use_fast_ops(backend):
            engine.start_epoch(6, 0)
            engine.step()
            engine.step()
    expected = plain.state_tensors()
    for key, found in compiled.state_tensors().items():
        torch.testing.assert_close(found, expected[key], atol=1e-6, rtol=1e-5, msg=key)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # as above
@pytest.mark.parametrize(("name", "form"), [("atas", "ascent"), ("atas", "attack"), ("free", "momentum")])
def test_a_compiled_step_with_perturbed_weights_is_the_plain_step(name, form):
    torch._dynamo.reset()
    plain, compiled = make_engine(name), make_engine(name)
    compiled.network = CompiledNetwork(compiled.compute_model, "aot_eager")
    for engine, backend in ((plain, None), (compiled, "aot_eager")):
        engine.method.weight_perturbation = WeightPerturbation(0.05, form)
        with use_fast_ops(backend):
            engine.start_epoch(6, 0)
            engine.step()
            engine.step()
    expected = plain.state_tensors()
    for key, found in compiled.state_tensors().items():
        torch.testing.assert_close(found, expected[key], atol=1e-6, rtol=1e-5, msg=key)


@pytest.mark.parametrize("form", ["ascent", "attack", "momentum"])
def test_the_low_precision_copy_sees_perturbed_weights_and_is_restored(form):
    """A linear network in bf16: its copy is what passes use, while the weights in float32 stay where they are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 4))
    engine = make_engine("fgsm", model=model, values={"engine.precision": "bf16"})
    low, kept = engine.compute_model[1].weight, model[1].weight
    assert low.dtype == torch.bfloat16
    engine.start_epoch(6, 0)
    engine.step()
    before, weights = low.detach().clone(), kept.detach().clone()

    def objective() -> torch.Tensor:
        return engine.network(torch.ones(2, 3, 8, 8)).float().square().sum()

    gradients = [torch.ones_like(weights), None]
    around = WeightPerturbation(0.5, form).around(engine.network, engine, objective, attack_gradients=gradients)
    with engine.precision(), around:
        assert torch.equal(kept, weights)
        moved = torch.linalg.vector_norm(low.detach().float() - before.float())
        assert float(moved) == pytest.approx(0.5 * float(torch.linalg.vector_norm(weights)), rel=0.01)
    assert torch.equal(low, before)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("form", ["ascent", "attack", "momentum"])
def test_an_engine_with_weights_perturbed_by_nothing_is_without_to_the_bit(form, precision):
    def build(perturbation):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        engine = make_engine("atas", model=model, values={"engine.precision": precision, "training.ema": 0.9})
        engine.method.weight_perturbation = perturbation
        return engine

    plain, zero, later = (
        build(perturbation)
        for perturbation in (None, WeightPerturbation(0.0, form), WeightPerturbation(0.1, form, from_epoch=7))
    )
    for engine in (plain, zero, later):
        for epoch in (5, 6):
            engine.start_epoch(epoch, 0)
            for _ in range(len(engine.loader)):
                engine.step()
    for key, value in plain.state_tensors().items():
        assert torch.equal(zero.state_tensors()[key], value), key
        assert torch.equal(later.state_tensors()[key], value), key
    later.start_epoch(7, 0)
    plain.start_epoch(7, 0)
    for engine in (plain, later):
        engine.step()
        engine.step()
    assert not torch.equal(plain.state_tensors()["model.1.weight"], later.state_tensors()["model.1.weight"])


def test_the_order_of_an_epoch_is_ready_before_it_begins(monkeypatch):
    """The host makes it while a device is busy, so that the device need not wait; and it is the epoch's own."""
    engine, asked, taken = make_engine("standard"), [], []
    order, take = engine.loader.order, engine.loader.take
    monkeypatch.setattr(engine.loader, "order", lambda epoch: asked.append(epoch) or order(epoch))
    monkeypatch.setattr(engine.loader, "take", lambda index, epoch: taken.append(index.clone()) or take(index, epoch))

    def run(epoch, first):
        taken.clear()
        engine.start_epoch(epoch, first)
        for _ in range(first, len(engine.loader)):
            engine.step()
        return torch.cat(taken)

    for epoch in (0, 1):
        assert torch.equal(run(epoch, 0), order(epoch))
    assert asked == [0, 1, 2]
    # not the next one: back to an earlier checkpoint, or a resume
    assert torch.equal(run(5, 1), order(5)[engine.loader.batch_size :])


def test_methods_that_cannot_be_compiled_say_so():
    found = [name for name in atas.methods.names() if not atas.methods.get(name).compilable]
    assert found == ["fgsm-ga", "yopo", "slat"]


def test_every_method_but_slat_and_yopo_at_another_layer_uses_the_fast_network():
    for name in atas.methods.names():
        classes = {"classes": 4} if atas.methods.takes_classes(name) else {}
        method = atas.methods.create(name, atas.Linf(8 / 255), EXAMPLES, SHAPE, **classes)
        assert method.uses_fast_network == (name != "slat")
    assert not atas.methods.create("yopo", atas.Linf(8 / 255), EXAMPLES, SHAPE, layer="layer1").uses_fast_network


class WithJvp(nn.Module):
    """A network with the JVP of its loss, as those with kernels have."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def loss_jvp(self, x: torch.Tensor, direction: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_jvp(self.model, x, direction, y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # as above
def test_gradient_alignment_by_jvp_is_that_by_two_backward_passes():
    """The way that the captured engine goes, compiled by a backend that needs no compiler."""
    torch._dynamo.reset()
    engines = []
    for backend in (None, "aot_eager"):
        torch.manual_seed(0)
        model = WideResNet(4, Normalize(3), 10, 1)
        engine = make_engine("fgsm-ga", model=model)
        if backend:
            engine.network = WithJvp(model)
        with use_fast_ops(backend):
            engine.start_epoch(6, 0)
            engine.step()
        engines.append(engine)
    plain, fast = (engine.state_tensors() for engine in engines)
    for key, found in fast.items():
        torch.testing.assert_close(found, plain[key], atol=1e-6, rtol=1e-4, msg=key)


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_optimiser_is_that_of_torch(nesterov, generator):
    weights = [torch.randn(5, 3, generator=generator), torch.randn(4, generator=generator)]
    ours = [weight.clone() for weight in weights]
    theirs = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = torch.optim.SGD(theirs, lr=1.0, momentum=0.9, weight_decay=5e-4, nesterov=nesterov)
    sgd = SGD(OptimizerConfig(nesterov=nesterov), ours, ours)
    for step in range(20):
        gradients = [torch.randn(weight.shape, generator=generator) for weight in weights]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        rate, momentum = torch.tensor([0.1 / (step + 1), 0.9 - 0.01 * step], dtype=torch.float64)
        optimizer.param_groups[0].update(lr=float(rate), momentum=float(momentum))
        optimizer.step()
        sgd.step(gradients, rate, momentum)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other.detach())


class Detached(nn.Module):
    """Its logits depend on the pixels and on no weight."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        return self.net(x).detach() + x.flatten(1)[:, :4]


def test_a_loss_that_depends_on_no_weight_is_refused():
    """With inputs that need a gradient, PyTorch has no objection."""
    engine = make_engine("sora", model=Detached())
    engine.start_epoch(0, 0)
    with pytest.raises(UsageError, match="no weight has a gradient of the training loss"):
        engine.step()


def test_a_weight_without_a_gradient_stays():
    weights = [torch.ones(3), torch.ones(2)]
    SGD(OptimizerConfig(), weights, weights).step([None, torch.ones(2)], torch.tensor(0.1), torch.tensor(0.9))
    assert torch.equal(weights[0], torch.ones(3))
    assert not torch.equal(weights[1], torch.ones(2))


def test_weights_that_the_kernel_cannot_go_over_are_found():
    """It takes all memory from the first address on as the weight, in float32, sixteen bytes at a time."""
    whole = torch.zeros(64, 16)
    supports = FusedSGD.supports
    last = torch.zeros(4, 3, 3, 3).contiguous(memory_format=torch.channels_last)
    for weight in (whole, whole.t(), whole[:3], torch.zeros(()), torch.zeros(4, 0), last):
        assert supports([weight], [weight])
        assert supports([weight], [weight.to(torch.bfloat16)])
    for weight in (
        whole[:, :8], whole[::2], torch.zeros(4, 1).expand(4, 3), whole.view(-1)[1:], whole.double(), whole.half(),
    ):  # fmt: skip
        assert not supports([whole, weight], [whole, weight])
    assert not supports([whole], [whole.half()])
    assert not supports([last], [last.to(torch.bfloat16).contiguous()])


def test_a_working_copy_shares_all_but_the_weights_in_low_precision():
    model = network()
    twin = low_precision_copy(model, torch.bfloat16)
    assert twin[0].weight.dtype == twin[4].weight.dtype == twin[4].bias.dtype == torch.bfloat16
    assert twin[1].weight is model[1].weight
    assert twin[1].running_mean is model[1].running_mean
    assert model[0].weight.dtype == torch.float32
    sgd = SGD(OptimizerConfig(), list(model.parameters()), list(twin.parameters()))
    sgd.step([torch.ones_like(weight) for weight in twin.parameters()], torch.tensor(0.5), torch.tensor(0.9))
    assert torch.equal(twin[0].weight, model[0].weight.to(torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("name", atas.methods.names())
def test_a_captured_step_is_the_eager_step(name):
    """In float32: signs of perturbations on 99.9% of pixels, norms to 1e-4."""
    from atas.training.cuda_graph_engine import CudaGraphEngine

    allowed, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        eager, captured = make_engine(name, "cuda"), make_engine(name, "cuda", CudaGraphEngine)
        captured.prepare()
        for engine in (eager, captured):
            engine.start_epoch(6, 0)
            engine.step()
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
    expected = eager.state_tensors()
    for key, found in captured.state_tensors().items():
        if key == "method.memory.delta":
            assert (found.sign() == expected[key].sign()).float().mean() >= 0.999
        else:
            torch.testing.assert_close(found, expected[key], atol=1e-4, rtol=1e-4, msg=key)


OTHER = {
    "teacher": ("atas", {"targets.teacher_share": (0.7, 0.95), "targets.smoothing": 0.1, "training.ema": 0.9}),
    "random noise": ("atas", {"targets.smoothing": 0.2, "targets.noise": "random"}),
    "adamw": ("atas", {"optimizer.name": "adamw", "optimizer.clip_norm": 0.1, "schedule.peak": 1e-4}),
    "clipped": ("atas-plus", {"optimizer.clip_norm": 0.1, "training.ema": [0.9, 0.99]}),
    "norms that do not decay": ("atas", {"optimizer.decay_norms": False}),
    "no write-back": ("atas", {"method.write_back": False}),
    "attack in train mode": ("atas", {"method.attack_mode": "train"}),
    "attack in eval mode": ("pgd", {"method.attack_mode": "eval"}),
    "clamped inputs": ("free", {"method.clamp": "inputs"}),
    "carried": ("free", {"method.clamp": "carried"}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", OTHER)
def test_a_captured_step_with_other_settings_is_the_eager_step(case, toy_recipe, toy_data, tiny_net):
    """In float32; in bf16 it is captured, and the weights stay finite."""
    name, values = OTHER[case]
    found, said = {}, []
    allowed, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        for kind, precision in (("eager", "float32"), ("captured", "float32"), ("captured", "bf16")):
            own = {"engine.device": "cuda", "engine.kind": kind, "engine.precision": precision, "training.epochs": 9}
            engine = build(toy_recipe(name, own | values), toy_data, tiny_net(), log=said.append).engine
            for epoch in (0, 2):
                engine.start_epoch(epoch, 0)
                engine.step()
            found[kind, precision] = engine.state_tensors()
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
    assert not any("cannot" in line for line in said), said
    assert all(tensor.isfinite().all() for tensor in found["captured", "bf16"].values())
    for key, expected in found["eager", "float32"].items():
        tensor = found["captured", "float32"][key]
        if key == "method.memory.delta":
            assert ((tensor - expected).abs() < 1e-3).float().mean() >= 0.99
        else:
            torch.testing.assert_close(tensor, expected, atol=1e-3, rtol=1e-3, msg=key)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["preact-resnet18-ssat", "preact-resnet18-yopo", "preact-resnet18-gradalign"])
def test_a_step_of_another_authors_network_is_captured(name):
    """They have no kernels, so they are compiled."""
    from atas.training.cuda_graph_engine import CudaGraphEngine

    said = []
    model = atas.models.create(name, 4)
    engine = make_engine("atas", "cuda", functools.partial(CudaGraphEngine, log=said.append), model)
    engine.start_epoch(6, 0)
    engine.step()
    assert not any("cannot" in line for line in said), said
    assert all(weight.isfinite().all() for weight in engine.model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["plain", "kernels"])
@pytest.mark.parametrize("form", ["ascent", "attack", "momentum"])
def test_a_captured_step_with_perturbed_weights_is_the_eager_step(form, model):
    """In float32, and after it a step of an epoch before the first perturbed one, which is a plain one.

    The budget is an L2 ball: with signs of gradients, a change of the weights by one part in a million moves them by
    0.015 within these four steps, with gradients by 2e-6.
    """
    from atas.training.cuda_graph_engine import CudaGraphEngine

    smooth = {"norm": "l2", "eps": 0.5, "max_step": "auto", "clip": "auto", "dtype": "float32"}
    values = {f"method.{key}": value for key, value in smooth.items()}

    def build(kind, perturbation):
        torch.manual_seed(0)
        net = network() if model == "plain" else WideResNet(4, Normalize(3), 10, 1)
        engine = make_engine("atas", "cuda", kind, net, values)
        engine.method.weight_perturbation = perturbation
        return engine

    allowed, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        perturbation = WeightPerturbation(0.05, form, from_epoch=6)
        eager, captured = (build(kind, perturbation) for kind in (Engine, CudaGraphEngine))
        captured.prepare()
        for engine in (eager, captured):
            for epoch in (5, 6):
                engine.start_epoch(epoch, 0)
                engine.step()
                engine.step()
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
    expected = eager.state_tensors()
    for key, found in captured.state_tensors().items():
        torch.testing.assert_close(
            found, expected[key], atol=1e-3, rtol=1e-3, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_optimiser_as_a_kernel(nesterov, kind, generator):
    weights = [torch.randn(shape, generator=generator).cuda() for shape in ((9000,), (64, 3, 3, 3), (5,))]
    made = []
    for optimiser in (SGD, FusedSGD):
        mine = [weight.clone() for weight in weights]
        working = mine if kind == torch.float32 else [weight.to(kind) for weight in mine]
        made.append((optimiser(OptimizerConfig(nesterov=nesterov), mine, working), mine, working))
    for step in range(6):
        gradients = [torch.randn(weight.shape, generator=generator).cuda().to(kind) for weight in weights]
        rate, momentum = torch.tensor([0.1 / (step + 1), 0.9 - 0.02 * step], dtype=torch.float64, device="cuda")
        for optimiser, _, _ in made:
            optimiser.step(gradients, rate, momentum)
    (_, expected, low), (_, found, found_low) = made
    for tensors in ((found, expected), (found_low, low)):
        for mine, other in zip(*tensors, strict=True):
            torch.testing.assert_close(mine, other)
