"""Rules across the keys of a recipe, checked before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atas import attacks, methods, threat
from atas.errors import UsageError, unknown

if TYPE_CHECKING:
    from atas.recipes.schema import DataConfig, Recipe

VIEWS = ("pad", "crop", "resized")
_MAX_EPOCHS = 100_000  # the rate of every update is kept on the device


def check(recipe: Recipe) -> None:
    """An error, in one sentence, for values that cannot be meant."""

    def demand(holds: bool, sentence: str) -> None:
        if not holds:
            raise UsageError(sentence)

    def choice(key: str, value: str, *allowed: str) -> None:
        if value not in allowed:
            raise unknown(f"value of {key}", value, allowed)

    training, schedule, optimizer = recipe.training, recipe.schedule, recipe.optimizer
    methods.get(recipe.method.name)
    threat.create(recipe.method.norm, recipe.method.eps)
    choice("data.loading", recipe.data.loading, "auto", "resident", "streaming")
    choice("schedule.name", schedule.name, "piecewise", "cyclic")
    choice("training.on_collapse", training.on_collapse, "warn", "stop", "rollback")
    for logger in training.loggers:
        choice("training.loggers", logger, "tensorboard", "wandb")
    choice("engine.kind", recipe.engine.kind, "auto", "eager", "captured")
    choice("engine.precision", recipe.engine.precision, "auto", "bf16", "float32")
    demand(training.epochs >= 1, f"training.epochs must be at least 1; got {training.epochs}")
    demand(training.epochs <= _MAX_EPOCHS, f"training.epochs must be at most {_MAX_EPOCHS:,}; got {training.epochs}")
    demand(training.batch_size >= 1, f"training.batch_size must be at least 1; got {training.batch_size}")
    demand(0 <= training.ema < 1, f"training.ema must be in [0, 1), such as 0.999; got {training.ema}")
    demand(-(2**63) <= training.seed < 2**63, f"training.seed must fit 64 bits; got {training.seed}")
    demand(training.probe >= 1, f"training.probe must be at least 1 image; got {training.probe}")
    demand(training.checkpoint_every >= 0, "training.checkpoint_every must not be negative")
    demand(recipe.data.workers is None or recipe.data.workers >= 1, "data.workers must be at least 1, or left out")
    shards = recipe.data.shards or 1
    demand(shards >= 1 and recipe.data.shards != 0, f"data.shards must be at least 1; got {recipe.data.shards}")
    demand(
        training.batch_size % shards == 0,
        f"training.batch_size must be a multiple of data.shards, as every shard gives as many examples to a batch; "
        f"got {training.batch_size} and {shards}",
    )
    demand(recipe.data.pad >= 0, f"data.pad must not be negative; got {recipe.data.pad}")
    check_views(recipe)
    demand(schedule.peak > 0, f"schedule.peak must be above zero; got {schedule.peak}")
    demand(0 < schedule.peak_at < 1, f"schedule.peak_at is a share of the training in (0, 1); got {schedule.peak_at}")
    if schedule.peak_momentum is not None:
        demand(
            0 <= schedule.peak_momentum < 1, f"schedule.peak_momentum must be in [0, 1); got {schedule.peak_momentum}"
        )
    for milestone in schedule.milestones:
        demand(0 < milestone <= 1, f"schedule.milestones are shares of the training such as 24/30; got {milestone}")
    demand(0 < schedule.factor <= 1, f"schedule.factor must be in (0, 1]; got {schedule.factor}")
    for key, number in (("examples", recipe.evaluation.examples), ("batch_size", recipe.evaluation.batch_size)):
        demand(number is None or number >= 1, f"evaluation.{key} must be at least 1; got {number}")
    for attack in recipe.evaluation.attacks:
        attacks.create(attack)
    demand(0 <= optimizer.momentum < 1, f"optimizer.momentum must be in [0, 1); got {optimizer.momentum}")
    demand(optimizer.weight_decay >= 0, f"optimizer.weight_decay must not be negative; got {optimizer.weight_decay}")


def check_views(recipe: Recipe) -> None:
    """An error for settings that contradict each other."""
    data, size = recipe.data, recipe.data.eval_resolution
    if data.view not in VIEWS:
        raise unknown("value of data.view", data.view, VIEWS)
    if size is None:
        for key in ("view_size", "view_start", "view_ramp", "view_scale"):
            if getattr(data, key) is not None:
                raise UsageError(f"data.{key} is for data.view = crop or resized; set one of them, or leave it out")
        return
    if size < 1 or (data.size is not None and size > data.size):
        stored = "" if data.size is None else f" and at most the {data.size} of data.size"
        raise UsageError(f"data.view_size must be at least 1 pixel{stored}; got {size}")
    _check_ramp(data, size)
    if data.view_scale is not None and (data.view == "crop" or not 0 < data.view_scale[0] <= data.view_scale[1] <= 1):
        raise UsageError(
            f"data.view_scale is for data.view = resized, the (smallest, largest) share of an image in (0, 1]; got "
            f"{data.view_scale} for {data.view}"
        )
    name, hyperparameters = recipe.method.name, recipe.method.settings
    if "grid" in methods.settings(name) and hyperparameters.get("grid") is None:
        raise UsageError(
            f"with data.view = {data.view} no image is shown as it is stored, so method {name} cannot remember every "
            f"pixel; set method.grid = 32"
        )
    if methods.get(name) is methods.Free and data.view_start is not None:
        raise UsageError(
            "free training carries perturbations of one size from batch to batch; leave out data.view_start"
        )


def _check_ramp(data: DataConfig, size: int) -> None:
    if (data.view_start is None) != (data.view_ramp is None):
        raise UsageError("data.view_start and data.view_ramp belong together; set both, or leave both out")
    if data.view_start is not None and not 1 <= data.view_start < size:
        raise UsageError(f"data.view_start must be at least 1 pixel and below {size}; got {data.view_start}")
    if data.view_ramp is not None and not 0 < data.view_ramp <= 1:
        raise UsageError(f"data.view_ramp is a share of the training in (0, 1]; got {data.view_ramp}")
