"""Wrong data is named, in one sentence that says what to do."""

import pytest
import torch

import atas
from atas.core.augment import View
from atas.core.validation import DeviceChecks, check_images, check_labels, check_module, check_shapes
from atas.errors import DataError, UsageError

SHAPE, PAD, EXAMPLES = (3, 8, 10), 2, 12
every_method = pytest.mark.parametrize("name", atas.methods.names())


@pytest.fixture
def train(small_net, make_images):
    """Feed a method a batch, some of it replaced."""

    def run(name="atas", call="step", model=None, **replaced):
        hyper = {"batch_size": EXAMPLES} if "batch_size" in atas.methods.settings(name) else {}
        hyper |= {"classes": 4} if atas.methods.takes_classes(name) else {}
        method = atas.methods.create(name, atas.Linf(8 / 255), EXAMPLES, SHAPE, pad=PAD, **hyper)
        method.start_epoch(0, 30)
        model = model or small_net()
        batch = {"x": make_images(4, SHAPE), "y": torch.tensor([0, 1, 2, 3]), "index": torch.arange(4), "view": None}
        batch.update(replaced)
        if call == "perturb":
            return method.perturb(model, *batch.values())
        return method.step(model, torch.optim.SGD(model.parameters(), lr=0.1), *batch.values())

    return run


@every_method
@pytest.mark.parametrize(
    ("output", "words"),
    [
        (lambda logits: (logits, logits), "got tuple: wrap it in a module that returns the logits alone"),
        (lambda logits: {"logits": logits}, "got dict"),
        (lambda logits: logits[:, :1], r"two classes or more for 4 images; got \(4, 1\)"),
    ],
    ids=["tuple", "dict", "one-logit"],
)
def test_a_model_that_returns_no_logits_is_named(train, small_net, name, output, words):
    model = small_net()
    model.register_forward_hook(lambda _, __, logits: output(logits))
    with pytest.raises(UsageError, match=words) as caught:
        train(name, model=model)
    sentence(caught)


def spoiled(images, value):
    images = images.clone()
    images[1, 2, 3, 4] = value
    return images


def sentence(caught):
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    return message


# What is replaced, by what, and the words that name it.
WRONG = {
    "nan": ("x", lambda x: spoiled(x, float("nan")), ["NaN or infinite", "preprocessing"]),
    "infinite": ("x", lambda x: spoiled(x, float("inf")), ["NaN or infinite"]),
    "minus-infinite": ("x", lambda x: spoiled(x, -float("inf")), ["NaN or infinite"]),
    "above-one": ("x", lambda x: spoiled(x, 1.01), ["leave [0, 1]", "from 0 to 1.01", "divide uint8 images by 255"]),
    "below-zero": ("x", lambda x: spoiled(x, -0.5), ["leave [0, 1]", "from -0.5", "inside the model"]),
    "grey-levels": ("x", lambda x: x * 255, ["leave [0, 1]", "to 255", "divide uint8 images by 255"]),
    "uint8": ("x", lambda x: (x * 255).to(torch.uint8), ["must be float", "torch.uint8", "x.float() / 255"]),
    "one-image": ("x", lambda x: x[0], ["(8, 10)", "shape"]),
    "other-size": ("x", lambda x: x[..., :8], ["(3, 8, 8)", "made for (3, 8, 10)", "create it with shape"]),
    "other-channels": ("x", lambda x: x[:, :1], ["(1, 8, 10)", "made for (3, 8, 10)"]),
    "channels-last": ("x", lambda x: x.permute(0, 2, 3, 1), ["(8, 10, 3)", "x.permute(0, 3, 1, 2)"]),
    "numpy": ("x", lambda x: x.numpy(), ["images must be a tensor", "ndarray", "torch.as_tensor()"]),
    "list-of-indices": ("index", lambda index: index.tolist(), ["indices must be a tensor", "got list"]),
    "label-high": ("y", lambda y: y.index_fill(0, torch.tensor([2]), 4), ["label", "0..3", "found 0 to 4"]),
    "label-low": ("y", lambda y: y.index_fill(0, torch.tensor([2]), -1), ["label", "0..3", "found -1 to 3"]),
    "labels-short": ("y", lambda y: y[:3], ["labels", "shape (4,)", "got (3,)"]),
    "labels-columns": ("y", lambda y: y[:, None], ["labels", "shape (4,)", "got (4, 1)"]),
    "labels-float": ("y", lambda y: y.float(), ["labels", "integers", ".long()"]),
    "labels-elsewhere": ("y", lambda y: y.to("meta"), ["labels", "meta", "cpu", ".to()"]),
    "index-high": ("index", lambda i: i + 9, ["index", "0..11", "found 9 to 12", "examples=len(train_set)"]),
    "index-low": ("index", lambda i: i - 1, ["index", "0..11", "found -1 to 2"]),
    "index-short": ("index", lambda i: i[:2], ["indices", "shape (4,)", "got (2,)"]),
    "index-float": ("index", lambda i: i.double(), ["indices", "integers"]),
    "index-bool": ("index", lambda i: i > 1, ["indices", "integers"]),
    "index-elsewhere": ("index", lambda i: i.to("meta"), ["indices", "meta", "cpu"]),
    "view-of-other-pad": ("view", lambda _: View.centre(4, 4), ["view", "pad=4", "pad=2"]),
    "view-of-text": ("view", lambda _: "x", ["atas.random_view", "got str"]),
    "view-of-other-batch": ("view", lambda _: View.centre(3, PAD), ["view of 3 images", "4 images"]),
}


def wrong_batch(case, make_images):
    part, spoil, words = WRONG[case]
    usual = {"x": make_images(4, SHAPE), "y": torch.tensor([0, 1, 2, 3]), "index": torch.arange(4), "view": None}
    return {part: spoil(usual[part])}, words


@every_method
@pytest.mark.parametrize("case", WRONG)
def test_step_names_what_is_wrong(train, make_images, name, case):
    replaced, words = wrong_batch(case, make_images)
    with pytest.raises(DataError) as caught:
        train(name, **replaced)
    for word in words:
        assert word in sentence(caught)


@pytest.mark.parametrize("case", WRONG)
def test_perturb_names_what_is_wrong(train, make_images, case):
    replaced, words = wrong_batch(case, make_images)
    with pytest.raises(DataError) as caught:
        train("atas", call="perturb", **replaced)
    for word in words:
        assert word in sentence(caught)


@pytest.mark.parametrize(("name", "call"), [("atas", "perturb"), ("fgsm-rs", "perturb"), ("trades", "step")])
def test_a_batch_without_images_is_refused(train, name, call):
    none = {"x": torch.zeros(0, *SHAPE), "y": torch.zeros(0, dtype=torch.long), "index": torch.zeros(0).long()}
    with pytest.raises(DataError, match="a batch without images has nothing to train on; leave it out"):
        train(name, call=call, **none)


@pytest.mark.parametrize("call", ["perturb", "step"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision_is_named(train, small_net, dtype, call):
    with pytest.raises(UsageError, match=rf"weights in {dtype} and cannot take images in torch.float32.*autocast"):
        train(call=call, model=small_net().to(dtype))


def test_a_model_in_half_precision_that_casts_its_images_is_taken(train, small_net):
    class Casting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small_net().to(torch.bfloat16)

        def forward(self, x):
            return self.net(x.to(torch.bfloat16)).float()

    assert train(model=Casting()).inputs.dtype == torch.float32


def test_lazy_weights_are_named():
    lazy = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(4))
    with pytest.raises(UsageError, match=r"lazy layers .*call it once on a batch of images"):
        check_module(lazy)
    lazy(torch.zeros(1, *SHAPE))
    check_module(lazy)


@every_method
def test_rounding_is_no_reason_to_stop(train, make_images, name):
    x = make_images(4, SHAPE)
    x[0, 0, 0, :2] = torch.tensor([1.00005, -0.00005])
    inputs = train(name, x=x).inputs
    if name == "standard":
        assert torch.equal(inputs, x)
    elif name not in ("elle", "fgsm-pco"):  # their authors do not clamp
        assert inputs.min() >= 0
        assert inputs.max() <= 1


@pytest.mark.parametrize("name", ["fgsm", "fgsm-rs", "atas"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("part", ["y", "index"])
def test_integers_of_another_size_mean_the_same_or_are_refused(train, name, dtype, part):
    """Labels and indices of numpy and other libraries: never other numbers, nor an error from deep inside."""
    expected, refused = train(name), ""
    try:
        found = train(name, **{part: torch.arange(4, dtype=dtype)})
    except DataError as error:
        refused = str(error)
    same = not refused and torch.equal(found.inputs, expected.inputs) and torch.equal(found.loss, expected.loss)
    assert same or ".long()" in refused


def test_refused_batch_changes_no_state(small_net, make_images):
    method = atas.methods.create("atas", atas.Linf(8 / 255), EXAMPLES, SHAPE, pad=PAD)
    method.start_epoch(6)
    before = {key: value.clone() for key, value in method.state_dict().items()}
    for case in ("nan", "label-high", "index-high", "view-of-other-pad"):
        replaced, _ = wrong_batch(case, make_images)
        batch = {"x": make_images(4, SHAPE), "y": torch.tensor([0, 1, 2, 3]), "index": torch.arange(4), "view": None}
        with pytest.raises(DataError):
            method.perturb(small_net(), *{**batch, **replaced}.values())
    assert all(torch.equal(before[key], value) for key, value in method.state_dict().items())


# The checks themselves


def test_shapes_without_index_or_expectation(make_images):
    check_shapes(make_images(2), torch.tensor([0, 1]), None, None)
    with pytest.raises(DataError, match=r"must be a batch \(N, C, H, W\); got shape \(3, 8, 10\)"):
        check_shapes(make_images(1)[0], torch.tensor([0, 1, 2]), None, None)


@pytest.mark.parametrize("value", [0.0, 1.0, 1.00009, -0.00009])
def test_images_within_tolerance(make_images, value):
    check_images(spoiled(make_images(2), value))


@pytest.mark.parametrize("value", [1.001, -0.001])
def test_images_beyond_tolerance(make_images, value):
    with pytest.raises(DataError, match="leave"):
        check_images(spoiled(make_images(2), value))


def test_empty_batches_pass():
    check_images(torch.zeros(0, *SHAPE))
    check_labels(torch.zeros(0, dtype=torch.long), 4)
    assert DeviceChecks().index(torch.zeros(0, dtype=torch.long), 4).numel() == 0


def test_labels_of_all_classes_pass():
    check_labels(torch.arange(4), 4)
    with pytest.raises(DataError, match=r"0\.\.2"):
        check_labels(torch.arange(4), 3)


def test_a_guard_raises_at_once_on_the_cpu_and_keeps_nothing():
    guard = DeviceChecks()
    with pytest.raises(DataError, match="NaN"):
        guard.images(torch.tensor([float("nan")]).view(1, 1, 1, 1))
    guard.raise_if_set()
    assert dict(guard.state_dict()) == {}
    index = torch.tensor([0, 2])
    assert guard.index(index, 3) is index
    assert guard.labels(index, 3) is index


@pytest.mark.parametrize(
    ("place", "words"), [(0, "NaN or infinite"), (1, r"leave \[0, 1\]"), (2, "label"), (3, "an example's index")]
)
def test_a_flag_is_raised_when_it_is_read_and_then_forgotten(place, words):
    guard = DeviceChecks()
    guard.flags[place] = True
    with pytest.raises(DataError, match=words):
        guard.raise_if_set()
    guard.raise_if_set()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("nan", "NaN or infinite"),
        ("infinite", "NaN or infinite"),
        ("above-one", r"leave \[0, 1\]"),
        ("label-high", r"label.*0\.\.3"),
        ("label-low", r"label.*0\.\.3"),
        ("index-high", r"index.*0\.\.11"),
        ("index-low", r"index.*0\.\.11"),
    ],
)
def test_on_a_gpu_the_error_waits_for_the_flag_to_be_read(small_net, make_images, case, words):
    """The step itself goes on, without a device assert, and without a look at the values by the host."""
    method = atas.methods.create("atas", atas.Linf(8 / 255), EXAMPLES, SHAPE, pad=PAD, device="cuda")
    method.start_epoch(6, 30)
    model = small_net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    usual = {"x": make_images(4, SHAPE), "y": torch.tensor([0, 1, 2, 3]), "index": torch.arange(4)}
    replaced, _ = wrong_batch(case, make_images)
    good = {key: value.cuda() for key, value in usual.items()}
    bad = {key: value.cuda() for key, value in {**usual, **replaced}.items()}
    view = View.centre(4, PAD, torch.device("cuda"))
    method.step(model, optimizer, *good.values(), view)
    method.checks.raise_if_set()
    method.step(model, optimizer, *bad.values(), view)
    torch.cuda.synchronize()
    method.step(model, optimizer, *good.values(), view)
    with pytest.raises(DataError, match=words):
        method.checks.raise_if_set()
    method.checks.raise_if_set()


@pytest.mark.gpu
def test_on_a_gpu_values_come_back_in_range():
    guard = DeviceChecks("cuda")
    assert guard.labels(torch.tensor([-5, 2, 9], device="cuda"), 4).tolist() == [0, 2, 3]
    assert guard.index(torch.tensor([-1, 5, 12], device="cuda"), 12).tolist() == [0, 5, 11]
    assert guard.flags.tolist() == [False, False, True, True, False]
    guard.distinct(torch.tensor([3, 1, 3], device="cuda"))
    assert guard.flags[4]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@every_method
def test_on_a_gpu_a_step_never_waits_for_the_device(small_net, make_images, name):
    hyper = {"batch_size": 4} if "batch_size" in atas.methods.settings(name) else {}
    hyper |= {"classes": 4} if atas.methods.takes_classes(name) else {}
    method = atas.methods.create(name, atas.Linf(8 / 255), EXAMPLES, SHAPE, pad=PAD, device="cuda", **hyper)
    method.start_epoch(6, 30)
    model = small_net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y, index = make_images(4, SHAPE).cuda(), torch.tensor([0, 1, 2, 3]).cuda(), torch.arange(4).cuda()
    view = View.centre(4, PAD, torch.device("cuda"))
    method.step(model, optimizer, x, y, index, view)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        method.step(model, optimizer, x, y, index, view)
    finally:
        torch.cuda.set_sync_debug_mode("default")
