"""Checks of a recipe before anything is loaded: bounds of single keys, and rules across keys.

Bounds are written beside the keys, in the annotations of the sections: `Annotated[float, Range("must be above zero",
gt=0)]`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from atas import attacks, methods, threat
from atas._utils.imports import is_timm
from atas.errors import UsageError, unknown

if TYPE_CHECKING:
    from atas.recipes.schema import DataConfig, Recipe


@dataclass(frozen=True)
class Range:
    """Limits of a number: above `gt`, at least `ge`, below `lt`, at most `le`; `text` says so to a user. A text such as
    "auto", where the key allows it, has no limits."""

    text: str
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def check(self, key: str, value: float | str) -> None:
        """Raise UsageError if the value is outside of the limits."""
        if isinstance(value, str):
            return
        above = (self.gt is None or value > self.gt) and (self.ge is None or value >= self.ge)
        below = (self.lt is None or value < self.lt) and (self.le is None or value <= self.le)
        if not (above and below):
            raise UsageError(f"{key} {self.text}; got {value}")


class OneOf:
    """The allowed values of a text."""

    def __init__(self, *allowed: str) -> None:
        self.allowed = allowed

    def check(self, key: str, value: str) -> None:
        """Raise UsageError with the nearest allowed value if this one is not allowed."""
        if value not in self.allowed:
            raise unknown(f"value of {key}", value, self.allowed)


class Device:
    """A device that trainings run on."""

    def check(self, key: str, value: str) -> None:
        """Raise UsageError unless the value is auto, cpu, cuda or a numbered one such as cuda:1."""
        if not re.fullmatch(r"auto|(cpu|cuda)(:\d+)?", value, re.ASCII):
            raise UsageError(f"{key}: there is no device '{value}'; use auto, cpu or cuda")


# Keys, what they have no effect without, and whether a recipe has that.
_NEEDS: tuple[tuple[str, str, Callable[[Recipe], object]], ...] = (
    ("data.view_size data.view_start data.view_ramp", "data.view = crop or resized", lambda r: _resizes(r.data)),
    ("data.view_scale", "data.view = resized", lambda r: r.data.view == "resized"),
    ("data.shift", "data.view = cropshift", lambda r: r.data.view == "cropshift"),
    ("data.erase", "data.view = pad or cropshift", lambda r: not _resizes(r.data)),
    ("data.erase_area", "data.erase", lambda r: r.data.erase),
    ("data.view_until", "data.view = cropshift or data.erase", lambda r: _moves(r.data)),
    ("model.weights_hash", "model.weights", lambda r: r.model.weights is not None),
    ("targets.noise", "targets.smoothing", lambda r: r.targets.smoothing),
    ("targets.decay targets.from_epoch", "targets.share", lambda r: r.targets.share),
    ("targets.teacher_temperature", "targets.teacher_share", lambda r: r.targets.teacher_share),
    ("consistency.distance consistency.ramp", "consistency.weight", lambda r: r.consistency.weight),
    ("consistency.through", "consistency.weight", lambda r: r.consistency.weight),
    ("optimizer.betas optimizer.eps", "optimizer.name = adamw", lambda r: r.optimizer.name == "adamw"),
    ("optimizer.matrix_rate", "optimizer.name = muon", lambda r: r.optimizer.name == "muon"),
    (
        "optimizer.momentum schedule.peak_momentum",
        "optimizer.name = sgd or muon",
        lambda r: r.optimizer.name != "adamw",
    ),
    ("optimizer.perturb_gamma optimizer.perturb_from", "optimizer.perturb", lambda r: r.optimizer.perturb),
    ("optimizer.perturb_depth_power", "optimizer.perturb", lambda r: r.optimizer.perturb),
    ("schedule.final", "schedule.name = cyclic or cosine", lambda r: r.schedule.name != "piecewise"),
    ("schedule.warmup", "schedule.name = piecewise or cosine", lambda r: r.schedule.name != "cyclic"),
    ("training.ema_warmup training.ema_batchnorm", "training.ema", lambda r: r.training.ema_decays),
)


def check(recipe: Recipe) -> None:
    """Raise UsageError, one sentence, for values that are out of bounds or contradict each other."""
    method = recipe.method_class
    threat.create(recipe.method.norm, recipe.method.eps)
    for section in dataclasses.fields(recipe):
        if dataclasses.is_dataclass(config := getattr(recipe, section.name)):
            check_bounds(section.name, config)
    if "\0" in (recipe.data.root or ""):
        raise UsageError(f"data.root cannot be the name of a folder: it has a zero byte; got {recipe.data.root!r}")
    for key in ("mean", "std"):
        if getattr(recipe.model, key) == ():
            raise UsageError(f"model.{key} must have one number, or one for each channel; got an empty list")
    _check_effects(recipe)
    _check_model(recipe)
    _check_optimizer(recipe)
    shards = recipe.data.shards or 1
    if recipe.training.batch_size % shards:
        raise UsageError(
            f"training.batch_size must be a multiple of data.shards, because every shard gives the same number "
            f"of examples to a batch; got {recipe.training.batch_size} and {shards}"
        )
    if recipe.optimizer.perturb is not None and method is not None:
        method.check_weight_perturbation(recipe.optimizer.perturb)
    check_views(recipe, method)
    check_loss(recipe, method)
    for attack in recipe.evaluation.attacks:
        attacks.create(attack)


def _check_effects(recipe: Recipe) -> None:
    """Raise UsageError for a key that has no effect because of another one; its default, and 0 for none, may stay."""
    for keys, needed, has_effect in _NEEDS:
        for key in keys.split():
            section, _, name = key.partition(".")
            config = getattr(recipe, section)
            value = getattr(config, name)
            if value and value != getattr(type(config)(), name) and not has_effect(recipe):
                raise UsageError(f"{key} has no effect without {needed}; set {needed}, or leave {name} out")


def unreached_epochs(recipe: Recipe) -> list[str]:
    """Return a sentence for each key that has no effect because its first epoch comes after the training."""
    epochs = recipe.training.epochs
    first = {
        "targets.from_epoch": recipe.targets.from_epoch if recipe.targets.share else 0,
        "optimizer.perturb_from": recipe.optimizer.perturb_from or 0,
    }
    return [
        f"{key} = {epoch} has no effect in {epochs} epochs, which are counted from 0"
        for key, epoch in first.items()
        if epoch >= epochs
    ]


def _resizes(data: DataConfig) -> bool:
    return data.eval_resolution is not None


def _moves(data: DataConfig) -> bool:
    return data.view == "cropshift" or bool(data.erase)


def _check_model(recipe: Recipe) -> None:
    model = recipe.model
    if model.pretrained and not is_timm(model.name):
        raise UsageError(
            f"model.pretrained is for networks of timm, such as timm:resnet50; set model.weights for {model.name}"
        )
    if model.pretrained and model.weights is not None:
        raise UsageError("model.pretrained and model.weights are two starts of a training; leave one of them out")
    if model.weights == "" or "\0" in (model.weights or ""):
        raise UsageError(f"model.weights must be the path of weights or of a run; got {model.weights!r}")


def _check_optimizer(recipe: Recipe) -> None:
    optimizer, schedule = recipe.optimizer, recipe.schedule
    sgd = optimizer.name == "sgd"
    if optimizer.nesterov and not (sgd and any((optimizer.momentum, schedule.peak_momentum))):
        need = "optimizer.momentum above zero" if sgd else "optimizer.name = sgd"
        raise UsageError(f"optimizer.nesterov needs {need}; set it, or leave nesterov out")


def check_loss(recipe: Recipe, method: type[methods.Method] | None) -> None:
    """Raise UsageError for keys of the loss and the averages that contradict each other or the method, if that is
    known."""
    training = recipe.training
    if recipe.consistency.weight and method is not None and not method.has_start:
        raise UsageError(
            f"consistency.weight is for methods whose attack begins at a start with known logits; leave it out with "
            f"method {recipe.method.name}"
        )
    targets = recipe.targets
    has_targets = targets.smoothing or targets.share or targets.teacher_share
    if method is not None and has_targets:
        _check_own(recipe, "targets", method.own_targets)
    if method is not None and recipe.consistency.weight:
        _check_own(recipe, "consistency", method.own_consistency)
    if targets.share and targets.teacher_share:
        raise UsageError("targets.share is for remembered predictions, targets.teacher_share for a teacher; set one")
    if targets.teacher_share and not training.ema_decays:
        raise UsageError("the teacher of targets.teacher_share is the average of the weights; set training.ema")
    if isinstance(training.ema, tuple) and (not all(training.ema) or len(set(training.ema)) < len(training.ema)):
        raise UsageError(f"training.ema must list decays above 0, each once; got {list(training.ema)}")
    if training.ema_warmup is not None and 0 < training.ema_warmup < 2:
        raise UsageError(f"training.ema_warmup must be at least 2, or 0 for none; got {training.ema_warmup}")
    reestimates = training.ema_batchnorm == "re-estimate"
    if reestimates and method is not None and not issubclass(method, methods.InputPerturbation):
        raise UsageError(
            f"method {recipe.method.name} has no inputs to re-estimate BatchNorm statistics at; leave out "
            f"training.ema_batchnorm"
        )


def _check_own(recipe: Recipe, section: str, settings: Sequence[str]) -> None:
    """Raise UsageError if a method makes what the section describes itself, from these settings."""
    if settings:
        keys = ", ".join(f"method.{key}" for key in settings)
        raise UsageError(f"method {recipe.method.name} has {section} of its own: set {keys}, and leave out [{section}]")


def check_bounds(section: str, config: Any) -> None:
    """Check every value of a section, and every element of a list, by the bounds in its annotation; None is allowed."""
    for name, bounds in _bounds(type(config)).items():  # type: ignore[arg-type]
        value = getattr(config, name)
        for element in value if isinstance(value, tuple) else (value,):
            for bound in bounds if element is not None else ():
                bound.check(f"{section}.{name}", element)


@functools.cache
def _bounds(kind: type) -> dict[str, tuple[Range | OneOf | Device, ...]]:
    """Return the bounds of each key of a section."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__ for name, hint in hints.items() if hasattr(hint, "__metadata__")}


def check_views(recipe: Recipe, method: type[methods.Method] | None) -> None:
    """Raise UsageError for keys of [data] that contradict each other or the method, if that is known."""
    data, size = recipe.data, recipe.data.eval_resolution
    _check_shift(recipe)
    if size is None:
        return
    if size < 1 or (data.size is not None and size > data.size):
        stored = "" if data.size is None else f" and at most the {data.size} of data.size"
        raise UsageError(f"data.view_size must be at least 1 pixel{stored}; got {size}")
    _check_ramp(data, size)
    _check_shares("data.view_scale", data.view_scale)
    name, hyperparameters = recipe.method.name, recipe.method.settings
    if method is None:
        return
    if "grid" in methods.settings(name, trusted=recipe.trusted) and hyperparameters.get("grid") is None:
        raise UsageError(
            f"with data.view = {data.view} views are resized, so method {name} cannot keep a perturbation for every "
            f"stored pixel; set method.grid = 32"
        )
    if hyperparameters.get("frame") == "image":
        raise UsageError(
            f"with data.view = {data.view} views are resized, so perturbations of stored pixels cannot follow them; "
            f"leave out method.frame"
        )
    if method.fixed_size and data.view_start is not None:
        raise UsageError(f"method {name} keeps perturbations of one size; leave out data.view_start")


def _check_shift(recipe: Recipe) -> None:
    _check_shares("data.erase_area", recipe.data.erase_area)
    if _moves(recipe.data) and recipe.method.settings.get("grid") is not None:
        raise UsageError(
            "perturbations on a grid cannot follow shifted boxes and erased pixels; leave out method.grid, or set "
            "data.view = pad and data.erase = 0"
        )


def _check_shares(key: str, shares: tuple[float, float] | None) -> None:
    if shares is not None and not 0 < shares[0] <= shares[1] <= 1:
        raise UsageError(f"{key} is the (smallest, largest) share of an image in (0, 1]; got {shares}")


def _check_ramp(data: DataConfig, size: int) -> None:
    if (data.view_start is None) != (data.view_ramp is None):
        raise UsageError("data.view_start and data.view_ramp belong together; set both, or leave both out")
    if data.view_start is not None and not 1 <= data.view_start < size:
        raise UsageError(f"data.view_start must be at least 1 pixel and below {size}; got {data.view_start}")
