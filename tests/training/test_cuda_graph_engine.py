"""Recording a step leaves everything as it was; here with graphs that are no graphs, to see it without a GPU."""

import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import atas
from atas.core.autograd import HookedSplit
from atas.ops.networks import AcceleratedNetwork
from atas.training import cuda_graph_engine
from atas.training.build import build

MEMORIES = [{}, {"method.store": "host"}, {"method.grid": 4}, {"method.grid": 4, "method.store": "host"}]
CASES = [(name, {}) for name in atas.methods.names() if name not in ("atas", "atta")]
CASES += [(name, values) for name in ("atas", "atta") for values in MEMORIES]
CROP = {"data.view": "crop", "data.view_size": 6, "data.pad": 0, "method.grid": 4}


@pytest.fixture
def captured(monkeypatch):
    """The module of the captured engine, whose kernels, compiler and graphs are the plain functions."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(cuda_graph_engine, "register_kernels", lambda: None)
    monkeypatch.setattr(cuda_graph_engine.FusedSGD, "supports", lambda weights, copies: False)
    monkeypatch.setattr(cuda_graph_engine, "warm_up", lambda function: [function() for _ in range(3)])
    monkeypatch.setattr(
        cuda_graph_engine, "capture", lambda function: (types.SimpleNamespace(replay=function), function())
    )
    return cuda_graph_engine


@pytest.fixture
def make(captured, toy_recipe, toy_data, tiny_net):
    """Make an engine that records its steps."""

    def made(method="atas", values=None):
        settings = toy_recipe(method, {"training.epochs": 4, "training.ema": 0.9, **(values or {})})
        model = tiny_net()
        parts = build(settings, toy_data, model, log=lambda text: None).engine
        return captured.CudaGraphEngine(settings, model, parts.method, parts.loader, log=lambda text: None)

    return made


def state(engine):
    counters = {"update": engine._update, "place": engine._position}
    return {name: tensor.clone() for name, tensor in (engine.state_tensors() | counters).items()}


def changed(one, other):
    return [name for name in one if not torch.equal(one[name], other[name])]


class Largest(TorchDispatchMode):
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
@pytest.mark.parametrize("place", ["before the first epoch", "between epochs"])
def test_all_is_as_it_was_before_a_step_was_recorded(method, values, place, make, captured, monkeypatch):
    engine = make(method, values)
    if place == "between epochs":
        engine.start_epoch(0, 0)
        for _ in range(len(engine.loader)):
            engine.step()
        engine._graphs.clear()
    before, meanwhile = state(engine), []
    plain = captured.capture
    monkeypatch.setattr(captured, "capture", lambda function: (plain(function), meanwhile.append(state(engine)))[0])
    engine.prepare(1)
    assert not changed(before, state(engine))
    assert len(meanwhile) == 2  # whole batches and the short last one
    assert all("model.fc.weight" in changed(before, there) for there in meanwhile)
    if hasattr(engine.method, "memory") and values.get("method.store") != "host":
        assert all("method.memory.delta" in changed(before, there) for there in meanwhile)


@pytest.mark.parametrize("values", [{}, CROP])
def test_of_a_memory_no_more_than_a_batch_is_set_aside(values, make):
    engine = make(values={"training.batch_size": 7, **values})
    engine.start_epoch(0, 0)
    engine._graphs.clear()
    with Largest(engine.method.memory.delta) as seen:
        engine.prepare()
    assert 0 < seen.rows <= 7 < len(engine.method.memory.delta)


def test_all_is_as_it_was_when_a_step_cannot_be_recorded(make, captured, monkeypatch):
    engine = make()
    engine.start_epoch(0, 0)
    engine.step()
    engine._graphs.clear()
    before = state(engine)

    def fail(function):
        function()
        raise RuntimeError("no graphs here")

    monkeypatch.setattr(captured, "capture", fail)
    engine.prepare()
    assert not changed(before, state(engine))
    assert set(engine._graphs.values()) == {None}


def test_nothing_is_left_of_a_step_that_broke_off_while_it_was_recorded(make, captured, monkeypatch):
    engine = make()
    engine.start_epoch(0, 0)
    engine._graphs.clear()

    def fail(function):
        with monkeypatch.context() as patch:
            patch.setattr(engine, "apply", None)
            function()  # ends between the gradients and the update

    monkeypatch.setattr(captured, "capture", fail)
    engine.prepare()
    assert set(engine._gradients) == {None}


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


def test_an_accelerated_network_is_used_in_steps_and_by_the_monitor(make, captured, monkeypatch):
    plain = make("pgd")
    monkeypatch.setattr(captured, "accelerate", lambda model: FakeAccelerated(model))
    engine = make("pgd")
    for each in (plain, engine):
        each.start_epoch(0, 0)
        each.step()
    network = engine.eval_model
    assert isinstance(network, FakeAccelerated)
    assert network.model is engine.compute_model
    assert network.precompiled == (engine.loader.size(len(engine.loader) - 1), *engine.loader.images.shape[1:])
    passes = network.train_forward_count
    assert passes > 0
    assert engine.network is engine.compute_model, "outside of a capture steps run as written"
    counts = [name for name in plain.state_tensors() if name.endswith("num_batches_tracked")]
    assert set(changed(plain.state_tensors(), engine.state_tensors())) <= set(counts)
    network.eval()
    assert not engine.compute_model.training


def test_a_fast_step_that_fails_is_captured_with_the_plain_network(make, captured, monkeypatch):
    class Failing(FakeAccelerated):
        def forward(self, x):
            raise RuntimeError("no kernel for this")

    monkeypatch.setattr(captured, "accelerate", lambda model: Failing(model))
    engine = make("pgd")
    engine.start_epoch(0, 0)
    engine.step()
    assert engine.network is engine.compute_model
    assert all(graph is not None for graph in engine._graphs.values())
