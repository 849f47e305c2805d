"""Mistakes at the public interface: each gives one sentence, an exception of `atas.errors`, and never torch's own."""

import numpy as np
import pytest
import torch
from torch import nn

import atas
from atas.errors import AtasError

SHAPE, N = (3, 8, 8), 6
LINF, L2 = atas.Linf(8 / 255), atas.L2(0.5)
NAN, INF = float("nan"), float("inf")


class Frozen(nn.Linear):
    def __init__(self):
        super().__init__(192, 4)
        self.requires_grad_(False)

    def forward(self, x):
        return super().forward(x.flatten(1))


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 4))


def make(name="atas", epoch=0, **settings):
    method = atas.methods.create(name, LINF, N, SHAPE, pad=0, **settings)
    if epoch is not None:
        method.start_epoch(epoch)
    return method


def batch(**changes):
    """A good batch with some of it replaced."""
    good = {"x": torch.rand(N, *SHAPE), "y": torch.arange(N) % 4, "index": torch.arange(N), "view": None}
    return tuple((good | changes).values())


def step(name="atas", model=None, optimizer=None, epoch=0, settings=None, **changes):
    model = model or network()
    optimizer = optimizer or torch.optim.SGD(network().parameters(), lr=0.1)
    return make(name, epoch, **settings or {}).step(model, optimizer, *batch(**changes))


def perturb(**changes):
    return make().perturb(network(), *batch(**changes))


def attack(name="pgd", model=None, threat=LINF, options=None, **changes):
    x, y, index, _ = batch(**changes)
    options = dict(options or {})
    if name != "fgsm":
        options["index"] = index
    return getattr(atas.attacks, name)(model or network(), x, y, threat, **options)


def evaluate(*args, **options):
    x, y, _, _ = batch()
    given = {0: network(), 1: x, 2: y, 3: LINF} | dict(enumerate(args))
    return atas.evaluate(*given.values(), **{"attacks": ("fgsm",), **options})


def arrays(**changes):
    pixels, labels = np.zeros((4, 8, 8, 1), np.uint8), [0, 1, 2, 0]
    good = {"name": "own", "train_images": pixels, "train_labels": labels, "test_images": pixels, "test_labels": labels}
    return atas.data.from_arrays(**good | changes)


def train(model=None, data=None, values=None, **options):
    pixels = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8)
    data = (
        data
        if data is not None
        else atas.data.from_arrays("own", pixels, torch.arange(40) % 4, pixels, torch.arange(40) % 4)
    )
    options = {"out": "run", "recipe": "digits-small-cnn-atas", **options}
    few = {"training.epochs": 1, "training.probe": 8}
    values = few | values if isinstance(values, dict) else values or few
    return atas.train(model=model or network(), data=data, values=values, **options)


def inference_model():
    with torch.inference_mode():
        return network()


def lazy_model():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(4))


def doubled():
    index = torch.arange(N)
    index[3] = index[1]
    return index


def view_of(count, pad=0):
    return atas.random_view(torch.rand(count, *SHAPE), pad=pad)[1]


MISUSES = {
    # Settings of methods
    "clip of three": lambda: make(clip=(0.1, 0.2, 0.3)),
    "clip of one": lambda: make(clip=(0.1,)),
    "clip of texts": lambda: make(clip=("a", "b")),
    "clip reversed": lambda: make(clip=(0.2, 0.1)),
    "clip with NaN": lambda: make(clip=(NAN, 0.1)),
    "clip a word": lambda: make(clip="none"),
    "reset_every None": lambda: make(reset_every=None),
    "reset_every zero": lambda: make(reset_every=0),
    "reset_every half": lambda: make(reset_every=2.5),
    "c a text": lambda: make(c="x"),
    "c zero": lambda: make(c=0.0),
    "c NaN": lambda: make(c=NAN),
    "c infinite": lambda: make(c=INF),
    "c a tensor": lambda: make(c=torch.ones(3, 3)),
    "beta above one": lambda: make(beta=1.5),
    "beta None": lambda: make(beta=None),
    "beta NaN": lambda: make("trades", beta=NAN),
    "beta infinite": lambda: make("trades", beta=INF),
    "max_step a text": lambda: make(max_step="large"),
    "max_step in 255ths": lambda: make(max_step=16),
    "warm-up a text": lambda: make(warmup_epochs="5"),
    "warm-up negative": lambda: make(warmup_epochs=-1),
    "steps a fraction": lambda: make("pgd", steps=2.5),
    "steps true": lambda: make("pgd", steps=True),
    "steps None": lambda: make("trades", steps=None),
    "replays a text": lambda: make("free", replays="8"),
    "batch_size None": lambda: make("free", batch_size=None),
    "checkpoints a text": lambda: make("ssat", checkpoints="3"),
    "outer a fraction": lambda: make("yopo", outer=1.5),
    "layer a number": lambda: make("yopo", layer=3),
    "weight a text": lambda: make("fgsm-ga", weight="much"),
    "weight NaN": lambda: make("fgsm-ga", weight=NAN),
    "step size a text": lambda: make("pgd", step_size="2/255"),
    "step size infinite": lambda: make("pgd", step_size=INF),
    "dtype of texts": lambda: make(dtype="int4"),
    "dtype integers": lambda: make(dtype=torch.int32),
    "dtype a type": lambda: make(dtype=int),
    "int8 for L2": lambda: atas.ATAS(L2, N, SHAPE, dtype=torch.int8),
    "class with a text": lambda: atas.ATAS(LINF, N, SHAPE, dtype="int8"),
    "grid a fraction": lambda: make(grid=2.5),
    "grid zero": lambda: make(grid=0),
    "store elsewhere": lambda: make(store="disk"),
    "seed a text": lambda: make(seed="0"),
    "seed a fraction": lambda: make(seed=0.5),
    "seed None": lambda: make(seed=None),
    "seed of 65 bits": lambda: make(seed=2**64),
    "device unknown": lambda: make(device="gpu"),
    "device a number": lambda: make(device=1.5),
    "pad a text": lambda: atas.methods.create("fgsm", LINF, N, SHAPE, pad="4"),
    "no threat": lambda: atas.methods.create("fgsm", 8 / 255, N, SHAPE),
    "examples a text": lambda: atas.methods.create("fgsm", LINF, "6", SHAPE),
    "shape a number": lambda: atas.methods.create("fgsm", LINF, N, 8),
    "unknown method": lambda: atas.methods.create("atass", LINF, N, SHAPE),
    "method a number": lambda: atas.methods.create(3, LINF, N, SHAPE),
    "unknown setting": lambda: make(gamma=1.0),
    # Epochs and states
    "epoch a text": lambda: make(epoch="1"),
    "epoch a fraction": lambda: make(epoch=1.5),
    "epoch negative": lambda: make(epoch=-1),
    "epochs a text": lambda: make(epoch=None).start_epoch(0, "30"),
    "no epoch": lambda: step(epoch=None),
    "state of another method": lambda: make().load_state_dict(make("atta").state_dict()),
    "state for other data": lambda: make().load_state_dict(
        atas.methods.create("atas", LINF, N + 1, SHAPE, pad=0).state_dict()
    ),
    "state a list": lambda: make().load_state_dict([1]),
    "steps shrunk by a text": lambda: make().shrink_steps("half"),
    "steps shrunk by NaN": lambda: make().shrink_steps(NAN),
    # Batches
    "frozen model": lambda: step(model=Frozen()),
    "function as model": lambda: step(model=lambda x: x.flatten(1)[:, :4]),
    "lazy model": lambda: step(model=lazy_model()),
    "model without gradients": lambda: step(model=inference_model()),
    "no optimizer": lambda: step(optimizer="sgd"),
    "double images": lambda: step(x=torch.rand(N, *SHAPE, dtype=torch.float64)),
    "half images": lambda: step(x=torch.rand(N, *SHAPE).half()),
    "bytes as images": lambda: step(x=torch.zeros(N, *SHAPE, dtype=torch.uint8)),
    "array as images": lambda: step(x=np.zeros((N, *SHAPE), np.float32)),
    "images to 255": lambda: step(x=torch.rand(N, *SHAPE) * 255),
    "NaN image": lambda: step(x=torch.full((N, *SHAPE), NAN)),
    "other shape": lambda: step(x=torch.rand(N, 3, 9, 9)),
    "channels last": lambda: step(x=torch.rand(N, 8, 8, 3)),
    "one image without a batch": lambda: step(x=torch.rand(*SHAPE)),
    "float labels": lambda: step(y=torch.zeros(N)),
    "one-hot labels": lambda: step(y=torch.eye(N).long()),
    "list of labels": lambda: step(y=[0] * N),
    "label out of range": lambda: step(y=torch.full((N,), 4)),
    "label negative": lambda: step(y=torch.full((N,), -1)),
    "too few labels": lambda: step(y=torch.zeros(N - 1, dtype=torch.long)),
    "float indices": lambda: step(index=torch.arange(N).float()),
    "mask as indices": lambda: step(index=torch.ones(N, dtype=torch.bool)),
    "index out of range": lambda: step(index=torch.arange(N) + 1),
    "index negative": lambda: step(index=torch.arange(N) - 1),
    "duplicate indices": lambda: step(index=doubled()),
    "duplicates with norms": lambda: step("fgsm-rs-adaptive", index=doubled()),
    "duplicates to perturb": lambda: perturb(index=doubled()),
    "view of fewer images": lambda: step(view=view_of(N - 1)),
    "view of another pad": lambda: step(view=view_of(N, pad=2)),
    "view of images": lambda: step(view=torch.rand(N, *SHAPE)),
    "resized view without a grid": lambda: step(view=atas.random_resized_view(torch.rand(N, 3, 12, 12), 8)[1]),
    "empty batch": lambda: step(x=torch.rand(0, *SHAPE), y=torch.arange(0), index=torch.arange(0)),
    "no perturbing method": lambda: make("trades").perturb(network(), *batch()),
    "model that returns a tuple": lambda: step(model=lazy_tuple()),
    # Parts of a method
    "targets a text": lambda: make(targets="soft"),
    "smoothing a text": lambda: atas.methods.LabelTargets(smoothing="0.1"),
    "noise unknown": lambda: atas.methods.LabelTargets(noise="normal"),
    "classes a float": lambda: atas.methods.RememberedPredictions(10.0),
    "consistency a number": lambda: make(consistency=2.0),
    "weight of consistency a text": lambda: atas.methods.Consistency("2"),
    "ramp None": lambda: atas.methods.Consistency(1.0, ramp=None),
    "weight perturbation a number": lambda: setattr(make(), "weight_perturbation", 0.005),
    "gamma a text": lambda: atas.methods.WeightPerturbation("0.005"),
    "first epoch a float": lambda: atas.methods.WeightPerturbation(from_epoch=1.5),
    # Threats and views
    "eps a text": lambda: atas.Linf("8/255"),
    "eps negative": lambda: atas.Linf(-0.1),
    "eps NaN": lambda: atas.L2(NAN),
    "eps in 255ths": lambda: atas.Linf(8),
    "eps None": lambda: atas.L2(None),
    "eps true": lambda: atas.Linf(True),
    "view of an array": lambda: atas.random_view(np.zeros((2, 3, 8, 8))),
    "view of one image": lambda: atas.random_view(torch.rand(*SHAPE)),
    "pad negative": lambda: atas.random_view(torch.rand(2, *SHAPE), pad=-1),
    "pad of a view a text": lambda: atas.random_view(torch.rand(2, *SHAPE), pad="4"),
    "size of a view zero": lambda: atas.random_resized_view(torch.rand(2, *SHAPE), 0),
    "size of a view a text": lambda: atas.random_resized_view(torch.rand(2, *SHAPE), "8"),
    "resized view of an array": lambda: atas.random_resized_view(np.zeros((2, 3, 8, 8)), 4),
    "scale of one number": lambda: atas.random_resized_view(torch.rand(2, *SHAPE), 4, scale=0.5),
    "ratio reversed": lambda: atas.random_resized_view(torch.rand(2, *SHAPE), 4, ratio=(2.0, 1.0)),
    "shifted view of an array": lambda: atas.random_shift_view(np.zeros((2, 3, 8, 8))),
    "shift a text": lambda: atas.random_shift_view(torch.rand(2, *SHAPE), "2"),
    "erasing in an array": lambda: atas.random_erasing(np.zeros((2, 3, 8, 8)), view_of(2)),
    "probability a text": lambda: atas.random_erasing(torch.rand(2, *SHAPE), view_of(2), "0.5"),
    "crop larger than the image": lambda: atas.random_crop_view(torch.rand(2, *SHAPE), 12, of=8),
    "crop of a text": lambda: atas.random_crop_view(torch.rand(2, *SHAPE), 8, of="9"),
    # Attacks
    "attack a function": lambda: attack(model=lambda x: x.flatten(1)[:, :4]),
    "attack without a threat": lambda: attack(threat=8 / 255),
    "attack by a name of a threat": lambda: attack("fgsm", threat="linf"),
    "attack on arrays": lambda: attack(x=np.zeros((N, *SHAPE), np.float32)),
    "attack on labels in a list": lambda: attack(y=[0] * N),
    "attack on double images": lambda: attack(x=torch.rand(N, *SHAPE, dtype=torch.float64)),
    "attack on images to 255": lambda: attack("fgsm", x=torch.rand(N, *SHAPE) * 255),
    "attack label out of range": lambda: attack("fgsm", y=torch.full((N,), 7)),
    "attack with too few labels": lambda: attack("autoattack", y=torch.zeros(2, dtype=torch.long)),
    "attack with no steps": lambda: attack(options={"steps": 0}),
    "attack with half a step": lambda: attack(options={"steps": 1.5}),
    "attack with steps in a text": lambda: attack(options={"steps": "10"}),
    "attack with a step size in a text": lambda: attack(options={"step_size": "2/255"}),
    "attack with a seed in a text": lambda: attack(options={"seed": "0"}),
    "attack with half a seed": lambda: attack("autoattack", options={"seed": 0.5}),
    "attack with float indices": lambda: attack(index=torch.arange(N).float()),
    "attack version": lambda: attack("autoattack", options={"version": "plus"}),
    "attack without a name": lambda: atas.attacks.create("pgd0"),
    "attack a number": lambda: atas.attacks.create(10),
    "queries a text": lambda: atas.attacks.Square(queries="5000"),
    "iterations a fraction": lambda: atas.attacks.FAB(iterations=1.5),
    "loss unknown": lambda: atas.attacks.APGD(loss="cw"),
    "loss a list": lambda: atas.attacks.APGD(loss=["ce"]),
    "restarts a text": lambda: atas.attacks.PGD(restarts="2"),
    # Models and data
    "unknown model": lambda: atas.models.create("resnet", 10),
    "model a number": lambda: atas.models.create(18, 10),
    "classes a text": lambda: atas.models.create("small-cnn", "10"),
    "one class": lambda: atas.models.create("small-cnn", 1),
    "mean of two": lambda: atas.models.create("small-cnn", 10, 3, mean=(0.5, 0.5)),
    "mean a text": lambda: atas.models.create("small-cnn", 10, mean="half"),
    "std zero": lambda: atas.models.create("small-cnn", 10, std=0.0),
    "std NaN": lambda: atas.models.create("small-cnn", 10, std=NAN),
    "data of texts": lambda: arrays(train_images=np.array([["a"]])),
    "data of three axes": lambda: arrays(train_images=np.zeros((4, 8, 8), np.uint8)),
    "data to 255 in floats": lambda: arrays(train_images=np.full((4, 8, 8, 1), 255.0)),
    "data with NaN": lambda: arrays(train_images=np.full((4, 8, 8, 1), NAN)),
    "float labels of data": lambda: arrays(train_labels=[0.0, 1.0, 2.0, 0.0]),
    "too few labels of data": lambda: arrays(train_labels=[0, 1]),
    "labels from one": lambda: arrays(train_labels=[1, 2, 3, 1]),
    "labels None": lambda: arrays(train_labels=None),
    "images None": lambda: arrays(train_images=None),
    "ragged images": lambda: arrays(train_images=[[[1]], [[1, 2]]]),
    "classes a number": lambda: arrays(classes=3),
    "too few classes": lambda: arrays(classes=["a"]),
    "unknown data": lambda: atas.data.load("cifar"),
    # Evaluations
    "evaluate a function": lambda: evaluate(lambda x: x),
    "evaluate without labels": lambda: evaluate(network(), torch.rand(N, *SHAPE), None),
    "evaluate without a threat": lambda: evaluate(network(), torch.rand(N, *SHAPE), torch.arange(N) % 4, None),
    "evaluate with eps alone": lambda: evaluate(network(), torch.rand(N, *SHAPE), torch.arange(N) % 4, 8 / 255),
    "evaluate no images": lambda: evaluate(network(), torch.rand(0, *SHAPE), torch.arange(0)),
    "evaluate labels out of range": lambda: evaluate(network(), torch.rand(N, *SHAPE), torch.arange(N)),
    "evaluate images to 255": lambda: evaluate(network(), torch.rand(N, *SHAPE) * 255, torch.arange(N) % 4),
    "evaluate other shapes": lambda: evaluate(network(), torch.rand(N, 3, 9, 9), torch.arange(N) % 4),
    "evaluate texts": lambda: evaluate(network(), "images", torch.arange(N) % 4),
    "evaluate an unknown attack": lambda: evaluate(attacks=("pdg10",)),
    "evaluate attack numbers": lambda: evaluate(attacks=(10,)),
    "evaluate one attack number": lambda: evaluate(attacks=10),
    "evaluate no batch": lambda: evaluate(batch_size=0),
    "evaluate half a batch": lambda: evaluate(batch_size=2.5),
    "evaluate a seed in a text": lambda: evaluate(seed="0"),
    "evaluate an unknown device": lambda: evaluate(device="gpu"),
    "evaluate an unknown precision": lambda: evaluate(precision="half"),
    "evaluate a step size in a text": lambda: evaluate(attacks=("pgd2",), step_size="2/255"),
    "evaluate in a process group": lambda: evaluate(shard=True),
    "evaluate chunks of a text": lambda: evaluate(chunk_bytes="1GB"),
    # Trainings
    "train a function": lambda: train(model=lambda x: x),
    "train a frozen model": lambda: train(model=Frozen()),
    "train on tensors": lambda: train(data=torch.rand(N, *SHAPE)),
    "train an unknown recipe": lambda: train(recipe="cifar10"),
    "a method for more examples than there are": lambda: atas.ATAS(LINF, 10**30, SHAPE),
    "step without images": lambda: step(x=None),
    "step without indices": lambda: step(index=None),
    "perturb without indices": lambda: perturb(index=None),
    "a view with absurd padding": lambda: atas.random_view(torch.rand(N, *SHAPE), pad=10**30),
    "load data by a number": lambda: atas.data.load(-1),
    "load data by a dictionary": lambda: atas.data.load({}),
    "load data by a tensor": lambda: atas.data.load(torch.rand(2, 2)),
    "arrays without values": lambda: arrays(train_labels=torch.empty(4, device="meta")),
    "train no recipe": lambda: train(recipe=None),
    "train a recipe in a dictionary": lambda: train(recipe={"method": "atas"}),
    "train an unknown key": lambda: train(values={"training.epoch": 1}),
    "train a wrong value": lambda: train(values={"training.epochs": "many"}),
    "train values in a list": lambda: train(values=["training.epochs=1"]),
    "train keys that are numbers": lambda: train(values={1: 2}),
    "train a seed in a text": lambda: train(seed="zero"),
    "train half a seed": lambda: train(seed=0.5),
    "train rows of floats": lambda: train(rows=torch.rand(4)),
    "train rows in a list of texts": lambda: train(rows=["a"]),
    "train rows out of range": lambda: train(rows=torch.tensor([0, 1000])),
    "train no rows": lambda: train(rows=torch.zeros(0, dtype=torch.long)),
    "train with loggers that are not": lambda: train(loggers=["tensorboard"]),
    "train with observers that are not": lambda: train(observers=["mine"]),
    "train into a number": lambda: train(out=3),
    "train a device": lambda: train(values={"engine.device": "gpu"}),
}


def lazy_tuple():
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x.flatten(1)), x

    return Pair(192, 4)


@pytest.mark.parametrize("misuse", MISUSES)
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_a_mistake_gives_a_sentence(misuse, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AtasError) as caught:
        MISUSES[misuse]()
    said = str(caught.value)
    assert "\n" not in said
    assert 10 < len(said) < 400
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["standard", "fgsm", "pgd", "trades", "fgsm-ga"])
def test_methods_without_rows_take_an_example_twice(name):
    assert step(name, index=doubled()).loss.isfinite()


def test_numbers_of_numpy_are_numbers():
    method = make(c=np.float32(1.28), reset_every=np.int64(3), seed=np.int64(5), clip=[0.01, 0.06])
    method.perturb(network(), *batch())
    assert type(method.seed) is int
