"""The captured engine trains as the eager one does, and capturing a step changes nothing; with graphs of recorded CPU
operations, so no GPU is needed."""

import dataclasses

import pytest
import torch
from helpers.fake_device import capturing, work_elsewhere
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import atas
from atas.core.split_model import HookedSplit
from atas.ops.networks import AcceleratedNetwork
from atas.training import build as build_module
from atas.training.build import build
from atas.training.cuda_graph_engine import CudaBackend, CudaGraphEngine, channels_last
from atas.training.ema import EMA
from atas.training.engine import Engine
from atas.training.optim import SGD

MEMORIES = [{}, {"method.store": "host"}, {"method.grid": 4}, {"method.grid": 4, "method.store": "host"}]
CASES = [(name, {}) for name in atas.methods.names() if name not in ("atas", "atta")]
CASES += [(name, values) for name in ("atas", "atta") for values in MEMORIES]
CASES += [("atas", {"optimizer.name": "adamw", "optimizer.clip_norm": 0.1, "schedule.warmup": 0.2})]
CASES += [("free", {"optimizer.clip_norm": 0.1, "optimizer.decay_norms": False})]
CASES += [("atas", {"targets.teacher_share": (0.7, 0.95)}), ("atas", {"method.write_back": False})]
EXCHANGES = [
    *((name, {}) for name in atas.methods.names()),
    *(("atas", values) for values in (
        {"targets.teacher_share": (0.7, 0.95), "targets.smoothing": 0.1},
        {"targets.smoothing": 0.2, "targets.noise": "random"},
        {"optimizer.name": "adamw", "optimizer.clip_norm": 0.1},
        {"optimizer.clip_norm": 0.1, "optimizer.decay_norms": False},
        *({"optimizer.perturb": form} for form in ("ascent", "attack", "momentum")),
        {"consistency.weight": 1.0, "consistency.through": "both"},
        {"method.write_back": False, "method.attack_mode": "train", "training.ema": [0.9, 0.99]},
        {"data.view": "cropshift", "data.shift": 2, "data.pad": 0, "data.erase": 0.5},
        {"data.view": "resized", "data.view_size": 6, "data.pad": 0, "method.grid": 4},
        {"method.norm": "l2", "method.eps": 0.5, "method.max_step": "auto", "method.clip": "auto"},
    )),
    ("free", {"method.clamp": "inputs"}),
    ("free", {"method.clamp": "carried"}),
    ("pgd", {"method.attack_mode": "eval"}),
]  # fmt: skip
CROP = {"data.view": "crop", "data.view_size": 6, "data.pad": 0, "method.grid": 4}


class RecordedGraph(TorchDispatchMode):
    """A CUDA graph on the CPU: the operations of one call. A replay runs them on the same tensors, without Python."""

    def __init__(self):
        super().__init__()
        self._operations = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self._operations.append((operation, args, kwargs or {}, result))
        return result

    def replay(self):
        with torch.no_grad():
            for operation, args, kwargs, result in self._operations:
                self._repeat(operation, args, kwargs, result)

    @staticmethod
    def _repeat(operation, args, kwargs, result):
        inputs = {leaf.untyped_storage().data_ptr() for leaf in tensors(args, kwargs)}
        again = operation(*args, **kwargs)
        for old, new in zip(tensors(result), tensors(again), strict=True):
            if old.untyped_storage().data_ptr() not in inputs:  # neither a view nor changed in place
                old.copy_(new)


def tensors(*trees):
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, torch.Tensor)]


def warm_up(function, times):
    for _ in range(times):
        function()


def capture(function):
    with RecordedGraph() as graph:
        result = function()
    return graph, result


ON_CPU = CudaBackend(warm_up=warm_up, capture=capture, accelerate=lambda model: None, optimizer=SGD, average=EMA)


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch):
    """PyTorch's compiler takes functions as they are, and there is no device to wait for."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


@pytest.fixture
def make(toy_recipe, toy_data, tiny_net):
    """Make an engine that captures its steps; without a backend, the eager engine to compare with."""

    def made(method="atas", values=None, *, data=toy_data, log=lambda text: None, **backend):
        settings = toy_recipe(method, {"training.epochs": 4, "training.ema": 0.9, **(values or {})})
        model = channels_last(tiny_net())
        parts = build(settings, data, model, log=lambda text: None).engine
        if backend == {"backend": None}:
            return Engine(settings, model, parts.method, parts.loader)
        backend = dataclasses.replace(ON_CPU, **backend)
        return CudaGraphEngine(settings, model, parts.method, parts.loader, log, backend=backend)

    return made


def state(engine):
    return {name: tensor.clone() for name, tensor in engine.state_tensors().items()}


def changed(one, other):
    return [name for name in one if not torch.equal(one[name], other[name])]


def run_epoch(engine, epoch):
    engine.start_epoch(epoch, 0)
    for _ in range(len(engine.loader)):
        engine.step()


class LargestRows(TorchDispatchMode):
    """The rows of the largest tensor with rows of this shape that any operation makes, apart from the memory itself."""

    def __init__(self, memory):
        super().__init__()
        self.rows, self._memory = 0, memory

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == self._memory.dtype:
            like = made.shape[1:] == self._memory.shape[1:] and made.data_ptr() != self._memory.data_ptr()
            self.rows = max(self.rows, len(made) if like else 0)
        return made


@pytest.mark.parametrize(("method", "values"), CASES)
@pytest.mark.parametrize("place", ["before the first epoch", "after a resume"])
@pytest.mark.slow
def test_capture_leaves_the_state_unchanged_and_replays_train_as_eager_steps_do(method, values, place, make):
    meanwhile = []

    def capture_and_look(function):
        captured = capture(function)
        meanwhile.append(state(engine))
        return captured

    eager, engine = make(method, values, backend=None), make(method, values, capture=capture_and_look)
    epoch = 0
    if place == "after a resume":
        run_epoch(eager, 0)
        engine.load_state_tensors(eager.state_tensors(), eager.updates)
        epoch = 1
    before = state(engine)
    engine.prepare(epoch)
    assert not changed(before, state(engine))
    assert len(meanwhile) == 2  # whole batches and the short last one
    assert all("model.fc.weight" in changed(before, there) for there in meanwhile)
    writes = values.get("method.store") != "host" and values.get("method.write_back", True)
    if hasattr(engine.method, "memory") and writes:
        assert all("method.memory.delta" in changed(before, there) for there in meanwhile)
    for each in (eager, engine):
        run_epoch(each, epoch)
    assert not changed(state(eager), state(engine))
    assert len(meanwhile) == 2, "steps are replayed, not captured again"


BY_EPOCH = {
    "training.ema": (0.9, 0.5),
    "consistency.weight": 1.0,
    "consistency.ramp": 1.0,
    "optimizer.perturb_from": 2,
    "data.view": "cropshift",
    "data.shift": 2,
    "data.erase": 0.5,
    "data.view_until": 0.75,
}
TEACHER = {"targets.teacher_share": (0.2, 0.9), "targets.teacher_temperature": (3, 1)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "values"),
    [
        ("atas-plus", {"optimizer.perturb": "ascent", "consistency.through": "both", "method.from_epoch": 1}),
        ("atas-plus", {"optimizer.perturb": "attack", "method.from_epoch": 3}),
        ("fgsm-rs", {"optimizer.perturb": "momentum", "targets.share": 0.5, "targets.from_epoch": 1}),
        ("atas", {"optimizer.perturb": "ascent", **TEACHER}),
    ],
)
def test_replays_follow_all_that_changes_from_epoch_to_epoch(method, values, make):
    graphs = []

    def capture_and_count(function):
        graphs.append(capture(function))
        return graphs[-1]

    eager = make(method, BY_EPOCH | values, backend=None)
    engine = make(method, BY_EPOCH | values, capture=capture_and_count)
    for epoch in range(4):
        for each in (eager, engine):
            run_epoch(each, epoch)
        assert not changed(state(eager), state(engine)), epoch
        assert len(graphs) == (2 if epoch < 2 else 4), "whole and last batches, without and with perturbed weights"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*meta")
@pytest.mark.parametrize(("method", "values"), EXCHANGES, ids=str)
def test_a_step_exchanges_nothing_with_the_host(method, values, monkeypatch, toy_recipe, toy_data, tiny_net):
    """Or it could not be captured; on a fake device, so no GPU is needed."""
    recipe = toy_recipe(method, {"training.epochs": 4, "training.ema": 0.9, **values})
    with work_elsewhere(monkeypatch, build_module):
        engine = build(recipe, toy_data, tiny_net(), log=lambda text: None).engine
        for epoch in (0, 2):
            engine.start_epoch(epoch, 0)
            engine.step()  # what is allocated or computed once
            engine.method.before_step(index := engine._epoch_batches[1])
            with capturing():
                engine.training_step(len(index))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["standard", "atas", "yopo"])
def test_capture_at_a_new_resolution_between_epochs_leaves_the_state_unchanged(method, make):
    """Also where the position in the epoch's order is past its last batch."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(20, 1, 64, 64, generator=generator), torch.arange(20) % 3
    data = atas.data.from_arrays("large", images, labels, images[:6], labels[:6])
    values = {"data.view": "crop", "data.pad": 0, "data.view_size": 64, "data.view_start": 32, "data.view_ramp": 0.25}
    if method == "atas":
        values |= {"method.grid": 8, "method.reset_every": 3}  # the second epoch starts from the first one's
    log = []
    eager, engine = make(method, values, data=data, backend=None), make(method, values, data=data, log=log.append)
    for epoch in range(2):
        for each in (eager, engine):
            run_epoch(each, epoch)
        assert not changed(state(eager), state(engine))
    assert [engine.resolution, eager.resolution] == [64, 64]
    assert not [text for text in log if "eagerly" in text]
    if engine.method.compilable:
        assert [text for text in log if text.startswith("compiling")] == [
            f"compiling the training step for images of {side} x {side} ..." for side in (32, 64)
        ]


@pytest.mark.parametrize("values", [{}, CROP])
def test_capture_copies_no_more_than_a_batch_of_the_stored_perturbations(values, make):
    engine = make(values={"training.batch_size": 7, **values})
    with LargestRows(engine.method.memory.delta) as seen:
        engine.prepare()
    assert 0 < seen.rows <= 7 < len(engine.method.memory.delta)


def test_a_step_that_cannot_be_captured_leaves_the_state_unchanged_and_runs_eagerly(make):
    def fail(function):
        function()
        raise RuntimeError("no graphs here")

    log = []
    eager, engine = make(backend=None), make(capture=fail, log=log.append)
    before = state(engine)
    engine.prepare()
    assert not changed(before, state(engine))
    assert log[-1].endswith(
        "cannot be captured (no graphs here); running it eagerly, which takes several times as long for small networks"
    )
    for each in (eager, engine):
        run_epoch(each, 0)
    assert not changed(state(eager), state(engine))


def test_gradients_of_a_capture_that_broke_off_reach_no_later_step(make):
    class Failing(SGD):
        fails = False

        def step(self, *arguments):
            if self.fails:
                raise RuntimeError("between the gradients and the update")
            super().step(*arguments)

    def fail(function):
        Failing.fails = True
        try:
            function()
        finally:
            Failing.fails = False

    eager, engine = make(backend=None), make(capture=fail, optimizer=Failing)
    for each in (eager, engine):
        run_epoch(each, 0)
    assert not changed(state(eager), state(engine))


class FakeAccelerated(AcceleratedNetwork):
    """Plain PyTorch behind the interface of a network with kernels."""

    def forward(self, x):
        self.train_forward_count += self.model.training
        return self.model(x)

    def loss_jvp(self, x, direction, y):
        raise NotImplementedError

    def split_first_layer(self):
        return HookedSplit(self.model, "conv1")

    def precompile(self, x, modes=(False, True)):
        self.precompiled = x.shape


@pytest.mark.parametrize(
    "name", ["pgd", "gat", "nuat", "liet", "tdat", "fgsm-pco", "fgsm-uap", "fgsm-pgk", "fgsm-rs-cs", "fgsm-mep-cs"]
)
def test_an_accelerated_network_is_used_in_steps_and_by_the_monitor(make, name):
    plain, engine = make(name), make(name, accelerate=FakeAccelerated)
    for each in (plain, engine):
        each.start_epoch(0, 0)
        each.step()
    network = engine.eval_model
    assert isinstance(network, FakeAccelerated)
    assert network.model is engine.compute_model
    assert network.precompiled == (engine.loader.size(len(engine.loader) - 1), *engine.loader.images.shape[1:])
    assert network.train_forward_count > 0
    assert engine.network is engine.compute_model, "outside of a capture steps run as written"
    counts = [name for name in plain.state_tensors() if name.endswith("num_batches_tracked")]
    assert set(changed(plain.state_tensors(), engine.state_tensors())) <= set(counts)
    network.eval()
    assert not engine.compute_model.training


class KeepsCounts(FakeAccelerated):
    """Kernels do not touch BatchNorm's count of batches."""

    def forward(self, x):
        layers = [module for module in self.model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
        before = [layer.num_batches_tracked.clone() for layer in layers]
        logits = super().forward(x)
        for layer, count in zip(layers, before, strict=True):
            layer.num_batches_tracked.copy_(count)
        return logits


@pytest.mark.slow
@pytest.mark.parametrize("values", [{}, {"optimizer.perturb": "ascent", "optimizer.perturb_from": 1}])
@pytest.mark.parametrize("method", ["fgsm", "atas"])
def test_batches_are_counted_for_kernels(method, values, make):
    plain, engine = make(method, values, backend=None), make(method, values, accelerate=KeepsCounts)
    for epoch in range(2):
        for each in (plain, engine):
            run_epoch(each, epoch)
        assert not changed(state(plain), state(engine)), epoch


class CountsNothing(EMA):
    """Averages that leave whole numbers to `copy_integers`, as the kernel does."""

    def update(self, decay=None):
        self._average(self._averaged, self.current_decay(decay))
        self.updates += 1


def test_averages_by_a_kernel_have_the_counts_of_the_model(make):
    plain, engine = make("fgsm", backend=None), make("fgsm", average=CountsNothing)
    for each in (plain, engine):
        run_epoch(each, 0)
    assert not changed(state(plain), state(engine))


def test_a_fast_step_that_fails_is_captured_with_the_plain_network(make):
    class Failing(FakeAccelerated):
        def forward(self, x):
            raise RuntimeError("no kernel for this")

    captures, log = [], []

    def capture_and_count(function):
        captures.append(capture(function))
        return captures[-1]

    engine = make("pgd", accelerate=Failing, capture=capture_and_count, log=log.append)
    engine.start_epoch(0, 0)
    engine.step()
    assert engine.network is engine.compute_model
    assert len(captures) == 2
    assert len([text for text in log if text.endswith("(no kernel for this); capturing it without compilation")]) == 2
    assert not [text for text in log if "eagerly" in text]
