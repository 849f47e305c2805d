"""`robustify()`: choose settings, train, evaluate, and give a verdict, in a given time.

What can be measured is not guessed: a training step, the monitor, a checkpoint and a query of an attack are tried on
this machine before the number of epochs is chosen. The trained model is attacked for a moment before the number of test
images is chosen.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atas import recipes
from atas._utils.files import write_text
from atas._utils.formatting import format_seconds, shell_quote
from atas._utils.system import available_cpus
from atas.autotrain import settings
from atas.autotrain.inputs import Inputs, open_inputs, sample
from atas.autotrain.plan import (
    ATTACKS,
    MIN_EPOCHS,
    MIN_EVALUATED,
    Costs,
    TrainingPlan,
    affordable,
    choose_attacks,
    larger_side,
    plan_training,
    takes_too_long,
)
from atas.autotrain.result import AutoTrainResult, Findings
from atas.autotrain.settings import Network, Task
from atas.autotrain.timing import (
    TRIED,
    TRIED_WORK,
    TrainingCosts,
    attack_work,
    measure_forward,
    measure_query,
    measure_training,
    seconds_of_query,
)
from atas.core.arguments import check_arguments, describe
from atas.core.validation import check_module
from atas.data import Dataset, Split, display_name
from atas.distributed.world import init, select_device
from atas.errors import UsageError
from atas.evaluation import Evaluation, evaluate
from atas.evaluation.progress import EvaluationProgress
from atas.recipes import Recipe
from atas.report.formatting import describe_threat, join_names
from atas.threat import Linf
from atas.training import Run, TrainingProgress
from atas.training import train as run_training
from atas.training.build import build_model, split_rows
from atas.training.data import eval_view
from atas.training.job import check_folder, default_folder
from atas.training.monitor_budget import resolve_probe
from atas.training.run import RunFolder
from atas.training.trainer import Interrupted

_SAMPLE_BATCHES = 8  # of training images, to try steps on
_SAMPLE_IMAGES = 256  # at least
_TRIED_IMAGES, _LEAST_TRIED = 200, 32  # test images of a first attack
_TRIAL_SHARE = 0.02  # of the time, for each trial
_LONGEST_TRIAL = 10.0  # seconds
_FAR, _TOLERATED = 3, 300.0  # a training may take three times the time, or the time and 300 seconds
_DEEP = 10  # layers
_ENDING = 1.0  # seconds for weights, training examples and files after the last epoch
_NO_VALUES = {
    "data.name": "pass the data itself",
    "method.name": "it is by atas-plus; for another method, train by a recipe",
    "method.norm": "it is for linf; for another norm, train by a recipe",
    "method.eps": "pass eps",
    "model.weights": "pass the model with these weights, such as atas.load(...)",
    "training.seed": "pass seed",
    "evaluation.attacks": "they follow the time; for others, run atas evaluate afterwards",
    "evaluation.examples": "they follow the time; for all, run atas evaluate afterwards",
}
_DETAILS_QUERIES = 6000  # for the loss landscapes of an evaluation


@check_arguments
def robustify(
    model: nn.Module | str | None,
    train: Any,
    test: Any = None,
    *,
    eps: float = 8 / 255,
    minutes: float = 10.0,
    out: str | Path | None = None,
    seed: int = 0,
    values: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    live: TrainingProgress | None = None,
) -> AutoTrainResult:
    """Train a robust classifier in a given time, with settings chosen from the data, and judge it.

    Settings of `atas-plus` follow the number, size and kind of the images. A training step and an attack are timed on
    this machine; then training and evaluation fill the `minutes`. What was chosen, and why, is printed before the
    training. Returns the model and an honest verdict.

    Args:
        model: a module, which is not changed: its weights are the start, with a lower learning rate if they are
            trained; a name of `atas.models.names()` or `timm:NAME`; or None to choose a network by the images.
        train: training images: a torch dataset, a pair (x, y) of arrays or an `atas.data.Split`; or the name or path
            of data, a Dataset or a pair (train, test), which have the test images too.
        test: test images, in the same form. Without any, a tenth of the training images is held out.
        eps: the budget of the attacks, the largest change of a pixel in [0, 1], such as 4/255.
        minutes: the time for everything.
        out: the folder of the run, by default `runs/<data>-<network>-auto`.
        seed: seed of the training, and of the images to hold out.
        values: keys of the recipe to set instead of choosing them, such as `{"data.flip": False}`.
        overwrite: replace an earlier run in the folder.
        live: the progress display.

    >>> result = robustify(None, "digits", eps=0.1, minutes=1)  # doctest: +SKIP
    >>> result.verdict  # doctest: +SKIP
    """
    began = time.perf_counter()
    values = dict(values or {})
    _check(model, eps, minutes, values)
    model = values.get("model.name") if model is None else model
    with init() as world:
        if world.size > 1:
            raise UsageError("robustify trains in one process; start it without torchrun, or train by a recipe")
    values["training.seed"] = seed
    progress = live or TrainingProgress()
    if out is not None:
        check_folder(RunFolder(Path(out)), Recipe(), resume=False, overwrite=overwrite)
    inputs = open_inputs(train, test, values, seed, progress.data_loading)
    job = _Job(model, inputs, eps, 60 * minutes, began, seed, values, progress)
    chosen = job.choose()
    job.check_time(chosen)
    folder = Path(out) if out is not None else default_folder(chosen.recipe.name)
    check_folder(RunFolder(folder), chosen.recipe, resume=False, overwrite=overwrite)
    choices = tuple(job.describe(chosen, minutes))
    for line in choices:
        progress.log(line)
    run = run_training(
        chosen.recipe,
        out=folder,
        overwrite=overwrite,
        model=copy.deepcopy(model) if isinstance(model, nn.Module) else None,
        data=chosen.inputs.dataset if chosen.inputs.given else None,
        live=progress,
    )
    try:
        findings = job.evaluate(chosen, run)
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted; the model is trained, evaluate it with: atas evaluate {shell_quote(run.folder)}"
        ) from None
    return AutoTrainResult(run, findings.evaluation, findings.verdict(), choices)


def _check(model: object, eps: float, minutes: float, values: Mapping[str, Any]) -> None:
    """Raise UsageError for arguments that are out of bounds or contradict each other."""
    if isinstance(model, nn.Module):
        check_module(model, trains=True, bare=True)
    elif model is not None and not isinstance(model, str):
        raise UsageError(f"model must be a module, the name of a network, or None to choose one; got {describe(model)}")
    for name, value in (("eps", eps), ("minutes", minutes)):
        if not 0 < value < math.inf:
            raise UsageError(f"{name} must be above zero; got {value:g}")
    for key, remedy in _NO_VALUES.items():
        if key in values:
            raise UsageError(f"{key} cannot be set for an automatic training: {remedy}")
    if model is not None and "model.name" in values:
        raise UsageError("model and model.name are two networks; leave one of them out")


@dataclass(frozen=True)
class _Choice:
    """A network and what was chosen for it. `tried` are test images for a first attack; `before` is the result of that
    attack on a given model, None if its weights are not trained."""

    inputs: Inputs
    recipe: Recipe
    costs: Costs
    plan: TrainingPlan
    images: int
    """Training images, without those of the monitor."""
    tried: Split
    before: Evaluation | None = None

    @property
    def steps(self) -> int:
        """The steps of an epoch."""
        return -(-self.images // self.recipe.training.batch_size)


@dataclass(frozen=True)
class _Job:
    """One call: what was asked for, and since when."""

    model: nn.Module | str | None
    inputs: Inputs
    eps: float
    seconds: float
    began: float
    seed: int
    values: Mapping[str, Any]
    progress: TrainingProgress

    def elapsed(self) -> float:
        """Return the seconds since the call."""
        return time.perf_counter() - self.began

    def choose(self) -> _Choice:
        """Return the first network whose training fits into the time, or else the last. Photos are enlarged if there is
        time for it."""
        names = [self.model] if self.model is not None else settings.networks(self.inputs.dataset.shape)
        for name in names:
            choice = self._try(name, self.inputs, is_last=name is names[-1])
            if choice is not None and not choice.plan.too_short:
                break
        assert choice is not None
        side, original = self.inputs.dataset.shape[1], self.inputs.original_side
        if original is None:
            return choice
        epoch_seconds = choice.steps * choice.costs.step + choice.costs.epoch
        larger = larger_side(original, side, epoch_seconds, self.seconds)
        if larger == side:
            return choice
        inputs = self.inputs.resized(larger, self.seed)
        return self._try(self.model or settings.networks(inputs.dataset.shape)[0], inputs) or choice

    def _try(self, model: nn.Module | str, inputs: Inputs, *, is_last: bool = True) -> _Choice | None:
        """Measure the cost of a network and plan its training; return None if it is too slow and not the last."""
        dataset = inputs.dataset
        probed = resolve_probe(self._recipe(model, inputs, Network(), MIN_EPOCHS), len(dataset.train))
        monitored, rest = split_rows(probed, len(dataset.train), None)
        images, every = len(dataset.train if rest is None else rest), probed.training.probe_every or 1
        module = build_model(probed, dataset) if isinstance(model, str) else model
        device = select_device(probed.engine.device)
        test = sample(eval_view(dataset, probed.data).test, _TRIED_IMAGES, self.seed)
        forward = measure_forward(module, test, device)
        if not is_last and takes_too_long(forward, images, self.seconds):
            return None
        query = measure_query(module, test, device, forward, self._trial)
        test = self._affordable(test, forward)
        before = None if isinstance(model, str) else self._attack_given(module, test, device)
        network = Network(_normalises_batches(module), before is not None, _is_deep(module))
        recipe = self._recipe(model, inputs, network, MIN_EPOCHS, images)
        began = time.perf_counter()
        batch = recipe.training.batch_size
        train = sample(dataset.train, max(_SAMPLE_BATCHES * batch, _SAMPLE_IMAGES), self.seed)
        decoding = (time.perf_counter() - began) / len(train) / available_cpus() if inputs.original_side else 0.0
        measured = measure_training(recipe, Dataset(dataset.name, train, train), module, images, forward, self._trial)
        decoded = decoding * (len(dataset.train) + len(dataset.test))
        costs = self._costs(measured, query, len(monitored), every, decoded)
        work = _work(dataset)
        plan = plan_training(self.seconds, -(-images // batch), costs, len(dataset.test), work)
        recipe = self._recipe(model, inputs, network, plan.epochs, images)
        plan = dataclasses.replace(plan, epochs=recipe.training.epochs)  # the values may set another number
        return _Choice(inputs, recipe, costs, plan, images, test, before)

    def _recipe(
        self, model: nn.Module | str, inputs: Inputs, network: Network, epochs: int, images: int | None = None
    ) -> Recipe:
        """Return the recipe for this number of epochs; `images` is the number of images to train on, once known."""
        dataset = inputs.dataset
        task = Task(len(dataset.train), dataset.shape, inputs.grey, str(inputs.values.get("data.name", "")), self.eps)
        batch = self.values.get("training.batch_size", settings.batch_size(task.images))
        if images is not None and "training.batch_size" not in self.values:
            batch = settings.without_single(batch, images)
        steps = -(-(images or task.images) // batch)
        name = model if isinstance(model, str) else type(model).__name__
        chosen = {
            **settings.recipe_values(task, network, batch, epochs, steps),
            **inputs.values,
            **({"model.name": model} if isinstance(model, str) else {}),
            "evaluation.attacks": ATTACKS[0],
        }
        return recipes.from_dict({}, _recipe_name(inputs, name)).with_values({**chosen, **self.values})

    def _costs(self, measured: TrainingCosts, query: float, probe: int, every: int, decoding: float) -> Costs:
        epoch = (measured.probe * probe + measured.saving) / every
        fixed = self.elapsed() + decoding + measured.preparation + measured.saving + _ENDING + _DETAILS_QUERIES * query
        return Costs(measured.step, epoch, fixed, query)

    def _attack_given(self, model: nn.Module, images: Split, device: torch.device) -> Evaluation | None:
        """Attack a given model on a few images; return None if it is at chance, as with random weights."""
        result = self._attack(copy.deepcopy(model).to(device), images)
        return None if any(warning.kind == "chance" for warning in result.warnings) else result

    def _attack(self, model: nn.Module, images: Split) -> Evaluation:
        return evaluate(model, images, threat=self._threat, attacks=(TRIED,), details=False)

    def check_time(self, chosen: _Choice) -> None:
        """Raise UsageError if even the smallest training takes far longer than the time."""
        needed = chosen.plan.training_seconds
        if "training.epochs" not in self.values and needed > max(_FAR * self.seconds, self.seconds + _TOLERATED):
            raise UsageError(
                f"{MIN_EPOCHS} epochs of this data, the least that teach anything, take about "
                f"{format_seconds(needed)} here, and the time is {format_seconds(self.seconds)}; give more minutes, "
                f"fewer or smaller images, or training.epochs"
            )

    def describe(self, chosen: _Choice, minutes: float) -> Iterator[str]:
        """Yield one line for each choice: what was chosen and why."""
        recipe, inputs, plan, costs = chosen.recipe, chosen.inputs, chosen.plan, chosen.costs
        training, dataset = recipe.training, inputs.dataset
        shape = " x ".join(map(str, dataset.shape))
        held_out = "" if inputs.held_out is None else ", held out of the training images, as there were none"
        flips = "flips" if recipe.data.flip else "no flips" + (", as images are grey" if inputs.grey else "")
        yield (
            f"data: {len(dataset.train):,} training images of {shape} in {dataset.num_classes} classes, crops of "
            f"images padded by {recipe.data.pad}, {flips}; {len(dataset.test):,} test images{held_out}"
        )
        yield f"network: {self._describe_network(chosen)}"
        updates = "update" if chosen.steps == 1 else "updates"
        yield f"attacks: {describe_threat(recipe.threat)}, by {recipe.method.name} with step sizes that follow eps"
        yield (
            f"batch: {training.batch_size} images, {chosen.steps:,} {updates} in an epoch; learning rate up to "
            f"{recipe.schedule.peak:g}"
        )
        why = f"of {format_seconds(chosen.steps * costs.step + costs.epoch)} here, with {minutes:g} min for everything"
        if "training.epochs" in self.values:
            why += ", as you set"
        elif plan.too_short:
            why += f"; that is the least, which takes about {format_seconds(plan.training_seconds)}"
        elif plan.longest:
            why += "; that is the most that are of use"
        yield f"epochs: {training.epochs} {why}"
        yield (
            f"evaluation: about {format_seconds(plan.evaluation_seconds)}, for AutoAttack on as many test images as "
            f"fit, at least {min(MIN_EVALUATED, len(dataset.test))}, or else for weaker attacks"
        )

    def _describe_network(self, chosen: _Choice) -> str:
        name, side = chosen.recipe.model.name, min(chosen.inputs.dataset.shape[1:])
        if isinstance(self.model, str):
            return name
        if self.model is None:
            best = settings.networks(chosen.inputs.dataset.shape)[0]
            return f"{name}, for images of {side} pixels" + ("" if name == best else f"; {best} takes longer")
        given = f"yours, {type(self.model).__name__}"
        if chosen.before is None:
            return f"{given}; at chance before, so that it is trained as from random weights"
        clean = 100 * chosen.before.accuracy["clean"]
        rate = "" if "schedule.peak" in self.values else ", with a quarter of the usual learning rate"
        return f"{given}, right on {clean:.1f}% before; its weights are the start{rate}"

    def evaluate(self, chosen: _Choice, run: Run) -> Findings:
        """Evaluate a run on as many test images as the time allows, save the result, and collect what was found."""
        dataset, folder = eval_view(chosen.inputs.dataset, chosen.recipe.data), RunFolder(run.folder)
        tried = self._attack(run.model, chosen.tried)
        query = min(chosen.costs.query, seconds_of_query(tried))
        left = self.seconds - self.elapsed() - _DETAILS_QUERIES * query
        robust, tests = tried.accuracy["worst"], len(dataset.test)
        count, attacks = choose_attacks(left, self.seconds, query, robust, tests, _work(dataset))
        test = sample(dataset.test, count, self.seed)
        self.progress.log(f"evaluating on {count:,} of {len(dataset.test):,} test images: {join_names(list(attacks))}")
        console = self.progress.console
        with EvaluationProgress(quiet=console.quiet, console=console) as display:
            evaluation = evaluate(run.model, test, threat=self._threat, attacks=attacks, progress=display)
        write_text(folder.evaluation.with_suffix(".md"), evaluation.markdown())
        evaluation.save(folder.evaluation)
        return Findings(
            recipe=run.recipe,
            folder=run.folder,
            metrics=run.metrics,
            events=[row for row in folder.read_metrics() if "event" in row],
            evaluation=evaluation,
            most_frequent=int(test.labels.bincount().max()) / count,
            test_images=len(dataset.test),
            held_out=chosen.inputs.held_out,
            plan=chosen.plan,
            before=chosen.before,
            after=tried,
        )

    @property
    def _trial(self) -> float:
        """Seconds that a measurement may take."""
        return min(_TRIAL_SHARE * self.seconds, _LONGEST_TRIAL)

    def _affordable(self, images: Split, forward: float) -> Split:
        """Return as many of the images as PGD-10 can attack in the time of a measurement, stratified by class."""
        count = affordable(2 * self._trial, TRIED_WORK * forward, _LEAST_TRIED, len(images))
        return sample(images, count, self.seed)

    @property
    def _threat(self) -> Linf:
        return Linf(self.eps)


def _normalises_batches(model: nn.Module) -> bool:
    """Return whether a model has BatchNorm, without which a large learning rate diverges."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def _is_deep(model: nn.Module) -> bool:
    """Return whether a model has many layers with weights, as a ResNet-18 has."""
    layers = (module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear))
    return sum(1 for _ in layers) >= _DEEP


def _work(dataset: Dataset) -> list[float]:
    """Return the cost of each of the attacks to choose from."""
    return [attack_work(attacks, dataset.num_classes) for attacks in ATTACKS]


def _recipe_name(inputs: Inputs, network: str) -> str:
    """Return a name for the recipe, and the folder, such as digits-small-cnn-auto."""
    values = inputs.values
    data = display_name(values["data.name"], values.get("data.root")) if values else inputs.dataset.name
    return re.sub(r"[^\w.-]+", "-", f"{data}-{network.rpartition(':')[2]}-auto").strip(".-")
