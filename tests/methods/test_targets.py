"""Label targets: equal to a slow reference with every method, always distributions, and part of the loss alone."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import atas
from atas.core.dispatch import use_fast_ops
from atas.core.rng import CounterRNG, Stream
from atas.distributed.sharding import DataShard
from atas.errors import DataError, UsageError
from atas.methods import LabelTargets, RememberedPredictions
from atas.recipes import TargetsConfig
from atas.training.build import build_targets

from .reference import Targets

SHAPE, EXAMPLES, CLASSES = (3, 8, 10), 12, 4
LINF = atas.Linf(8 / 255)
OWN = {"free": {"batch_size": 6, "replays": 2}, "yopo": {"outer": 2, "inner": 1}, "pgd": {"steps": 2}}
OWN["trades"] = OWN["mart"] = {"steps": 2}
NAMES = [name for name in atas.methods.names() if name not in ("atas-plus", "liet", "tdat")]  # they have their own


def make(name="standard", targets=None, **hyper):
    method = atas.methods.create(name, LINF, EXAMPLES, SHAPE, pad=2, targets=targets, **OWN.get(name, {}), **hyper)
    method.start_epoch(0, 30)
    return method


def batch(seed=0, count=6, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(count, CLASSES, generator=generator, dtype=dtype)
    index = torch.randperm(EXAMPLES, generator=generator)[:count]
    return logits, index % CLASSES, index


@pytest.mark.parametrize(
    "values",
    [
        {"smoothing": 0.3},
        {"share": 0.4, "decay": 0.7},
        {"share": 1.0, "decay": 0.0, "smoothing": 0.1, "from_epoch": 2},
    ],
    ids=["smoothing", "remembered", "all"],
)
def test_the_loss_equals_a_slow_reference(values):
    slow, fast = Targets(CLASSES, **values), make(targets=create(CLASSES, **values)).double()
    for epoch in range(4):
        fast.start_epoch(epoch, 30)
        for seed in (epoch, epoch + 10):
            logits, y, index = batch(seed, dtype=torch.float64)
            logits.requires_grad_()
            loss, expected = fast.loss(logits, y, index), slow.loss(logits, y, index, epoch)
            torch.testing.assert_close(loss, expected, atol=1e-12, rtol=1e-10)
            gradients = [torch.autograd.grad(value, logits)[0] for value in (loss, expected)]
            torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-10)
    if slow.share:
        for i, average in slow.averages.items():
            torch.testing.assert_close(fast.targets.average[i], average, atol=1e-12, rtol=1e-10)


def test_atas_plus_is_atas_with_targets_of_its_settings():
    own = {"smoothing": 0.3, "share": 0.2, "decay": 0.9, "from_epoch": 7}
    plus = atas.methods.create("atas-plus", LINF, EXAMPLES, SHAPE, classes=CLASSES, beta=0.25, **own)
    assert plus.beta == 0.25
    for name, value in own.items():
        assert getattr(plus.targets, name) == value, name
    logits, y, index = batch(dtype=torch.float32)
    twin = atas.methods.create("atas", LINF, EXAMPLES, SHAPE, beta=0.25, targets=RememberedPredictions(CLASSES, **own))
    for epoch in (6, 7):
        for method in (plus, twin):
            method.start_epoch(epoch, 30)
        assert torch.equal(plus.loss(logits, y, index), twin.loss(logits, y, index))


def create(classes, **values):
    return build_targets(TargetsConfig(**values), classes)


def test_uniform_smoothing_is_that_of_torch():
    logits, y, index = batch()
    loss = make(targets=LabelTargets(smoothing=0.3)).loss(logits, y, index)
    torch.testing.assert_close(loss, F.cross_entropy(logits, y, label_smoothing=0.3))


def test_random_smoothing_spreads_over_the_other_classes():
    method = make(targets=LabelTargets(smoothing=0.6, noise="random"))
    logits, y, index = batch()
    found = method.targets(logits, y, index, method.rng(index))
    slow = Targets(CLASSES, smoothing=0.6)
    for row, label, i in zip(found, y.tolist(), index.tolist(), strict=True):
        weights = CounterRNG(0, torch.tensor(0), torch.tensor([i])).uniform(Stream.TARGET, (CLASSES,))[0].double()
        weights[label] = 0.0
        torch.testing.assert_close(row.double(), slow.of(i, label, 0, weights / weights.sum()), atol=1e-6, rtol=1e-6)
    method.start_epoch(1, 30)
    assert not torch.equal(found, method.targets(logits, y, index, method.rng(index)))


def test_targets_of_a_process_are_those_of_its_examples():
    whole, part = (make(targets=LabelTargets(smoothing=0.6, noise="random")) for _ in range(2))
    shard = DataShard.for_rank(EXAMPLES, 2, 1, 2)
    part.set_shard(shard)
    logits, y, _ = batch()
    own = torch.tensor([4, 0, 5, 2, 3, 1])
    found = part.targets(logits, y, own, part.rng(own))
    index = shard.global_index(own)
    assert not torch.equal(index, own)
    assert torch.equal(found, whole.targets(logits, y, index, whole.rng(index)))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    smoothing=st.sampled_from([0.0, 0.1, 0.9]),
    noise=st.sampled_from(["uniform", "random"]),
    share=st.sampled_from([0.1, 0.7, 1.0]),
    decay=st.sampled_from([0.0, 0.5, 0.99]),
    classes=st.sampled_from([2, 4, 150]),
    scale=st.sampled_from([0.0, 1.0, 1e4]),
)
def test_targets_are_distributions(smoothing, noise, share, decay, classes, scale):
    """Also of very sure predictions, and in float16, which many classes are kept in."""
    method = make(targets=create(classes, smoothing=smoothing, noise=noise, share=share, decay=decay, from_epoch=1))
    assert method.targets.average.dtype == (torch.float16 if classes > 100 else torch.float32)
    generator, index = torch.Generator().manual_seed(0), torch.arange(EXAMPLES)
    for epoch in range(4):
        method.start_epoch(epoch, 30)
        logits = scale * torch.randn(EXAMPLES, classes, generator=generator)
        found = method.targets(logits, index % classes, index, method.rng(index))
        assert found.dtype == torch.float32
        assert (found >= 0).all()
        torch.testing.assert_close(found.sum(1), torch.ones(EXAMPLES), atol=1e-5, rtol=0)
        assert torch.isfinite(method.loss(logits, index % classes, index))


@pytest.mark.parametrize("name", NAMES)
def test_every_method_trains_on_targets(small_net, make_images, name):
    """Their loss is the method's, so they move the weights; and state is kept for the examples that were shown."""
    x, y, index = make_images(6, SHAPE), torch.arange(6) % CLASSES, torch.tensor([7, 1, 3, 5, 9, 11])
    weights = []
    for targets in (None, RememberedPredictions(CLASSES, share=0.5, smoothing=0.2)):
        method, model = make(name, targets), small_net().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(2):
            method.step(model, optimizer, x, y, index)
        weights.append(model.fc.weight)
    assert not torch.equal(*weights)
    average = method.targets.average
    torch.testing.assert_close(average[index].sum(1), torch.ones(6))
    assert not average[[i for i in range(EXAMPLES) if i not in index]].any()


def test_a_second_evaluation_in_a_step_can_leave_the_averages_alone():
    method, (logits, y, index) = make(targets=RememberedPredictions(CLASSES)), batch()
    with method.keep_targets():
        first = method.loss(logits, y, index)
    assert not method.targets.average.any()
    assert torch.equal(first, method.loss(logits, y, index))
    assert method.targets.average[index].any(1).all()


def test_predictions_are_remembered_in_half_precision_too():
    method, (logits, y, index) = make(targets=RememberedPredictions(CLASSES)), batch()
    loss = method.loss(logits.bfloat16(), y, index)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(method.targets.average[index].sum(1), torch.ones(6))


def test_an_index_is_checked_where_something_is_remembered(make_images, small_net):
    method, (logits, y, _) = make(targets=RememberedPredictions(CLASSES)), batch()
    with pytest.raises(DataError, match="12"):
        method.loss(logits, y, torch.full_like(y, EXAMPLES))
    assert method.checks_indices
    assert not make().checks_indices
    assert not make(targets=LabelTargets(smoothing=0.1)).checks_indices


def test_wrong_use_is_named():
    logits, y, index = batch()
    with pytest.raises(UsageError, match=r"4 outputs, and predictions of 10 classes .* classes=4"):
        make(targets=RememberedPredictions(10)).loss(logits, y, index)
    targets = make(targets=RememberedPredictions(CLASSES)).targets
    with pytest.raises(UsageError, match="belong to a method already"):
        make(targets=targets)
    with pytest.raises(UsageError, match="noise must be 'uniform' or 'random'; got 'gaussian'"):
        LabelTargets(smoothing=0.1, noise="gaussian")


def test_a_loop_that_ignores_the_method_s_loss_is_noticed(make_images, small_net):
    """It would train on the labels without a word."""
    x, y, index, model = make_images(6, SHAPE), torch.arange(6) % CLASSES, torch.arange(6), small_net()
    method, plain = make(targets=LabelTargets(smoothing=0.1)), make()
    for each in (method, plain):
        F.cross_entropy(model(each.perturb(model, x, y, index)), y)
    plain.start_epoch(1, 30)
    with pytest.raises(UsageError, match=r"use loss = method\.loss\(model\(x_adv\), y, index\)"):
        method.start_epoch(1, 30)
    method = make(targets=LabelTargets(smoothing=0.1))
    method.loss(model(method.perturb(model, x, y, index)), y, index)
    method.perturb(model, x, y, index)  # to look at them
    method.start_epoch(1, 30)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it itself
@pytest.mark.parametrize("noise", ["uniform", "random"])
@pytest.mark.parametrize("share", [0.0, 0.6])
def test_compiled_targets_are_the_plain_ones(noise, share):
    torch._dynamo.reset()
    results = []
    for backend in (None, "aot_eager"):
        method = make(targets=create(CLASSES, smoothing=0.2, noise=noise, share=share))
        with use_fast_ops(backend):
            for seed in (0, 1):
                logits, y, index = batch(seed)
                logits.requires_grad_()
                loss = method.loss(logits, y, index)
                results.append((loss.detach(), *torch.autograd.grad(loss, logits)))
        results.append(tuple(method.state_dict().values()))
    half = len(results) // 2
    for plain, compiled in zip(results[:half], results[half:], strict=True):
        torch.testing.assert_close(compiled, plain, atol=1e-6, rtol=1e-5)
