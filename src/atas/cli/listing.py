"""The rows of `atas ls`: what there is, with descriptions and parameters, as plain values for tables and JSON."""

from __future__ import annotations

from typing import Any

import torch

from atas import attacks, data, methods, models, recipes
from atas.errors import AtasError
from atas.evaluation.runner import total_max_queries
from atas.models import published
from atas.recipes.expected import find_expected

Row = dict[str, Any]

_CLASSES = 10  # for which parameters and queries are counted
_ATTACKS = {
    "clean": "the images as they are; always included",
    "fgsm": "one step of eps along the sign of the gradient",
    "pgd10": "10 steps of eps/5 from a random start",
    "pgd50": "50 steps of eps/5 from a random start",
    "autoattack": "the standard for published figures: APGD-CE, APGD-T, FAB-T and Square one after another",
    "autoattack-rand": "AutoAttack for models with random outputs: APGD on averaged gradients",
    "apgd-ce": "Auto-PGD on the cross-entropy: 100 steps whose size adapts",
    "apgd-t": "Auto-PGD on the margin to each of nine other classes",
    "apgd-dlr": "Auto-PGD on the difference of logits ratio",
    "fab-t": "Fast Adaptive Boundary: the smallest perturbation to each of nine other classes",
    "square": "random squares of pixels; needs no gradient",
    "pgd<steps>[x<restarts>]": "PGD with any number of steps and restarts, such as pgd20 or pgd50x5",
}

_VARIANTS = {
    "preact-resnet18-ssat": "PreActResNet-18 as in the code of SSAT's authors.",
    "preact-resnet18-yopo": "PreActResNet-18 as in the code of YOPO's authors.",
    "preact-resnet18-gradalign": "PreActResNet-18 as in the code of GradAlign's authors.",
    "resnet18": "ResNet-18 (He et al., CVPR 2016) with ImageNet's stem, for photos.",
    "resnet50": "ResNet-50 (He et al., CVPR 2016) with ImageNet's stem, for photos.",
}


def _set(what: str, side: int, channels: int, classes: int, train: int, test: int, where: str) -> Row:
    shape = [channels, side, side]
    return {"what": what, "shape": shape, "classes": classes, "train": train, "test": test, "where": where}


_DATA: dict[str, Row] = {
    "digits": _set("handwritten digits", 8, 1, 10, 1297, 500, "built in"),
    "cifar10": _set("photos of objects", 32, 3, 10, 50_000, 10_000, "atas data get cifar10"),
    "cifar100": _set("photos of objects", 32, 3, 100, 50_000, 10_000, "atas data get cifar100"),
    "mnist": _set("handwritten digits", 28, 1, 10, 60_000, 10_000, "atas data get mnist"),
    "fashion-mnist": _set("pictures of clothes", 28, 1, 10, 60_000, 10_000, "atas data get fashion-mnist"),
    "svhn": _set("photos of house numbers", 32, 3, 10, 73_257, 26_032, "atas data get svhn"),
    "tiny-imagenet": _set("photos of objects", 64, 3, 200, 100_000, 10_000, "atas data get tiny-imagenet"),
    "imagefolder": {"what": "your own images", "where": "ROOT/train/CLASS/ and ROOT/test/CLASS/ (or val/)"},
    "packed": {"what": "your own images in a few large files", "where": "atas data pack FOLDER ROOT"},
}
_FORMS: dict[str, Row] = {
    "FOLDER": {"what": "images in class folders, .npy arrays, or a packed set", "where": "your own"},
    "FILE.npz": {"what": "arrays such as x_train, y_train, x_test, y_test", "where": "your own"},
    "hf:owner/name": {"what": "a data set of the Hugging Face hub", "where": "pip install 'atas[huggingface]'"},
    "package.module:function": {"what": "a function that returns data sets or arrays", "where": "your own"},
}


def overview() -> list[Row]:
    """Return what can be listed, with the number of entries and examples."""
    listed = {
        "methods": ("training methods", methods.names(), ["atas", "fgsm-rs", "trades"]),
        "models": ("networks", models.names(), ["preact-resnet18", "wrn-28-10"]),
        "data": ("data sets", data.names(), ["cifar10", "digits"]),
        "attacks": ("attacks of an evaluation", attacks.names(), ["pgd50", "autoattack"]),
        "recipes": ("complete trainings", recipes.names(), ["digits-small-cnn-atas"]),
        "weights": ("trained models", published.names(), ["hf:owner/name"]),
    }
    return [
        {"list": name, "what": what, "count": len(names), "examples": examples}
        for name, (what, names, examples) in listed.items()
    ]


def method_rows() -> list[Row]:
    """Return the training methods with their settings and defaults."""
    return [
        {
            "method": name,
            "what": _first_sentence(methods.get(name, trusted=False)),
            "attack in": f"{methods.get(name, trusted=False).attack_mode} mode",
            "settings": dict(methods.settings(name, trusted=False)),
        }
        for name in methods.names()
    ]


def model_rows() -> list[Row]:
    """Return the networks with their number of parameters, for 10 classes."""
    others = {"timm:NAME": "A network of timm, with its options.", "package.module:function": "A network of your own."}
    return [
        *map(_model, models.names()),
        *({"model": name, "what": what, "parameters": None} for name, what in others.items()),
    ]


def _model(name: str) -> Row:
    try:
        with torch.device("meta"):  # without memory for the weights
            model = models.create(name, _CLASSES, trusted=False)
    except (AtasError, ImportError, NotImplementedError):
        return {"model": name, "what": "", "parameters": None}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"model": name, "what": _VARIANTS.get(name) or _first_sentence(type(model)), "parameters": parameters}


def data_rows() -> list[Row]:
    """Return the data sets with their size, and where the images are from."""
    empty = dict.fromkeys(("what", "shape", "classes", "train", "test", "where"))
    rows = _DATA | _FORMS
    return [{"data": name, **empty, **rows.get(name, {})} for name in (*data.names(), *data.FORMS)]


def weights_rows() -> list[Row]:
    """Return the trained models that `atas.load` and `--weights` take by name."""
    found = [
        {"weights": name, "what": entry["what"], "megabytes": round(entry["bytes"] / 1e6, 1)}
        for name, entry in published.published().items()
    ]
    return [*found, {"weights": "hf:owner/name", "what": "A Hugging Face repository.", "megabytes": None}]


def attack_rows() -> list[Row]:
    """Return the attacks with the largest number of images that each passes through the model, for 10 classes."""
    return [
        {"attack": name, "what": _ATTACKS.get(name, ""), "norms": "linf,l2", "max_queries": _max_queries(name)}
        for name in attacks.names()
    ]


def _max_queries(name: str) -> int | None:
    if name == "clean":
        return 0
    return None if "<" in name else total_max_queries([attacks.create(name)], _CLASSES)


def recipe_rows() -> list[Row]:
    """Return the recipes with their accuracy under AutoAttack in percent, where it was measured."""
    return [_recipe(name) for name in recipes.names()]


def _recipe(name: str) -> Row:
    loaded = recipes.load(name)
    expected = find_expected(loaded)
    accuracy = expected.accuracy.get("autoattack") if expected else None
    return {
        "recipe": name,
        "data": loaded.data.name,
        "model": loaded.model.name,
        "method": loaded.method.name,
        "threat": repr(loaded.threat),
        "epochs": loaded.training.epochs,
        "AutoAttack": accuracy.mean if accuracy else None,
        "expect": expected.sentence if expected else None,
    }


def _first_sentence(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())
