"""What people rely on in every method, whichever it is."""

import inspect
from contextlib import nullcontext

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import atas
from atas.core.augment import View
from atas.errors import CheckpointError, DataError, SettingsWarning, UsageError
from atas.methods import Consistency, LabelTargets

SHAPE, PAD, EXAMPLES = (3, 8, 10), 2, 12
NAMES = atas.methods.names()
CARRYING = ["free", "tdat"]
GUIDED = ["gat", "nuat"]  # by a pass in train mode, before their attack in eval mode
ADAPTIVE = ["fgsm-rs-adaptive", "atas", "atas-literal", "atas-plus"]
REMEMBERING = ["atta", "atas", "atas-literal", "atas-plus"]
EVAL_MODE = ["ssat", "trades", "mart", *GUIDED, *REMEMBERING]
NO_PERTURB = ["fgsm-ga", "free", "yopo", "trades", "sora", "elle", "gat", "nuat", "fgsm-pgi", "tdat", "liet", "mart"]
SMOOTH = ["fgsm-rs-cs", "fgsm-mep-cs"]
NO_PERTURB += ["slat", "fgsm-pco", "fgsm-uap", "fgsm-pgk", *SMOOTH]
WITH_MOMENTUM = ["fgsm-pgi", "fgsm-pgk", "fgsm-mep-cs"]
PERTURB = [name for name in NAMES if name not in NO_PERTURB]
OTHER_STARTS = ["ssat", "trades", "n-fgsm", "mart", "gat", "nuat", "liet", "tdat", "fgsm-pco"]  # by rules of their own
WITHOUT_CHANCE = ["standard", "fgsm", "free", "slat"]
REACH = {
    "n-fgsm": 3.0,
    "aaer": 3.0,
    "sora": 3.0,
    "fgsm-rs-cs": 2.0,
    "fgsm-pco": 1.5,
}  # how far inputs may be from their images, in eps, where it is not 1
THREATS = {"linf": atas.Linf(8 / 255), "l2": atas.L2(0.5)}
SMALL = {
    "atas-plus": {"classes": 4},
    "aaer": {"logit_weight": 0.5},
    "elle": {"adaptive": False, "weight": 1000.0},  # the adaptive weight is zero at first
    "fgsm-ga": {"weight": 0.5},
    "free": {"batch_size": EXAMPLES, "replays": 2},
    "yopo": {"outer": 2, "inner": 2},
    "pgd": {"steps": 3},
    "trades": {"steps": 2},
    "mart": {"steps": 2},
    "liet": {"classes": 4},
    "fgsm-uap": {"classes": 4},
    "tdat": {"batch_size": EXAMPLES},
}

every_method = pytest.mark.parametrize("name", NAMES)
every_perturbing = pytest.mark.parametrize("name", PERTURB)
both_norms = pytest.mark.parametrize("threat", THREATS.values(), ids=THREATS)


def make(name, threat=THREATS["linf"], *, begin=True, **hyper):
    """A method with quick settings, in the epoch after the warm-up."""
    method = atas.methods.create(name, threat, EXAMPLES, SHAPE, **{"pad": PAD, **SMALL.get(name, {}), **hyper})
    if begin:
        method.start_epoch(6, 30)
    return method


def beyond(name, threat, inputs, x):
    """How far inputs leave what the method may reach: its part of the ball, and [0, 1] if it clamps."""
    over = threat.distance(inputs.double(), x.double()).max() - REACH.get(name, 1.0) * threat.eps
    outside = torch.maximum(-inputs, inputs - 1).max() - (threat.eps if name in ("elle", "fgsm-pco") else 0.0)
    return float(torch.maximum(over, outside))


def sgd(model):
    return torch.optim.SGD([w for w in model.parameters() if w.requires_grad], lr=0.05, momentum=0.9)


def modes(model):
    return [module.training for module in model.modules()]


def buffers(model):
    return {name: value.clone() for name, value in model.named_buffers()}


def same(first, second):
    """Bit-equal dictionaries of tensors."""
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.fixture
def data(make_images, small_net):
    """Images, labels, indices and views of a shuffled batch; the small network is right about half of the labels."""

    def draw(count=6, seed=0, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        index = torch.randperm(EXAMPLES, generator=generator)[:count]
        images = make_images(EXAMPLES, SHAPE, dtype=dtype)
        labels = torch.randint(4, (EXAMPLES,), generator=torch.Generator().manual_seed(1))
        labels[::2] = small_net().eval()(images.float()).argmax(1)[::2]
        x, view = atas.random_view(images[index], pad=PAD, generator=generator)
        return x, labels[index], index, view

    return draw


def test_names_contain_every_method_of_the_paper():
    assert set(NAMES) >= {
        "standard", "fgsm", "fgsm-rs", "fgsm-rs-adaptive", "fgsm-ga", "ssat", "free", "yopo", "atta", "atas",
        "atas-literal", "atas-plus", "pgd", "trades",
    }  # fmt: skip


# What goes in


PLACES = {
    "rows": lambda index, first: index,
    "places in a batch": lambda index, first: torch.arange(len(index)),
    "places in a shuffled order": lambda index, first: first + torch.arange(len(index)),
}


@pytest.fixture
def epochs(small_net, make_images, generator):
    """Perturb shuffled epochs: `epochs(method, 30, place)`; `place(index, first)` gives the indices that are fed for
    the examples of a batch, the first of which is so far in the epoch."""
    model, images, labels = small_net().train(), make_images(EXAMPLES, SHAPE), torch.arange(EXAMPLES) % 4

    def go(method, count, place, noise=0.0):
        for epoch in range(count):
            method.start_epoch(epoch, count)
            wrong = torch.rand(EXAMPLES, generator=generator) < noise
            y = torch.where(wrong, torch.randint(4, (EXAMPLES,), generator=generator), labels)
            for first, index in zip((0, 6), torch.randperm(EXAMPLES, generator=generator).split(6), strict=True):
                inputs = method.perturb(model, images[index], y[index], place(index, first))
                method.loss(model(inputs), y[index], place(index, first))
        return method

    return go


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("name", [*REMEMBERING, "fgsm-rs-adaptive", "fgsm-rs"])
def test_indices_must_name_the_same_example_in_every_epoch(epochs, name, kind):
    """Where anything is kept of it; labels tell."""
    wrong = kind != "rows" and name != "fgsm-rs"
    with pytest.raises(DataError, match="the same example in every epoch") if wrong else nullcontext():
        epochs(make(name, begin=False), 30, PLACES[kind])


def test_a_corrected_loop_goes_on_with_the_same_method(epochs):
    method = make("atas", begin=False)
    with pytest.raises(DataError):
        epochs(method, 30, PLACES["places in a batch"])
    assert (epochs(method, 30, PLACES["rows"]).gradient_norms > 0).all()


def test_a_method_that_is_put_back_knows_nothing_of_indices(epochs):
    """As between the folds of a cross-validation."""
    method = make("atas", begin=False)
    beginning = {name: value.clone() for name, value in method.state_dict().items()}
    for shift in range(30):
        epochs(method, 1, lambda index, _, shift=shift: (index + shift) % EXAMPLES)
        assert not torch.equal(method.memory.delta, beginning["memory.delta"])
        method.load_state_dict(beginning)
    assert all(torch.equal(value, beginning[name]) for name, value in method.state_dict().items())


@pytest.mark.slow
def test_labels_may_change(epochs):
    """Noise is not chance; and where labels change by design, that can be said."""
    method = make("atas", begin=False)
    epochs(method, 60, PLACES["rows"], noise=0.3)
    method.checks_indices = False
    assert (epochs(method, 60, PLACES["rows"], noise=1.0).gradient_norms > 0).all()


# What comes out


@every_method
@both_norms
def test_steps_stay_inside_the_budget(small_net, data, name, threat):
    method, model = make(name, threat, begin=False), small_net().train()
    optimizer = sgd(model)
    for epoch in (0, 6, 9):
        method.start_epoch(epoch, 30)
        for seed in (0, 1):
            x, y, index, view = data(seed=seed)
            step = method.step(model, optimizer, x, y, index, view)
            assert beyond(name, threat, step.inputs, x) <= 1e-6
            assert step.inputs.dtype == x.dtype
            assert step.logits.shape == (len(x), 4)
            assert step.loss.shape == ()
            assert torch.isfinite(step.loss)
            assert not any(t.requires_grad for t in step)


@every_perturbing
@both_norms
def test_perturbed_inputs_stay_inside_the_budget(small_net, data, name, threat):
    method, model = make(name, threat), small_net().train()
    x, y, index, view = data()
    inputs = method.perturb(model, x, y, index, view)
    assert inputs.shape == x.shape
    assert beyond(name, threat, inputs, x) <= 1e-6
    assert not inputs.requires_grad
    assert torch.equal(inputs, x) == (name == "standard")


@pytest.mark.parametrize("name", NO_PERTURB)
def test_methods_that_need_more_than_inputs_point_to_step(small_net, data, name):
    with pytest.raises(UsageError, match=r"method\.step") as caught:
        make(name).perturb(small_net(), *data())
    assert "\n" not in str(caught.value)


@every_perturbing
@both_norms
def test_step_learns_with_cross_entropy_on_what_perturb_returns(small_net, data, name, threat):
    """The user's own loop and `step` are the same training, with the method's targets where it has some."""
    batch = data()
    model, method = small_net().train(), make(name, threat)
    step = method.step(model, sgd(model), *batch)
    own_model, own_method = small_net().train(), make(name, threat)
    inputs = own_method.perturb(own_model, *batch)
    logits = own_model(inputs)
    loss = own_method.loss(logits, *batch[1:3])
    assert torch.equal(loss, F.cross_entropy(logits, batch[1])) == (own_method.targets is None)
    optimizer = sgd(own_model)
    loss.backward()
    optimizer.step()
    assert torch.equal(step.inputs, inputs)
    assert torch.equal(step.loss, loss.detach())
    assert same(model.state_dict(), own_model.state_dict())
    assert same(method.state_dict(), own_method.state_dict())


@every_method
def test_the_arguments_stay_as_they_were(small_net, data, name):
    method, model, batch = make(name), small_net(), data()
    x, y, index, view = batch
    copies = [t.clone() for t in (x, y, index, view.top, view.left, view.flip)]
    method.step(model, sgd(model), *batch)
    for tensor, copy in zip((x, y, index, view.top, view.left, view.flip), copies, strict=True):
        assert torch.equal(tensor, copy)
    assert not x.requires_grad


@every_method
def test_no_view_is_the_view_of_the_stored_image(small_net, data, name):
    x, y, index, _ = data()
    results = []
    for view in (None, View.centre(len(x), PAD)):
        method, model = make(name), small_net()
        results.append((method.step(model, sgd(model), x, y, index, view).inputs, method.state_dict()))
    assert torch.equal(results[0][0], results[1][0])
    assert same(results[0][1], results[1][1])


# Modes, statistics, flags

FORWARD_PASSES = {
    "standard": 1, "fgsm": 2, "fgsm-rs": 2, "fgsm-rs-adaptive": 2, "fgsm-ga": 3, "fgsm-pgi": 2, "ssat": 1,
    "zerograd": 2, "multigrad": 4, "elle": 3, "aaer": 2, "sora": 2, "free": 2, "yopo": 2,
    "atta": 1, "atas": 1, "atas-literal": 1, "atas-plus": 1, "pgd": 4, "trades": 2,
    "n-fgsm": 2, "mart": 2, "gat": 3, "nuat": 3, "liet": 2, "tdat": 2, "slat": 2, "fgsm-pco": 3,
    "fgsm-uap": 2, "fgsm-pgk": 2, "fgsm-rs-cs": 3, "fgsm-mep-cs": 3,
}  # fmt: skip


@every_method
def test_how_often_a_step_updates_the_running_statistics(small_net, data, name):
    method, model = make(name), small_net().eval()
    method.step(model, sgd(model), *data())
    assert model.bn1.num_batches_tracked == model.bn2.num_batches_tracked == FORWARD_PASSES[name]


@every_perturbing
@pytest.mark.parametrize("training", [True, False])
def test_how_often_an_attack_updates_the_running_statistics(small_net, data, name, training):
    method, model = make(name), small_net().train(training)
    before = buffers(model)
    method.perturb(model, *data())
    assert model.bn2.num_batches_tracked == FORWARD_PASSES[name] - 1
    if name in EVAL_MODE or name == "standard":
        assert same(before, buffers(model))
    else:
        assert not torch.equal(before["bn1.running_mean"], model.bn1.running_mean)


@every_method
def test_the_attack_mode_that_a_method_declares(name):
    assert atas.methods.get(name).attack_mode == ("eval" if name in EVAL_MODE else "train")


@pytest.mark.slow
@every_method
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("odd", [None, "bn1", "fc"])
def test_modes_are_restored(small_net, data, name, training, odd):
    """Also of a part that its owner keeps in the other mode."""
    model = small_net().train(training)
    if odd:
        model.get_submodule(odd).train(not training)
    found = modes(model)
    method = make(name)
    method.step(model, sgd(model), *data())
    assert modes(model) == found
    if name in PERTURB:
        method.perturb(model, *data())
        assert modes(model) == found


@every_method
def test_a_layer_kept_in_eval_mode_while_training_stays_so(small_net, data, name):
    model = small_net().train()
    model.bn1.eval()
    before = buffers(model.bn1)
    make(name).step(model, sgd(model), *data())
    assert same(before, buffers(model.bn1))
    assert model.bn2.num_batches_tracked > 0


@every_method
@pytest.mark.parametrize("training", [True, False])
def test_modes_and_flags_are_restored_when_the_model_fails(small_net, data, name, training):
    model, method = small_net().train(training), make(name)
    model.bn1.train(not training)
    model.conv2.bias.requires_grad_(False)
    found, flags = modes(model), [w.requires_grad for w in model.parameters()]
    optimizer, batch = sgd(model), data()

    def fail(_module, _inputs):
        raise RuntimeError("the model failed")

    handle = model.fc.register_forward_pre_hook(fail)
    calls = [lambda: method.step(model, optimizer, *batch)]
    if name in PERTURB and name != "standard":
        calls.append(lambda: method.perturb(model, *batch))
    for call in calls:
        with pytest.raises(RuntimeError, match="the model failed"):
            call()
        assert modes(model) == found
        assert [w.requires_grad for w in model.parameters()] == flags
    handle.remove()
    method.step(model, optimizer, *batch)  # and nothing is left behind
    assert modes(model) == found


@every_method
@pytest.mark.parametrize("frozen", ["conv1", "conv2", "fc"])
def test_weights_that_take_no_gradient_stay_as_they_are(small_net, data, name, frozen):
    model, method = small_net().train(), make(name)
    model.get_submodule(frozen).requires_grad_(False)
    flags = {key: weight.requires_grad for key, weight in model.named_parameters()}
    before = {key: weight.detach().clone() for key, weight in model.named_parameters()}
    method.step(model, sgd(model), *data())
    assert {key: weight.requires_grad for key, weight in model.named_parameters()} == flags
    for key in ("conv1.weight", "conv2.weight", "fc.weight"):
        assert torch.equal(model.get_parameter(key), before[key]) != flags[key]


@every_perturbing
def test_an_attack_leaves_collected_weight_gradients_alone(small_net, data, name):
    model = small_net().train()
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, 7.0)
    make(name).perturb(model, *data())
    assert all((weight.grad == 7).all() for weight in model.parameters())


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("standard", "free", "yopo")])
def test_an_attack_computes_no_weight_gradients(small_net, data, name):
    """About a sixth of the whole cost: in the attack's passes no weight takes part in what is recorded."""
    model, recorded = small_net().train(), []
    model.fc.register_forward_hook(
        lambda _module, _inputs, _output: recorded.append(any(w.requires_grad for w in model.parameters()))
    )
    make(name).step(model, sgd(model), *data())
    assert not recorded[0]
    assert recorded[-1]
    if name in PERTURB:
        assert not any(recorded[:-1])
        recorded.clear()
        make(name).perturb(model, *data())
        assert not any(recorded)


@every_method
def test_a_step_forgets_gradients_of_before(small_net, data, name):
    states = []
    for garbage in (False, True):
        model = small_net().train()
        if garbage:
            for weight in model.parameters():
                weight.grad = torch.full_like(weight, 7.0)
        make(name).step(model, sgd(model), *data())
        states.append(model.state_dict())
    assert same(*states)


@every_perturbing
def test_an_attack_works_where_gradients_are_off(small_net, data, name):
    with torch.no_grad():
        off = make(name).perturb(small_net(), *data())
    assert torch.equal(off, make(name).perturb(small_net(), *data()))


# One example, whatever its batch


@pytest.mark.parametrize(
    ("name", "batch_norm"),
    [*((name, False) for name in NAMES), *((name, True) for name in EVAL_MODE if name not in GUIDED)],
    ids=[*NAMES, *(f"{name}-with-batch-norm" for name in EVAL_MODE if name not in GUIDED)],
)
@both_norms
def test_a_perturbation_does_not_depend_on_the_batch(small_net, data, name, threat, batch_norm):
    """The same example alone, in larger batches and at other places; in train mode BatchNorm ties a batch together."""
    x, y, index, view = data(8, dtype=torch.float64)
    hyper = {"replays": 1} if name == "free" else {}
    results = []
    for chosen in ([0, 1, 2, 3, 4, 5, 6, 7], [5], [7, 5, 2], [2, 7, 0, 5, 3]):
        method, model = make(name, threat, **hyper).double(), small_net(batch_norm=batch_norm).double()
        if name in CARRYING:  # the perturbation belongs to the place: let the same one wait at example 5's
            method.carried[chosen.index(5)] = 0.5 * threat.eps / 16
        part = View(view.top[chosen], view.left[chosen], view.flip[chosen], PAD)
        step = method.step(model, sgd(model), x[chosen], y[chosen], index[chosen], part)
        found = {"inputs": step.inputs[chosen.index(5)]}
        if name in REMEMBERING:
            found["memory"] = method.memory.delta[index[5]].double()
        if name in ADAPTIVE:
            found["size"], found["norm"] = method.step_sizes[index[5]], method.gradient_norms[index[5]]
        if name in CARRYING:
            found["carried"] = method.carried[chosen.index(5)]
        results.append(found)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=1e-10, rtol=1e-8)


# Chance


@every_method
@both_norms
def test_equal_seeds_give_equal_bits_and_other_seeds_or_epochs_others(small_net, data, name, threat):
    def run(seed, epoch):
        method, model = make(name, threat, seed=seed, begin=False), small_net().train()
        method.start_epoch(epoch, 30)
        step = method.step(model, sgd(model), *data())
        return {"inputs": step.inputs, "loss": step.loss, **model.state_dict()}

    first = run(seed=1, epoch=6)
    torch.rand(7)  # a generator's history has no part in it
    assert same(first, run(seed=1, epoch=6))
    others = [run(seed=2, epoch=6), run(seed=1 + 2**32, epoch=6)]
    resetting = (*REMEMBERING, *WITH_MOMENTUM, "fgsm-pco", "tdat", "fgsm-uap")
    if name not in resetting:  # the noise of these belongs to resets, not to every epoch
        others.append(run(seed=1, epoch=7))
    for other in others:
        assert torch.equal(first["loss"], other["loss"]) == (name in WITHOUT_CHANCE)
        if name not in (*WITHOUT_CHANCE, "fgsm-ga", "elle"):  # there chance is in the regulariser alone
            assert not torch.equal(first["inputs"], other["inputs"])


# State


@every_method
@both_norms
def test_state_survives_a_save_and_a_load(small_net, data, name, threat):
    method, model = make(name, threat, begin=False), small_net().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in (0, 8, 9):
        method.start_epoch(epoch, 30)
        method.step(model, optimizer, *data(seed=epoch))
    method.shrink_steps(0.75)
    saved = safetensors.torch.save({key: value.contiguous() for key, value in method.state_dict().items()})
    weights = {key: value.clone() for key, value in model.state_dict().items()}

    loaded, copy = make(name, threat, begin=False), small_net().train()
    loaded.load_state_dict(safetensors.torch.load(saved))
    copy.load_state_dict(weights)
    loaded.start_epoch(9, 30)
    assert same(method.state_dict(), loaded.state_dict())
    for seed in (4, 5):
        first = method.step(model, optimizer, *data(seed=seed))
        second = loaded.step(copy, torch.optim.SGD(copy.parameters(), lr=0.05), *data(seed=seed))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert same(model.state_dict(), copy.state_dict())
    assert same(method.state_dict(), loaded.state_dict())


STATE = {"epoch": ((), torch.int64), "step_scale": ((), torch.float32)}
CARRIED = {"carried": ((EXAMPLES, *SHAPE), torch.float32)}
NORMS = {"norms.average": ((EXAMPLES,), torch.float32), "norms.step_size": ((EXAMPLES,), torch.float32)}
MEMORY_SHAPE = (EXAMPLES, SHAPE[0], SHAPE[1] + 2 * PAD, SHAPE[2] + 2 * PAD)


@both_norms
@every_method
def test_names_shapes_and_types_of_the_state_never_change(name, threat):
    """Checkpoints of earlier versions hold them."""
    expected = dict(STATE)
    if name in CARRYING:
        expected |= CARRIED
    if name in ("gat", "nuat", "liet"):
        expected |= {"batches": ((), torch.int64)}
    if name == "liet":
        expected |= {"patterns": ((4, *SHAPE), torch.float32)}
    if name in REMEMBERING:
        dtype = torch.int8 if isinstance(threat, atas.Linf) else torch.float16
        expected |= {"memory.delta": (MEMORY_SHAPE, dtype)}
    if name in ADAPTIVE:
        expected |= NORMS
    if name == "atas-plus":
        expected |= {"targets.average": ((EXAMPLES, 4), torch.float32)}
    if name in (*WITH_MOMENTUM, "fgsm-pco"):
        kept = torch.int8 if isinstance(threat, atas.Linf) else torch.float16
        expected |= {"memory.delta": ((EXAMPLES, *SHAPE), kept)}
    if name in WITH_MOMENTUM:
        expected |= {"momentum.delta": ((EXAMPLES, *SHAPE), torch.bfloat16)}
    if name == "fgsm-uap":
        expected |= dict.fromkeys(("universal", "momentum"), ((4, *SHAPE), torch.float32))
    if name in SMOOTH:
        expected |= dict.fromkeys(("last_mean", "change", "epoch_sum", "count"), ((), torch.float32))
    if name == "elle":
        expected |= dict.fromkeys(("penalty_weight", "seen", "mean", "squares"), ((), torch.float32))
    if name == "sora":
        expected |= {"linearity": ((), torch.float32)}
    found = make(name, threat).state_dict()
    assert {key: (tuple(value.shape), value.dtype) for key, value in found.items()} == expected


@every_method
def test_starting_an_epoch_again_resets_nothing(small_net, data, name):
    method, model = make(name, begin=False), small_net().train()
    method.start_epoch(8, 30)
    method.start_epoch(9, 30)
    method.step(model, sgd(model), *data())
    before = {key: value.clone() for key, value in method.state_dict().items()}
    method.start_epoch(9, 30)
    assert same(before, method.state_dict())


@every_method
def test_a_step_before_the_first_epoch_is_an_error(small_net, data, name):
    method, model = make(name, begin=False), small_net()
    with pytest.raises(UsageError, match="start_epoch"):
        method.step(model, sgd(model), *data())
    if name in PERTURB:
        with pytest.raises(UsageError, match="start_epoch"):
            method.perturb(model, *data())


@every_method
def test_epochs_count_from_zero(name):
    with pytest.raises(UsageError, match="count from 0; got -1"):
        make(name, begin=False).start_epoch(-1)


@pytest.mark.parametrize(("epoch", "epochs"), [(5, 2), (2, 2)])
def test_an_epoch_beyond_the_last_is_refused(epoch, epochs):
    method = make("atas", begin=False)
    with pytest.raises(UsageError, match=f"epoch {epoch}, counted from 0, is beyond the last of epochs={epochs};"):
        method.start_epoch(epoch, epochs)
    assert int(method.epoch) == -1
    method.start_epoch(epoch, -1)  # as Lightning says that there is no last one


@pytest.mark.parametrize("name", ["atas", "fgsm-rs-adaptive"])
def test_the_state_of_a_method_for_other_data_is_named(name):
    ball = THREATS["linf"]
    state = atas.methods.create(name, ball, 3, SHAPE).state_dict()
    other = atas.methods.create(name, ball, 2, SHAPE)
    with pytest.raises(
        CheckpointError, match=r"has the shape \(3,.* in it and \(2,.* for 2 examples .*; create"
    ) as caught:
        other.load_state_dict(state)
    assert "\n" not in str(caught.value)


@every_method
@both_norms
def test_a_method_is_a_module_without_parameters(small_net, data, name, threat):
    method, model = make(name, threat), small_net().train()
    assert isinstance(method, torch.nn.Module)
    assert list(method.parameters()) == []
    batch = data()
    expected = make(name, threat).step(small_net().train(), sgd(model), *batch).inputs
    method = method.to("cpu").to(torch.float32)
    assert torch.equal(method.step(model, sgd(model), *batch).inputs, expected)
    meta = make(name, threat).to("meta")
    assert {value.device.type for value in meta.buffers()} == {"meta"}


@every_method
def test_a_method_can_be_made_on_its_device(name):
    assert {value.device.type for value in make(name, begin=False, device="meta").buffers()} == {"meta"}


@pytest.mark.parametrize("name", REMEMBERING)
@both_norms
def test_only_what_was_shown_is_remembered_anew(small_net, data, name, threat):
    """The windows of the batch get the new perturbations; everything else keeps the old."""
    method, model = make(name, threat, dtype=torch.float32), small_net()
    x, y, index, view = data()
    before = method.memory.delta.clone()
    inputs = method.perturb(model, x, y, index, view)
    shown = torch.zeros_like(before, dtype=torch.bool)
    view.write(shown, index, torch.ones(x.shape, dtype=torch.bool))
    assert torch.equal(method.memory.delta[~shown], before[~shown])
    assert torch.equal(view.read(method.memory.delta, index), inputs - x)


@pytest.mark.parametrize("name", REMEMBERING)
def test_the_default_memory_is_close_to_what_was_perturbed(small_net, data, name):
    threat = THREATS["linf"]
    method, model = make(name, threat), small_net()
    x, y, index, view = data()
    assert method.memory.delta.dtype == torch.int8
    inputs = method.perturb(model, x, y, index, view)
    error = method.memory.load(index, view, torch.float32) - (inputs - x)
    assert error.abs().max() <= threat.eps / 254 + 1e-7


@pytest.mark.parametrize("name", ADAPTIVE)
@both_norms
def test_step_sizes_and_gradient_norms_of_every_example(small_net, data, name, threat):
    method, model = make(name, threat), small_net(sharpness=20.0)
    assert method.step_sizes.shape == method.gradient_norms.shape == (EXAMPLES,)
    assert not method.step_sizes.any()
    assert not method.gradient_norms.any()
    x, y, index, view = data()
    method.perturb(model, x, y, index, view)
    seen = torch.zeros(EXAMPLES, dtype=torch.bool)
    seen[index] = True
    assert (method.gradient_norms[seen] > 0).all()
    low, high = method.clip if name in ("atas", "atas-plus") else (0, method.max_step)
    assert (method.step_sizes[seen] > 0).all()
    assert (method.step_sizes[seen] >= low - 1e-7).all()
    assert (method.step_sizes[seen] <= high + 1e-7).all()
    assert not method.step_sizes[~seen].any()


@pytest.mark.parametrize("name", [n for n in NAMES if n not in OTHER_STARTS])
@pytest.mark.slow
def test_shrinking_steps_to_nothing_ends_the_attack(small_net, data, name):
    method, model = make(name), small_net()
    method.shrink_steps(0.5)
    method.shrink_steps(0.5)
    assert method.step_scale == 0.25
    method.shrink_steps(0.0)
    x, y, index, view = data()
    if name in REMEMBERING:
        start = method.threat.project(x + method.memory.load(index, view, x.dtype), x)
    elif name in (*WITHOUT_CHANCE, "fgsm-ga", "multigrad", "elle"):
        start = x
    elif name in WITH_MOMENTUM:
        centre = View.centre(len(x), 0)
        start = method.threat.project(x + method.memory.load(index, centre, x.dtype), x)
    elif name == "fgsm-uap":
        start = method.threat.project(x + method.universal[y], x)
    elif name == "aaer":
        start = (x + 2 * method.threat.sample(method.rng(index), SHAPE)).clamp(0, 1)
    else:
        start = method.threat.random_start(x, method.rng(index))
    assert torch.equal(method.step(model, sgd(model), x, y, index, view).inputs, start)


# Any input


@every_method
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    norm=st.sampled_from(sorted(THREATS)),
    eps=st.sampled_from([0.0, 1e-4, 8 / 255, 0.3, 1.0]),
    epoch=st.integers(0, 40),
    count=st.integers(2, 5),
    seed=st.integers(0, 2**63),
    kind=st.sampled_from(["noise", "black", "white", "corners"]),
)
@pytest.mark.slow
def test_any_images_any_budget(small_net, name, norm, eps, epoch, count, seed, kind):
    if eps == 0 and norm == "l2" and name in (*ADAPTIVE, "atta", "yopo"):
        eps = 1e-6  # their step sizes for L2 are parts of eps, and must not be zero
    threat = atas.Linf(eps) if norm == "linf" else atas.L2(eps)
    generator = torch.Generator().manual_seed(seed % 2**31)
    images = {
        "noise": torch.rand(count, *SHAPE, generator=generator),
        "black": torch.zeros(count, *SHAPE),
        "white": torch.ones(count, *SHAPE),
        "corners": torch.randint(2, (count, *SHAPE), generator=generator).float(),
    }[kind]
    x, view = atas.random_view(images, pad=PAD, generator=generator)
    y = torch.randint(4, (count,), generator=generator)
    method, model = make(name, threat, seed=seed, begin=False), small_net()
    method.start_epoch(epoch, 41)
    for _ in range(2):
        step = method.step(model, sgd(model), x, y, torch.arange(count), view)
        assert torch.isfinite(step.inputs).all()
        assert torch.isfinite(step.loss)
        assert beyond(name, threat, step.inputs, x) <= 1e-6
    assert all(torch.isfinite(value).all() for value in method.state_dict().values() if value.is_floating_point())


# Making one


def test_the_signature_that_the_contract_states():
    parameters = inspect.signature(atas.ATAS).parameters
    assert list(parameters)[:3] == ["threat", "examples", "shape"]
    stated = {"c": 1.28, "beta": 0.5, "warmup_epochs": 5, "reset_every": 10, "pad": 4, "device": None, "seed": 0}
    assert {key: parameters[key].default for key in stated} == stated
    for key in (*stated, "max_step", "clip", "dtype"):
        assert parameters[key].kind is inspect.Parameter.KEYWORD_ONLY


def test_the_defaults_of_atas_by_norm():
    linf = atas.ATAS(atas.Linf(8 / 255), 2, SHAPE)
    assert (linf.max_step, linf.clip, linf.memory.delta.dtype) == (16 / 255, (4 / 255, 14 / 255), torch.int8)
    l2 = atas.ATAS(atas.L2(0.5), 2, SHAPE)
    assert (l2.max_step, l2.clip, l2.memory.delta.dtype) == (1.0, (0.25, 0.875), torch.float16)
    literal = atas.methods.create("atas-literal", atas.Linf(8 / 255), 2, SHAPE)
    assert (literal.clip, literal.warmup_epochs, literal.c, literal.max_step) == (None, 0, 1.28, 16 / 255)
    assert atas.ATAS(atas.Linf(4 / 255), 2, SHAPE, clip=None).clip is None


_BY_STEP = {"fgsm-rs": 1.25, "ssat": 1.25, "free": 1.0, "pgd": 0.25, "trades": 0.25, "yopo": 0.25, "atta": 0.5}
_BY_STEP |= {"n-fgsm": 1.0, "zerograd": 2.0, "multigrad": 2.0, "aaer": 1.0, "gat": 1.0, "nuat": 1.0, "fgsm-pgi": 1.0}
_BY_STEP |= {"tdat": 1.0, "liet": 1.0, "mart": 0.25, "slat": 0.9, "fgsm-pco": 1.0}
_BY_STEP |= dict.fromkeys(("fgsm-uap", "fgsm-pgk", *SMOOTH), 1.0)


@pytest.mark.parametrize("eps", [2 / 255, 8 / 255, 0.1, 0.39])
def test_default_steps_follow_the_budget(eps):
    for name in ("atas", "atas-plus", "atas-literal", "fgsm-rs-adaptive", "sora"):
        method = atas.methods.create(name, atas.Linf(eps), 2, SHAPE, **SMALL.get(name, {}))
        assert method.max_step == 2 * eps
        if name in ("atas", "atas-plus"):
            assert method.clip == (0.5 * eps, 1.75 * eps)
    for name, factor in _BY_STEP.items():
        assert atas.methods.create(name, atas.Linf(eps), 2, SHAPE, **SMALL.get(name, {})).step_size == factor * eps
    assert atas.methods.create("n-fgsm", atas.Linf(eps), 2, SHAPE).noise == 2 * eps
    assert atas.methods.create("fgsm-uap", atas.Linf(eps), 2, SHAPE, classes=4).radius == 1.25 * eps
    for name in ("gat", "nuat"):
        assert atas.methods.create(name, atas.Linf(eps), 2, SHAPE).noise == 0.5 * eps


def test_default_steps_are_the_released_ones_to_the_bit():
    eps = 8 / 255
    released = {"atta": 4 / 255, "yopo": 2 / 255, "fgsm-rs": 1.25 * eps, "ssat": 1.25 * eps, "pgd": eps / 4}
    for name, size in released.items():
        assert atas.methods.create(name, atas.Linf(eps), 2, SHAPE).step_size == size
    assert atas.ATAS(atas.Linf(eps), 2, (3, 32, 32), c="auto").c == 1.28


def test_no_default_step_is_longer_than_the_range_of_pixels():
    method = atas.ATAS(atas.Linf(0.7), 2, SHAPE)
    assert (method.max_step, method.clip) == (1.0, (0.35, 1.0))
    assert atas.ATAS(atas.Linf(0.0), 2, SHAPE).max_step == 0


def test_sizes_are_multiples_of_eps_if_written_so():
    method = atas.methods.create("atas", atas.Linf(0.1), 2, SHAPE, max_step="3 eps", clip=("0.25 eps", 0.15))
    assert (method.max_step, method.clip) == (0.1 * 3, (0.025, 0.15))
    assert atas.methods.create("fgsm-rs", atas.L2(0.5), 2, SHAPE, step_size="2 eps").step_size == 1.0


@pytest.mark.parametrize("threat", [atas.Linf(4 / 255), atas.L2(0.25)], ids=repr)
def test_the_automatic_c_is_inverse_to_the_radius(threat):
    """At half the budget, or on a quarter of the pixels for Linf, gradients of a robust model are twice as large."""
    c = atas.ATAS(threat, 2, (3, 32, 32), c="auto").c
    assert atas.ATAS(type(threat)(threat.eps / 2), 2, (3, 32, 32), c="auto").c == pytest.approx(2 * c)
    smaller = atas.ATAS(threat, 2, (3, 16, 16), c="auto").c
    assert smaller == pytest.approx(2 * c if isinstance(threat, atas.Linf) else c)
    assert atas.ATAS(atas.Linf(0.0), 2, SHAPE, c="auto").c == 1.28


@pytest.mark.parametrize(
    ("name", "eps", "hyper", "words"),
    [
        (
            "atas",
            0.1,
            {"max_step": 16 / 255, "clip": (4 / 255, 14 / 255)},
            r"method\.clip ends at 14/255, 0\.549 times",
        ),
        ("atas-plus", 0.1, {"max_step": 16 / 255, "clip": None}, r"method\.max_step is 16/255, 0\.627 times eps"),
        ("atas-literal", 0.05, {"max_step": 0.78}, r"method\.max_step is 0\.78, 15\.6 times eps \(0\.05\)"),
        ("fgsm-rs-adaptive", 0.05, {"max_step": 0.78}, "edge of the ball"),
        ("atta", 0.1, {"step_size": 4 / 255}, "the attack hardly moves"),
        ("fgsm-rs", 2 / 255, {"step_size": 10 / 255}, r"10/255, 5 times eps \(2/255\)"),
        ("pgd", 0.1, {"step_size": 0.001, "steps": 10}, "0.1 eps in 10 steps"),
        ("fgsm-pgi", 0.1, {"step_size": 4 / 255}, "the attack hardly moves"),
        ("zerograd", 2 / 255, {"step_size": 10 / 255}, "5 times eps"),
        ("multigrad", 2 / 255, {"step_size": 10 / 255}, "5 times eps"),
        ("aaer", 0.1, {"step_size": 4 / 255}, "the attack hardly moves"),
        ("sora", 0.1, {"max_step": 16 / 255}, r"method\.max_step is 16/255, 0\.627 times eps"),
        ("slat", 0.1, {"step_size": 4 / 255}, "the attack hardly moves"),
        ("fgsm-pco", 0.1, {"step_size": 4 / 255}, "the attack hardly moves"),
    ],
)
def test_steps_that_cannot_work_are_said(name, eps, hyper, words):
    with pytest.warns(SettingsWarning, match=words) as caught:
        method = atas.methods.create(name, atas.Linf(eps), 2, SHAPE, **SMALL.get(name, {}) | hyper)
    assert str(caught[0].message) == method.settings_warning


def test_the_budgets_and_steps_of_the_paper_are_not_warned_of():
    for eps in (8, 12, 16):
        for step in (12, 14, 16, 18, 20):
            for clip in (None, (4 / 255, 14 / 255)):
                assert (
                    atas.ATAS(atas.Linf(eps / 255), 2, SHAPE, max_step=step / 255, clip=clip).settings_warning is None
                )
        atas.methods.create("atta", atas.Linf(eps / 255), 2, SHAPE, step_size=4 / 255)
    for eps in (2, 4):
        atas.ATAS(atas.Linf(eps / 255), 2, SHAPE, max_step=16 / 255, clip=(4 / 255, 8 / 255))
    for step in (2, 16):
        atas.methods.create("fgsm-rs", atas.Linf(8 / 255), 2, SHAPE, step_size=step / 255)


@pytest.mark.parametrize("name", REMEMBERING)
def test_int8_memory_is_refused_for_l2(name):
    with pytest.raises(UsageError, match=r"int8.*L2.*float16"):
        atas.methods.create(name, THREATS["l2"], 2, SHAPE, dtype=torch.int8, **SMALL.get(name, {}))


@pytest.mark.parametrize(("text", "dtype"), [("int8", torch.int8), ("float16", torch.float16), ("auto", torch.int8)])
def test_a_memory_type_by_name(text, dtype):
    method = atas.methods.create("atas", THREATS["linf"], 2, SHAPE, dtype=text)
    assert method.memory.delta.dtype == dtype


WITH_A_STEP = ("fgsm", "fgsm-rs", "ssat", "free", "yopo", "atta", "pgd", "trades")
WITH_A_STEP += ("n-fgsm", "zerograd", "multigrad", "aaer", "gat", "nuat", "fgsm-pgi", "tdat", "mart", "slat")
WITH_A_STEP += ("fgsm-pco", "liet", "fgsm-uap", "fgsm-pgk", *SMOOTH)
TEN = {"step_size": 10}  # for 10/255


@pytest.mark.parametrize(
    ("name", "threat", "hyper", "words"),
    [
        ("atass", "linf", {}, "did you mean 'atas'"),
        ("atas", "linf", {"bete": 0.5}, "did you mean 'beta'"),
        ("fgsm", "linf", {"steps": 3}, "steps"),
        ("atas", "linf", {"dtype": "int9"}, "did you mean 'int8'"),
        ("atas", "linf", {"dtype": torch.int32}, "float32, float16 or int8"),
        ("atas", "linf", {"c": 0.0}, "c > 0"),
        ("atas", "linf", {"max_step": -1.0}, "max_step must be a number above zero"),
        ("atas", "linf", {"beta": 1.0}, "beta < 1"),
        ("fgsm-rs-adaptive", "linf", {"beta": -0.1}, "0 <= beta"),
        ("atas", "linf", {"clip": (0.1, 0.01)}, "smallest <= largest"),
        ("atas", "linf", {"clip": (0.0, 0.01)}, "clip must be a number above zero"),
        ("atas", "linf", {"max_step": 16}, "max_step is in pixel units of [0, 1]: write 16/255 rather than 16"),
        (
            "atas",
            "linf",
            {"max_step": "16/255"},
            "max_step must be a number in pixel units such as 2/255, 'auto', or a multiple of eps",
        ),
        ("atas-literal", "linf", {"max_step": 16}, "write 16/255"),
        ("fgsm-rs-adaptive", "linf", {"max_step": 16}, "write 16/255"),
        ("atas", "linf", {"clip": (4, 14)}, "clip is in pixel units of [0, 1]: write 4/255"),
        ("atas", "linf", {"reset_every": 0}, "reset_every must be at least 1"),
        ("atta", "linf", {"step_size": 0.0}, "step_size must be a number above zero"),
        ("fgsm-rs", "linf", {"step_size": -1.0}, "step_size must be a number above zero"),
        *((name, "linf", SMALL.get(name, {}) | TEN, "write 10/255 rather than 10") for name in WITH_A_STEP),
        ("pgd", "linf", {"steps": 0}, "steps must be at least 1"),
        ("pgd", "linf", {"step_size": float("nan")}, "step_size must be a number above zero"),
        ("atas", "linf", {"max_step": "2 epochs"}, "multiple of eps such as '2 eps'; got '2 epochs'"),
        ("atas", "linf", {"max_step": "0 eps"}, "multiple of eps such as '2 eps'; got '0 eps'"),
        ("atas", "linf", {"clip": 0.1}, "clip must be (smallest, largest) step, 'auto' or None; got 0.1"),
        ("atas", "linf", {"clip": ("2 eps", "1 eps")}, "smallest <= largest"),
        ("atas", "linf", {"c": "large"}, "c must be a finite number or 'auto'"),
        ("trades", "linf", {"steps": 0}, "steps >= 1"),
        ("trades", "linf", {"beta": -1.0}, "beta >= 0"),
        ("n-fgsm", "linf", {"noise": 16}, "write 16/255 rather than 16"),
        ("mart", "linf", {"steps": 0}, "steps >= 1"),
        ("mart", "linf", {"beta": -1.0}, "beta >= 0"),
        ("gat", "linf", {"weight": -1.0}, "weight must be a number that is not negative"),
        ("gat", "linf", {"late_from": 1.5}, "late_from in [0, 1]"),
        ("gat", "linf", {"noise": 0.0}, "noise must be a number above zero"),
        ("nuat", "linf", {"ramp": -0.1}, "ramp in [0, 1]"),
        ("liet", "linf", {}, "missing 1 required keyword-only argument: 'classes'"),
        ("liet", "linf", {"classes": 1}, "classes >= 2"),
        ("liet", "linf", {"classes": 4, "ratio": (0.5, 0.1)}, "ratio[0] <= ratio[1]"),
        ("liet", "linf", {"classes": 4, "refresh_every": 0}, "refresh_every must be at least 1"),
        ("liet", "linf", {"classes": 4, "smoothing": 1.0}, "smoothing is a share"),
        ("liet", "linf", {"classes": 4, "weight": -1.0}, "weight >= 0"),
        ("liet", "linf", {"classes": 4, "targets": LabelTargets()}, "LIET has targets of its own: set smoothing"),
        (
            "liet",
            "linf",
            {"classes": 4, "consistency": Consistency(1.0)},
            "LIET has consistency of its own",
        ),
        ("fgsm-uap", "linf", {}, "missing 1 required keyword-only argument: 'classes'"),
        ("fgsm-uap", "linf", {"classes": 1}, "classes >= 2"),
        ("fgsm-uap", "linf", {"classes": 4, "momentum": 1.0}, "momentum in [0, 1)"),
        ("fgsm-uap", "linf", {"classes": 4, "shared_by": "none"}, "shared_by must be 'class' or 'all'; got 'none'"),
        ("fgsm-uap", "linf", {"classes": 4, "radius": 10}, "write 10/255 rather than 10"),
        ("fgsm-uap", "linf", {"classes": 4, "smoothing": 1.0}, "smoothing is a share"),
        ("fgsm-uap", "linf", {"classes": 4, "weight": -1.0}, "weight >= 0"),
        ("fgsm-uap", "linf", {"classes": 4, "targets": LabelTargets()}, "FGSMUAP has targets of its own: set smooth"),
        ("fgsm-uap", "linf", {"classes": 4, "consistency": Consistency(1.0)}, "FGSMUAP has consistency of its own"),
        ("tdat", "linf", {"targets": LabelTargets()}, "TDAT has targets of its own: set label_factor, label_floor"),
        ("tdat", "linf", {"label_factor": 0.7}, "factor in [0, 0.642]"),
        ("tdat", "linf", {"label_floor": 0.0}, "floor in (0, 1]"),
        ("tdat", "linf", {"weight": -1.0}, "weight must be a number that is not negative"),
        ("tdat", "linf", {"batch_size": 0}, "batch_size must be at least 1"),
        ("ssat", "linf", {"checkpoints": 0}, "checkpoints must be at least 1"),
        ("free", "linf", {"replays": 0}, "replays"),
        ("free", "linf", {"batch_size": 0}, "batch_size"),
        ("yopo", "linf", {"outer": 0}, "outer >= 1"),
        ("yopo", "linf", {"inner": 0}, "inner >= 1"),
        ("fgsm-ga", "l2", {}, "set weight"),
        ("elle", "l2", {}, "ELLE has a default weight for Linf alone; set weight"),
        ("aaer", "l2", {}, "AAER has default weights for Linf alone; set logit_weight"),
        ("fgsm-pgi", "linf", {"momentum": 1.0}, "momentum must be in [0, 1); got 1.0"),
        ("fgsm-pgi", "linf", {"smoothing": 1.0}, "smoothing is a share"),
        ("fgsm-pgi", "linf", {"weight": -1.0}, "weight >= 0"),
        ("fgsm-pgi", "linf", {"reset_every": 0}, "reset_every must be at least 1"),
        ("fgsm-pgi", "linf", {"frame": "crop"}, "frame must be 'view' or 'image'; got 'crop'"),
        ("fgsm-pgi", "linf", {"targets": LabelTargets(smoothing=0.1)}, "FGSMPGI has targets of its own"),
        ("fgsm-pgi", "linf", {"consistency": Consistency(1.0)}, "FGSMPGI has consistency of its own"),
        ("fgsm-pgi", "l2", {"dtype": torch.int8}, "int8 steps are too coarse"),
        ("fgsm-pgk", "linf", {"threshold": 0.0}, "threshold must be above zero; got 0.0"),
        ("fgsm-pgk", "linf", {"momentum": 1.0}, "momentum must be in [0, 1); got 1.0"),
        ("fgsm-pgk", "linf", {"targets": LabelTargets(smoothing=0.1)}, "FGSMPGK has targets of its own"),
        ("fgsm-rs-cs", "linf", {"gamma": -1.0}, "gamma >= 0, ratio >= 1 and stride >= 0; got gamma=-1.0"),
        ("fgsm-rs-cs", "linf", {"ratio": 0.5}, "ratio >= 1"),
        ("fgsm-mep-cs", "linf", {"stride": -1}, "stride >= 0"),
        ("fgsm-mep-cs", "linf", {"drops": (0.5, 0.4)}, "drops are rising fractions of the training"),
        ("fgsm-rs-cs", "linf", {"drops": (100.0,)}, "between 0 and 1; got (100.0,)"),
        ("fgsm-rs-cs", "linf", {"targets": LabelTargets(smoothing=0.1)}, "FGSMRSCS has targets of its own"),
        ("fgsm-mep-cs", "linf", {"consistency": Consistency(1.0)}, "FGSMMEPCS has consistency of its own"),
        ("zerograd", "linf", {"quantile": 1.1}, "quantile is a share of the pixels in [0, 1]; got 1.1"),
        ("multigrad", "linf", {"starts": 0}, "starts must be at least 1"),
        ("elle", "linf", {"weight": -1.0}, "weight >= 0"),
        ("elle", "linf", {"decay": 1.1}, "decay in [0, 1]"),
        ("aaer", "linf", {"attack_by": "fgsm"}, "attack_by must be 'n-fgsm' or 'fgsm-rs'; got 'fgsm'"),
        ("aaer", "linf", {"logit_weight": -1.0}, "must not be negative; got 0.0 and -1.0"),
        ("aaer", "linf", {"consistency": Consistency(1.0)}, "AAER has no start to be consistent with"),
        ("sora", "linf", {"curvature": 0.0}, "curvature > 0"),
        ("sora", "linf", {"decay": 1.0}, "decay in [0, 1); got 0.02 and 1.0"),
        ("sora", "linf", {"max_step": 16}, "write 16/255"),
        ("fgsm-pco", "linf", {"weight": -1.0}, "weight >= 0"),
        ("fgsm-pco", "linf", {"stretch": -0.1}, "stretch >= 0"),
        ("fgsm-pco", "linf", {"smoothing": 1.0}, "smoothing is a share"),
        ("fgsm-pco", "linf", {"frame": "crop"}, "frame must be 'view' or 'image'; got 'crop'"),
        ("fgsm-pco", "linf", {"targets": LabelTargets()}, "FGSMPCO has targets of its own: set smoothing"),
        ("fgsm-pco", "linf", {"consistency": Consistency(1.0)}, "FGSMPCO has no start to be consistent with"),
        ("fgsm-pco", "l2", {"dtype": torch.int8}, "int8 steps are too coarse"),
        ("slat", "linf", {"layers": ()}, "SLAT needs a hidden layer to perturb"),
        ("slat", "linf", {"layers": "conv1"}, "layers must be"),
        ("slat", "linf", {"layer_step_size": 10}, "layer_step_size is in pixel units of [0, 1]: write 10/255"),
        ("atas", "linf", {"pad": -1}, "pad >= 0"),
        ("atas-plus", "linf", {}, "missing 1 required keyword-only argument: 'classes'"),
        ("atas-plus", "linf", {"classes": 4, "share": 1.1}, "0 <= share <= 1"),
        ("atas-plus", "linf", {"classes": 4, "decay": 1.0}, "0 <= decay < 1"),
        ("atas-plus", "linf", {"classes": 1}, "classes >= 2"),
        ("atas-plus", "linf", {"classes": 4, "smoothing": 1.0}, "smoothing is a share"),
        ("atas-plus", "linf", {"classes": 4, "targets": LabelTargets(smoothing=0.1)}, "targets of its own"),
    ],
)
def test_wrong_settings_are_named(name, threat, hyper, words):
    with pytest.raises(UsageError) as caught:
        atas.methods.create(name, THREATS[threat], 2, SHAPE, **hyper)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("examples", "shape"), [(0, SHAPE), (2, (8, 8)), (2, 8), (2, (3, 0, 8)), (1.5, SHAPE), (2, (3, 8.0, 8))]
)
def test_wrong_sizes_are_named(examples, shape):
    with pytest.raises(UsageError, match=r"examples, a shape \(C, H, W\)"):
        atas.methods.create("fgsm", THREATS["linf"], examples, shape)


def test_a_grid_finer_than_the_image_is_named():
    with pytest.raises(UsageError, match="grid = 100 cells"):
        atas.methods.create("atas", THREATS["linf"], 2, (3, 8, 8), grid=100)


@pytest.mark.parametrize("layer", ["conv9", "activation"])
def test_yopo_names_layers_that_it_does_not_find(small_net, data, layer):
    model = small_net()
    with pytest.raises(UsageError, match=r"unknown layer .*conv1"):
        make("yopo", layer=layer).step(model, sgd(model), *data())


def test_yopo_names_a_layer_that_takes_no_part(small_net, data):
    model = small_net()
    model.spare = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match="forward pass"):
        make("yopo", layer="spare").step(model, sgd(model), *data())


@pytest.mark.parametrize("name", CARRYING)
def test_a_batch_larger_than_what_is_carried_is_named(small_net, data, name):
    model = small_net()
    with pytest.raises(atas.AtasError, match="batch_size=6"):
        make(name, batch_size=4).step(model, sgd(model), *data())


@pytest.mark.parametrize("name", [*CARRYING, "liet", "fgsm-uap"])
def test_images_of_another_shape_than_what_is_kept_are_named(small_net, make_images, name):
    model, images = small_net(), make_images(4, (3, 16, 16))
    x, view = atas.random_crop_view(images, 12, of=16)
    with pytest.raises(
        DataError, match=r"of one shape.*, \(3, 8, 10\) here; .* create the method with shape=\(3, 12, 12\)"
    ):
        make(name).step(model, sgd(model), x, torch.arange(4), torch.arange(4), view)


@pytest.mark.parametrize("name", ["gat", "nuat", "liet", "tdat", *SMOOTH])
@pytest.mark.parametrize("epochs", [None, -1])
def test_what_depends_on_the_length_of_the_training_asks_for_it(name, epochs):
    with pytest.raises(UsageError, match=r"needs the number of epochs: start_epoch\(epoch, epochs=\.\.\.\)"):
        make(name, begin=False).start_epoch(0, epochs)


@pytest.mark.parametrize("name", ["liet", "fgsm-uap"])
def test_a_model_with_other_outputs_is_named(small_net, data, name):
    model = small_net(classes=5)
    with pytest.raises(UsageError, match="the model has 5 outputs; create the method with that many classes"):
        make(name).step(model, sgd(model), *data())
