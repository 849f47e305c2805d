"""One call from data to a verdict, on tiny data within seconds."""

import signal
import time

import numpy as np
import pytest
import torch
from torch import nn

import atas
from atas import recipes
from atas.autotrain import job
from atas.autotrain.timing import TrainingCosts, measure_training
from atas.errors import AtasError, DataError, UsageError
from atas.evaluation import Evaluation
from atas.training.run import RunFolder

pytestmark = pytest.mark.slow


def test_arrays(robustify, digits, log, command):
    began = time.perf_counter()
    result = robustify(None, *digits, out="run")
    assert time.perf_counter() - began < 60  # of seconds, on a machine that does much else
    assert result.model is result.run.model
    assert not result.model.training
    assert [line.partition(":")[0] for line in result.choices] == [
        *("data", "network", "attacks", "batch", "epochs", "evaluation")
    ]
    assert set(result.choices) <= set(log.lines)
    recipe = result.run.recipe
    assert (recipe.method.name, recipe.method.eps, recipe.model.name) == ("atas-plus", 0.1, "small-cnn")
    assert recipe.training.on_collapse == "rollback"
    assert not recipe.data.flip
    saved = Evaluation.load("run/evaluation.json")
    assert saved.accuracy == result.evaluation.accuracy
    assert saved.n == 60
    assert str(result).splitlines() == list(result.verdict)
    assert command("report", "run").status == 0
    assert command("export", "run", "--to", "safetensors").status == 0
    command("evaluate", "run").sentence("given in Python", status=2)


@pytest.mark.parametrize("form", ["Dataset", "name", "pair", "datasets", "pair of datasets", "splits"])
def test_forms_of_data(robustify, digits, form):
    (x, y), test = digits
    whole = atas.data.from_arrays("mine", x, y, *test)
    pairs = [(torch.from_numpy(image).float() / 255, int(label)) for image, label in zip(*test, strict=True)]
    given = {
        "Dataset": (whole,),
        "name": ("mine.npz",),
        "pair": (((x, y), test),),
        "datasets": (whole.train, pairs),
        "splits": (whole.train, whole.test),
    }
    np.savez("mine.npz", x_train=x, y_train=y, x_test=test[0], y_test=test[1])
    if "datasets" in form:
        given |= {"datasets": (pairs, pairs[:40]), "pair of datasets": ((pairs, pairs[:40]),)}
    result = robustify(None, *given[form], values={"training.epochs": 1})
    assert result.run.recipe.training.epochs == 1
    assert "epochs: 1 " in result.choices[4]
    assert "as you set" in result.choices[4]
    assert result.run.folder.name.endswith("-small-cnn-auto")


def test_without_test_images_some_are_held_out(robustify, digits):
    result = robustify(None, digits[0], values={"training.epochs": 1})
    assert "400" not in result.choices[0]
    assert "300 training images" in result.choices[0]
    assert result.evaluation.n <= 100
    assert any("100 of its training images were held out" in sentence for sentence in result.verdict)
    again = robustify(None, digits[0], out="again", values={"training.epochs": 1})
    assert again.evaluation.data == result.evaluation.data


def test_settings_of_few_images(robustify, digits):
    """The number to hold out, and the monitor's images among those to train on."""
    (x, y), _ = digits
    values = {"training.epochs": 1, "training.on_collapse": "warn", "data.held_out": 7}
    result = robustify(None, (x[:40], y[:40] % 2), values=values)
    assert "33 training images" in result.choices[0]
    assert "7 test images" in result.choices[0]
    assert "batch: 17 images, 2 updates in an epoch" in result.choices[3]  # of all 33
    assert result.evaluation.n == 7


@pytest.mark.parametrize(("name", "deep"), [("small-cnn", False), ("resnet18", True), ("preact-resnet18", True)])
def test_networks_that_are_deep(name, deep):
    assert job._is_deep(atas.models.create(name, 10)) == deep


def test_steps_of_a_tiny_set_are_timed(digits, tiny_net):
    """A fast machine tries more steps than a short training has."""
    (x, y), _ = digits
    images = atas.data.from_arrays("few", x[:20], y[:20], x[:20], y[:20])
    recipe = recipes.from_dict({}, "few").with_values({"data.name": "digits", "method.name": "atas-plus"})
    costs = measure_training(recipe, images, tiny_net(), 20, forward=1e-6, seconds=60)
    assert 0 < costs.step < 60


def test_a_training_far_beyond_the_time_is_refused(robustify, digits, monkeypatch):
    monkeypatch.setattr(job, "measure_training", lambda *_: TrainingCosts(0.0, 1000.0, 0.0, 0.0))
    with pytest.raises(UsageError, match=r"3 epochs of this data, .* take about 17\.\d+ h here, .* give more minutes"):
        robustify(None, *digits, out="run")
    assert not job.Path("run").exists()
    assert robustify(None, *digits, out="run", values={"training.epochs": 1}).run.recipe.training.epochs == 1


def test_a_trained_module_is_the_start(robustify, digits, tiny_net):
    torch.manual_seed(0)
    net = tiny_net()
    x, y = (torch.from_numpy(array) for array in digits[0])
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x.float() / 255), y).backward()
        optimizer.step()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    result = robustify(net, *digits)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net.training
    assert "yours, Tiny, right on" in result.choices[1]
    assert "a quarter of the usual learning rate" in result.choices[1]
    (gain,) = (sentence for sentence in result.verdict if sentence.startswith("Your model had"))
    assert "on the same" in gain
    other = robustify(tiny_net(), *digits, out="untrained")
    assert "at chance before" in other.choices[1]
    peaks = result.run.recipe.schedule.peak, other.run.recipe.schedule.peak
    assert peaks[0] == pytest.approx(peaks[1] / 4, rel=0.05)
    assert not any(sentence.startswith("Your model had") for sentence in other.verdict)


def test_a_name_of_a_network(robustify, digits):
    result = robustify("small-cnn", *digits, values={"training.epochs": 1})
    assert result.choices[1] == "network: small-cnn"
    assert result.run.recipe.model.name == "small-cnn"


def test_no_robustness_is_said(robustify, noise):
    result = robustify(None, noise, values={"training.epochs": 1}, eps=0.5)
    assert any("every image can become uniformly grey" in sentence for sentence in result.verdict)
    assert any("Robustness is not shown" in sentence or "not robust" in sentence for sentence in result.verdict)


def test_too_little_time_is_said(robustify, digits):
    result = robustify(None, *digits, minutes=0.001)
    assert result.run.recipe.training.epochs == 3
    assert "that is the least" in result.choices[4]
    assert any("the time was too short" in sentence for sentence in result.verdict)
    assert not result.evaluation.has_autoattack
    assert any(sentence.startswith("For AutoAttack") for sentence in result.verdict)


def test_a_folder_that_holds_a_run(robustify, digits):
    robustify(None, *digits, out="run", values={"training.epochs": 1})
    with pytest.raises(UsageError, match="there is a run in run already"):
        robustify(None, *digits, out="run")
    weights = robustify(None, *digits, out="run", overwrite=True, seed=1, values={"training.epochs": 1}).evaluation
    assert Evaluation.load("run/evaluation.json").weights == weights.weights


def test_ctrl_c_during_the_evaluation_keeps_the_run(robustify, digits, monkeypatch):
    real = job.evaluate

    def evaluate(*arguments, **options):
        if options.get("progress") is not None:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments, **options)

    monkeypatch.setattr(job, "evaluate", evaluate)
    with pytest.raises(AtasError, match="the model is trained, evaluate it with: atas evaluate run"):
        robustify(None, *digits, out="run", values={"training.epochs": 1})
    assert RunFolder(job.Path("run")).model.exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"minutes": 0}, "minutes must be above zero; got 0"),
        ({"minutes": float("nan")}, "minutes must be"),
        ({"eps": -0.1}, "eps must be above zero"),
        ({"eps": "4/255"}, "eps must be a finite number"),
        ({"model": 3}, "model must be"),
        ({"model": "small-cnm"}, "unknown model 'small-cnm'; did you mean 'small-cnn'"),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 3))}, "the classes that the model has"),
        ({"train": None}, "the training images are missing"),
        ({"train": "nowhere", "test": None}, "unknown data set 'nowhere'"),
        ({"train": "digits"}, "digits has its own test images"),
        ({"train": 5}, "data must be"),
        ({"test": iter([1])}, "got the pair of a tuple and <list_iterator"),
        ({"train": (np.zeros((9, 8, 8, 1), np.uint8), np.zeros(8, np.int64))}, "the training set: there are 9 images"),
        ({"train": np.zeros((9, 8, 8, 1)), "test": np.zeros(9)}, r"the pair of an array of shape \(9, 8, 8, 1\)"),
        ({"test": (np.zeros((9, 9, 9, 1), np.uint8), np.zeros(9, np.int64))}, "bring both to one shape"),
        ({"train": (np.zeros((9, 1, 8, 8), np.uint8), np.arange(9)), "test": None}, "there are 9 images in all"),
        ({"values": {"method.eps": 0.2}}, "pass eps"),
        ({"values": {"evaluation.attacks": ["fgsm"]}}, "they follow the time"),
        ({"values": {"training.epoch": 2}}, r"did you mean 'training\.epochs'"),
        ({"values": {"model.name": "small-cnn"}, "model": "small-cnn"}, "two networks"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(robustify, digits, options, sentence):
    train, test = digits
    given = {"model": None, "train": train, "test": test, **options}
    model, train, test = (given.pop(name) for name in ("model", "train", "test"))
    with pytest.raises((UsageError, DataError), match=sentence):
        robustify(model, train, test, **given)


@pytest.mark.gpu
def test_on_a_gpu(robustify, digits):
    """From arrays, and from a given model on the GPU."""
    values = {"training.epochs": 2}
    result = robustify(None, *digits, out="run", values=values, minutes=0.5)
    assert result.run.recipe.training.epochs == 2
    assert result.evaluation.environment["device"] == torch.cuda.get_device_name()
    again = robustify(result.model.cuda(), *digits, out="again", values=values, minutes=0.5)
    assert again.evaluation.n == result.evaluation.n == 60
