"""What holds for every model, and the errors of a wrong call."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from atas import models
from atas.errors import UsageError

NAMES = [
    "preact-resnet18",
    "preact-resnet18-ssat",
    "preact-resnet18-yopo",
    "preact-resnet18-gradalign",
    "wrn-28-10",
    "resnet18",
    "resnet50",
    "small-cnn",
]
SMALL_IMAGES = ["preact-resnet18", "small-cnn", "resnet18"]


def create_without_memory(name, num_classes, **arguments):
    with torch.device("meta"):
        return models.create(name, num_classes, **arguments)


def test_names_are_the_contract():
    assert models.names() == NAMES


@pytest.mark.parametrize(
    ("name", "num_classes", "parameters"),
    [
        ("preact-resnet18", 10, 11_172_170),
        ("preact-resnet18-ssat", 10, 11_171_146),
        ("preact-resnet18-yopo", 10, 11_171_146),
        ("preact-resnet18-gradalign", 10, 11_171_146),
        ("wrn-28-10", 10, 36_479_194),
        ("resnet18", 1000, 11_689_512),
        ("resnet50", 1000, 25_557_032),
        ("small-cnn", 10, 66_410),
    ],
)
def test_parameter_counts(name, num_classes, parameters):
    model = create_without_memory(name, num_classes)
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("name", "size", "giga_multiplications"),
    [("preact-resnet18", 32, 0.5554), ("wrn-28-10", 32, 5.25), ("resnet50", 224, 4.09)],
)
def test_forward_cost(name, size, giga_multiplications):
    model = create_without_memory(name, 1000 if size == 224 else 10)
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 3, size, size, device="meta"))
    assert counter.get_total_flops() / 2e9 == pytest.approx(giga_multiplications, rel=2e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("channels", "height", "width"), [(3, 32, 32), (1, 28, 28), (4, 64, 40)])
def test_logits_have_one_column_per_class(name, channels, height, width):
    model = create_without_memory(name, 7, channels=channels).eval()
    assert model(torch.empty(2, channels, height, width, device="meta")).shape == (2, 7)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_IMAGES)
@pytest.mark.parametrize(("channels", "size"), [(1, 8), (1, 28), (3, 32)])
def test_training_on_small_images_gives_every_parameter_a_gradient(name, channels, size):
    torch.manual_seed(0)
    model = models.create(name, 10, channels=channels)
    model(torch.rand(3, channels, size, size)).logsumexp(1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_normalisation_is_the_first_layer_and_conv1_the_next(name):
    model = create_without_memory(name, 10, channels=2)
    children = [child for child, _ in model.named_children()]
    assert children[:2] == ["normalize", "conv1"]
    assert isinstance(model.normalize, models.Normalize)
    assert model.normalize.mean.shape == model.normalize.std.shape == (1, 2, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_IMAGES)
def test_double_and_channels_last_give_the_same_logits(name):
    torch.manual_seed(0)
    model = models.create(name, 10).eval()
    x = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        logits = model(x)
        exact = model.double()(x.double())
        strided = model.to(memory_format=torch.channels_last)(x.double().to(memory_format=torch.channels_last))
    assert exact.dtype == torch.float64
    torch.testing.assert_close(logits.double(), exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(strided, exact)


def test_normalize_keys_may_be_absent_from_weights_and_no_others():
    torch.manual_seed(0)
    model = models.create("small-cnn", 10, mean=0.1, std=0.2)
    weights = {k: v for k, v in model.state_dict().items() if not k.startswith("normalize.")}
    other = models.create("small-cnn", 10, mean=0.1, std=0.2)
    missing, unexpected = other.load_state_dict(weights, strict=True)
    assert not missing
    assert not unexpected
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(other.eval()(x), model.eval()(x))

    del weights["conv1.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"conv1\.weight\"\.\s*$"):
        other.load_state_dict(weights, strict=True)


def test_integers_read_from_labels_are_accepted():
    classes = torch.tensor([0, 4, 2]).max() + 1
    model = models.create("small-cnn", classes, channels=torch.tensor(1).numpy())
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 5)


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(UsageError, match="unknown model 'resnet-18'; did you mean 'resnet18'") as caught:
        models.create("resnet-18", 10)
    assert all(name in str(caught.value) for name in NAMES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_classes": 1}, "num_classes is 1; pass an integer of at least 2."),
        ({"num_classes": 0}, "num_classes is 0; pass an integer of at least 2."),
        ({"num_classes": 10.0}, "num_classes is 10.0; pass an integer of at least 2."),
        ({"channels": 0}, "channels is 0; pass an integer of at least 1."),
        ({"channels": "3"}, "channels is '3'; pass an integer of at least 1."),
        ({"mean": (0.5, 0.5)}, "mean is (0.5, 0.5) for images of 3 channels; pass one finite number"),
        ({"std": [0.5] * 4}, "for images of 3 channels; pass one finite number, or a sequence of 3."),
        ({"channels": 1, "std": [0.5] * 3}, "for images of 1 channel; pass one finite number"),
        ({"mean": "grey"}, "mean is 'grey' for images of 3 channels; pass one finite number"),
        ({"mean": [0.5, None, 0.5]}, "mean is [0.5, None, 0.5]"),
        ({"mean": float("nan")}, "mean is nan"),
        ({"std": float("inf")}, "std is inf"),
        ({"std": 0}, "std is 0; pass numbers greater than 0."),
        ({"std": (0.2, -0.2, 0.2)}, "std is (0.2, -0.2, 0.2); pass numbers greater than 0."),
    ],
)
def test_a_wrong_value_is_refused_with_the_remedy(arguments, message):
    with pytest.raises(UsageError) as caught:
        models.create(**{"name": "small-cnn", "num_classes": 10, **arguments})
    assert message in str(caught.value)


def test_models_are_modules_that_keep_batchnorm_statistics_in_eval_mode():
    model = models.create("small-cnn", 10).eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model(torch.rand(4, 3, 8, 8))
    assert isinstance(model, nn.Module)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
