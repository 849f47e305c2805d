"""Compare variants of a recipe by robust accuracy on held-out training images, and by the seconds of their training.

    python benchmarks/record.py benchmarks/record.toml --out runs/record          # run what is missing, print the table
    python benchmarks/record.py benchmarks/record.toml --out runs/record --only base share-0.7
    python benchmarks/record.py benchmarks/record.toml --out runs/record --table  # print the table alone
    python benchmarks/record.py benchmarks/record-test.toml --out runs/record  # the chosen recipes on the test images

The file lists variants of a recipe. `recipe`, `held_out`, `seeds` and `[values]` at the top are for all of them:

    recipe = "cifar10-preact-resnet18-plus-30s"
    held_out = 5000
    seeds = [0]

    [[variants]]
    name = "base"

    [[variants]]
    name = "share-0.7"
    values = { "method.share" = 0.7 }

    [[variants]]
    name = "eps-9"
    values = { "method.eps" = 0.0353 }
    judged_at = 0.03137  # eps of the attacks, if not that of the training

Every training leaves out the same `held_out` training images; the test set is not used. On them, the final weights and
every further average of `training.ema` are attacked by PGD-50, and by APGD-CE and then APGD-T on what is left, which is
AutoAttack up to a few examples in ten thousand. `margin` is the mean over all images of the smallest logit margin that
20 gradient steps on the margin find: it varies less between runs than a share of images, but scales with the logits.

With `held_out = 0` the models are judged on all test images instead, by `attacks` (PGD and AutoAttack) or those of
`--attacks`; that is for the chosen recipes, once. Trainings are timed if nothing else uses the GPU, so train with a
cheap attack first, and let several processes add AutoAttack afterwards.

Each finished run is a file in runs/ of the output folder, with the verdict on every example; runs that exist are not
repeated. Differences to the first variant are paired by example, with 95% intervals.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from atas import threat as threats
from atas.attacks.apgd import APGD
from atas.attacks.auto_attack import AttackEnsemble
from atas.attacks.losses import margin
from atas.core.autograd import freeze, input_gradient
from atas.data import Split
from atas.errors import AtasError, UsageError
from atas.evaluation import evaluate
from atas.evaluation.intervals import paired_difference
from atas.models.weights import load_weights
from atas.sweeps import Measurement, Plan, PlanProgress, Store, Trial
from atas.sweeps.execute import held_out_as_test
from atas.sweeps.plan import Failure
from atas.sweeps.trial import FinishedTraining
from atas.threat import Threat
from atas.training.data import eval_view
from atas.training.run import RunFolder

ENSEMBLE = AttackEnsemble("apgd", (APGD(loss="ce"), APGD(loss="t")))
ATTACKS = "clean", "pgd50", "apgd"
TEST_ATTACKS = "pgd10", "pgd50", "autoattack"
FINAL = "final"
STEPS, BATCH = 20, 500


@dataclass(frozen=True)
class HeldOut(Measurement):
    """Verdicts on the held-out images, and the mean margin, of all weights that a training ends with."""

    name: ClassVar[str] = "held-out"
    eps: float | None = None  # of the attacks, if not that of the training

    def is_available(self, trial: Trial, run_folder: RunFolder) -> bool:
        """Return whether the weights of all averages exist."""
        return all(run_folder.average(decay).exists() for decay in trial.resolved_recipe.training.ema_decays[1:])

    def measure(self, training: FinishedTraining) -> dict[str, Any]:
        """Return the figures of each model by its name: `final`, or the decay of a further average."""
        recipe, folder = training.trial.resolved_recipe, training.run_folder
        models = {FINAL: training.model}
        for decay in recipe.training.ema_decays[1:]:
            models[f"{decay:g}"] = load_weights(folder.average(decay)).to(training.device)
        images = eval_view(held_out_as_test(training.data, training.trial.held_out), recipe.data).test
        threat = recipe.threat if self.eps is None else threats.create(recipe.method.norm, self.eps)
        return {"models": {name: self._figures(model, images, threat) for name, model in models.items()}}

    def _figures(self, model: nn.Module, images: Split, threat: Threat) -> dict[str, Any]:
        result = evaluate(model, images, threat=threat, attacks=("pgd50", ENSEMBLE), details=False)
        return {
            "accuracy": {name: result.accuracy[name] for name in ATTACKS},
            "correct": {name: "".join("01"[int(one)] for one in result.correct[name]) for name in ATTACKS},
            "margin": float(smallest_margins(model.eval(), images, threat).mean()),
            "seconds": sum(result.seconds[name] for name in ATTACKS),
            "warnings": [str(warning) for warning in result.warnings],
        }


def smallest_margins(model: nn.Module, images: Split, threat: Threat) -> Tensor:
    """Return the smallest margin of each image that gradient steps on the margin find from the image itself."""
    device, found = next(model.parameters()).device, []

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return -margin(logits, y).sum()

    for first in range(0, len(images), BATCH):
        part = slice(first, first + BATCH)
        x, y = images.images[part].to(device).float() / 255, images.labels[part].to(device)
        point, smallest = x, torch.full(y.shape, torch.inf, device=device)
        with freeze(model):
            for number in range(STEPS):
                gradient, logits = input_gradient(model, point, y, loss)
                smallest = smallest.minimum(margin(logits, y))
                point = threat.ascend(point, gradient, threat.eps / 2 * (1 - number / STEPS), x)
            with torch.no_grad():
                found.append(smallest.minimum(margin(model(point), y)).cpu())
    return torch.cat(found)


def read(path: Path, attacks: Sequence[str] = (), seeds: Sequence[int] = ()) -> dict[str, list[Trial]]:
    """Return the trials of each variant, one per seed; `attacks` and `seeds` replace those of the file."""
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    variants = document.get("variants", [])
    names = [variant["name"] for variant in variants]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"{path} must list [[variants]], each with a name of its own")
    held_out = document.get("held_out", 5000)
    if not held_out:
        judged: dict[str, Any] = {"attacks": tuple(attacks or document.get("attacks", TEST_ATTACKS))}
    else:
        judged = {"attacks": (), "held_out": held_out}
    return {
        variant["name"]: [
            Trial(
                variant.get("recipe", document.get("recipe")),
                document.get("values", {}) | variant.get("values", {}),
                seed,
                **judged | ({"measurements": (HeldOut(variant.get("judged_at")),)} if held_out else {}),
            )
            for seed in seeds or variant.get("seeds", document.get("seeds", [0]))
        ]
        for variant in variants
    }


def table(variants: dict[str, list[Trial]], store: Store) -> str:
    """Return the results so far, one line per run and model."""
    if not next(iter(variants.values()))[0].held_out:
        return test_table(variants, store)
    lines = [
        f"{'variant':28} {'seed':>4} {'model':>7} {'seconds':>8} {'clean':>6} {'pgd50':>6} {'apgd':>6} {'margin':>7}"
    ]
    lines[0] += "   apgd to the first, 95% interval"
    base = next(iter(variants.values()))
    for name, trials in variants.items():
        for number, trial in enumerate(trials):
            found, first = _measured(trial, store), _measured(base[number], store) if number < len(base) else None
            record = store.record(trial)
            if found is None or record is None:
                lines.append(f"{name:28} {trial.seed:4} not done")
                continue
            for model, figures in found.items():
                accuracy = [f"{100 * figures['accuracy'][attack]:6.2f}" for attack in ATTACKS]
                seconds = "shared" if record.seconds is None else f"{record.seconds:.1f}"
                line = f"{name:28} {trial.seed:4} {model:>7} {seconds:>8} {' '.join(accuracy)} {figures['margin']:7.3f}"
                if first is not None and figures is not first.get(FINAL):
                    line += f"   {_difference(figures, first[FINAL])}"
                lines.append(line)
    return "\n".join(lines)


def test_table(variants: dict[str, list[Trial]], store: Store) -> str:
    """Return the results on the test images so far, one line per run."""
    names = list(dict.fromkeys(("clean", *next(iter(variants.values()))[0].attacks)))
    lines = [f"{'variant':28} {'seed':>4} {'seconds':>8} {' '.join(f'{name:>10}' for name in names)}"]
    for name, trials in variants.items():
        for trial in trials:
            record = store.record(trial)
            if record is None:
                lines.append(f"{name:28} {trial.seed:4} not done")
                continue
            seconds = "shared" if record.seconds is None else f"{record.seconds:.1f}"
            found = [record.attacks.get(attack) for attack in names]
            figures = [f"{'':>10}" if each is None else f"{100 * each['accuracy']:10.2f}" for each in found]
            lines.append(f"{name:28} {trial.seed:4} {seconds:>8} {' '.join(figures)}")
    return "\n".join(lines)


def _measured(trial: Trial, store: Store) -> dict[str, Any] | None:
    record = store.record(trial)
    entry = None if record is None else trial.measurements[0].find(record)
    return None if entry is None else entry["models"]


def _difference(figures: dict[str, Any], first: dict[str, Any]) -> str:
    own, other = (torch.tensor([one == "1" for one in each["correct"]["apgd"]]) for each in (figures, first))
    low, high = paired_difference(own, other)
    return f"{100 * float(own.double().mean() - other.double().mean()):+6.2f} [{100 * low:+.2f}, {100 * high:+.2f}]"


def main() -> int:
    """Run what is missing, print the table after each run, and return the exit status: 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", type=Path, help="TOML file of variants")
    parser.add_argument("--out", type=Path, default=Path("runs/record"), help="folder of the runs")
    parser.add_argument(
        "--only", nargs="+", help="run these variants alone; the first is still what others differ from"
    )
    parser.add_argument("--attacks", nargs="+", help="of an evaluation on test images, instead of those of the file")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of those of the file")
    parser.add_argument("--table", action="store_true", help="run nothing")
    chosen = parser.parse_args()
    variants = read(chosen.variants, chosen.attacks or (), chosen.seeds or ())
    store = Store(chosen.out)
    if unknown := set(chosen.only or ()) - set(variants):
        parser.error(f"no variant is called {', '.join(sorted(unknown))}")
    failures: list[Failure] = []
    if not chosen.table:
        trials = [
            trial for name, group in variants.items() if not chosen.only or name in chosen.only for trial in group
        ]
        failures = Plan(trials, store).run(PlanProgress(), lambda _: print(table(variants, store), flush=True))
    print(table(variants, store))
    for failure in failures:
        print(f"failed: {failure.trial.label}: {failure.sentence}")
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AtasError as error:  # also a stop by Ctrl-C, which says how to continue
        sys.exit(f"record.py: {error}")
