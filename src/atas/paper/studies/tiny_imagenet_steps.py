"""ATAS with other c and gamma/c on Tiny-ImageNet-200, judged on held-out training images.

The constants of the paper were set on CIFAR. With constants that do not fit the gradient norms of the data, every step
ends at the same end of the clip, and nothing adapts. `c` is that of the summed loss; steps are not clipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from atas.paper.figure_study import format_step
from atas.paper.grid import QUICK_EPS
from atas.paper.measurements import Norms
from atas.paper.studies.table_tiny_imagenet import BUDGETS, NETWORKS
from atas.paper.study import Page, StudyOptions, TrainingStudy, select, select_budgets
from atas.sweeps import markdown
from atas.sweeps.record import Record, summarize_seeds
from atas.sweeps.store import Store
from atas.sweeps.trial import Trial, format_eps

_ATTACK = "pgd10"
_SCALES = (0.32, 1.28, 5.12)
_MAX_STEPS = (2.0, 3.0)  # gamma/c in units of eps
_HELD_OUT, _QUICK_HELD_OUT = 5000, 300
_QUICK_NETWORK = "small-cnn"
_QUICK_VALUES = {"training.epochs": 10}


class StepConstants(TrainingStudy):
    """A training of ATAS for each c and gamma/c, without some training images on which it is judged."""

    accepted_options = ("networks", "eps", "seeds", "examples", "values", "reuse")

    def trials(self, options: StudyOptions) -> list[Trial]:
        """Return every pair of constants for each selected network and budget."""
        cells = itertools.product(options.seeds or (0,), self._cells(options))
        return [self._trial(options, *cell, seed) for seed, cell in cells]

    def page(self, options: StudyOptions, store: Store) -> Page:
        """Return a page with a row for each pair: accuracy on the held-out images, and the mean step."""
        known, errors = store.by_row(), store.errors_by_row()
        rows, content, shown, failed = [], [], [], []
        for network, eps, c, factor in self._cells(options):
            row = self._trial(options, network, eps, c, factor, 0).row
            records = known.get(row, [])
            shown += records
            failed += errors.get(row, [])
            ours, step = summarize_seeds(records, _ATTACK), _mean_step(records)
            label, mean = f"{network}, {format_eps(eps)}", "-" if step is None else format_step(step, eps)
            rows.append(
                [label, f"{c:g}", f"{factor:g} eps", str(ours or "-"), mean, markdown.format_training_time(records)]
            )
            content.append(
                {
                    "network": network,
                    "eps": format_eps(eps),
                    "c": c,
                    "max_step_in_eps": factor,
                    _ATTACK: None if ours is None else ours.to_json(),
                    "mean_step": step,
                    "runs": [record.key for record in records],
                }
            )
        header = ["network, eps", "c", "gamma/c", "PGD-10, held out, %", "mean step", "time"]
        count = _QUICK_HELD_OUT if options.quick else _HELD_OUT
        return self.build_page(
            options,
            title="ATAS with other constants, on held-out images",
            preface=[
                f"PGD-10 accuracy in percent on {count:,} training images that were held out. [a, b] is the 95% "
                "interval of one run over them, (a to b) the range over seeds. Steps are not clipped; the mean step is "
                "over all images and the epochs after the warm-up. c is that of the summed loss.",
                markdown.overrides_sentence(options.values),
            ],
            body=["", *markdown.table(header, rows, left=3)],
            rows=content,
            records=shown,
            errors=failed,
        )

    def _cells(self, options: StudyOptions) -> list[tuple[str, float, float, float]]:
        """Return network, budget, c and gamma/c in units of eps, by default of the first network at all budgets."""
        networks, budgets = ((_QUICK_NETWORK,), (QUICK_EPS,)) if options.quick else (NETWORKS, BUDGETS)
        return list(
            itertools.product(
                select("network", options.networks or networks[:1], networks),
                select_budgets(options.eps, budgets),
                _SCALES,
                _MAX_STEPS,
            )
        )

    def _trial(self, options: StudyOptions, network: str, eps: float, c: float, factor: float, seed: int) -> Trial:
        name = "digits-small-cnn-atas" if options.quick else f"tinyimagenet-{network}-atas"
        values: dict[str, Any] = {
            **(_QUICK_VALUES if options.quick else {}),
            "method.eps": eps,
            "method.c": c,
            "method.max_step": factor * eps,
            "method.clip": "none",
            **options.values,
        }
        held_out = _QUICK_HELD_OUT if options.quick else _HELD_OUT
        return Trial(name, values, seed, (_ATTACK,), 0, options.examples, held_out, measurements=(Norms(),))


def _mean_step(records: Sequence[Record]) -> float | None:
    """Return the mean step in pixel units over all records, or None without one."""
    steps = [record.observed[Norms.name]["average"]["step_size"] for record in records if Norms.name in record.observed]
    return sum(steps) / len(steps) if steps else None


STUDY = StepConstants(
    "tiny-imagenet-steps",
    "ATAS on Tiny-ImageNet-200 with other c and gamma/c by PGD-10 on held-out training images",
)
