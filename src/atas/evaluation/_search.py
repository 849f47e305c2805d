"""How searches are run: which model they search with, which one decides, in how many lanes, how steps are repeated.

This is the one place where these are chosen, from the model, its device and the precision that was asked for. Attacks
and results know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from atas.attacks._lanes import Logits, Search
from atas.attacks._queue import Examples, Ledger, Repeat, Trail, lanes_for, one_by_one, run
from atas.checks import checked_logits
from atas.errors import unknown
from atas.evaluation._model import dtype_of
from atas.evaluation._precision import full_precision
from atas.evaluation._probe import probed
from atas.passes import frozen, mode
from atas.threat import Threat

PRECISIONS = ("auto", "float32")
_LANES = {"cuda": 1024}
_LANES_ELSEWHERE = 256
_FEW = 16  # images to probe a model with
_EVERY = 5
_EVERY_ON_CUDA = 10
_LONG = 2_000_000  # passes from which on it pays to make things ready at length


@dataclass(frozen=True)
class Runner:
    """A model, made ready for searches."""

    judge: Logits
    """Decides: the model in full precision. It is differentiable too."""
    logits: Logits
    """Searches: the model in whatever precision, differentiable."""
    precision: str
    """That of the search, for the result."""
    device: torch.device
    lanes: int
    """How many jobs at a time at most; also how many images are judged at a time."""
    every: int = _EVERY
    """Steps from one look at the lanes to the next."""
    repeat: Repeat = one_by_one

    def examples(self, x: Tensor, y: Tensor, index: Tensor) -> Examples:
        """Images, labels and their numbers, with what the judge says of the images."""
        x, y, index = x.to(self.device), y.to(self.device), index.to(self.device)
        return Examples.of(self.judge, x, y, index, batch=self.lanes, device=self.device)

    def run(
        self,
        search: Search,
        examples: Examples,
        threat: Threat,
        ledger: Ledger,
        *,
        seed: int,
        on_look: Callable[[int], None] | None = None,
        after: Trail | None = None,
    ) -> None:
        """Do what the ledger leaves to do."""
        run(
            search,
            self.logits,
            self.judge,
            examples,
            threat,
            ledger,
            seed=seed,
            lanes=self.lanes,
            every=self.every,
            device=self.device,
            repeat=self.repeat,
            on_look=on_look,
            after=after,
        )

    def passes_a_look(self, search: Search, jobs: int) -> int:
        """Passes of the model from one look to the next, to tell how long the rest will take."""
        return (lanes_for(jobs, self.lanes) if jobs else 0) * self.every * search.evaluations


def usual_lanes(device: torch.device) -> int:
    """As many as fill the device with a small network."""
    return _LANES.get(device.type, _LANES_ELSEWHERE)


@contextmanager
def ready(
    model: nn.Module,
    device: torch.device,
    *,
    precision: str,
    lanes: int,
    images: Tensor,
    passes: int = 0,
    say: Callable[[str], None] = print,
) -> Iterator[Runner]:
    """Hold a model in eval mode, its weights without gradients, in full precision; all is put back at the end.

    `precision` is that of the search: `float32`, or `auto` for what is fastest on the device. Whatever it is, a
    verdict is given by the judge alone. `images` are a few of those to come, `passes` is how often the model will be
    asked about an image at most.
    """
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)

    def judge(point: Tensor) -> Tensor:
        return checked_logits(model(point), len(point))

    few = images[: min(lanes, _FEW)].to(device)
    with mode(model, training=False), frozen(model), full_precision(device), _no_trials(), probed(model, few):
        full = str(dtype_of(model)).removeprefix("torch.")
        runner = Runner(judge=judge, logits=judge, precision=full, device=device, lanes=lanes)
        if device.type == "cuda" and full == "float32":
            runner = _on_cuda(runner, model, images, halves=precision == "auto", long=passes >= _LONG, say=say)
        yield runner


@contextmanager
def _no_trials() -> Iterator[None]:
    """Keep cuDNN from trying out all its algorithms, seconds for each new number of images; the judge sees many."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _on_cuda(
    runner: Runner, model: nn.Module, images: Tensor, *, halves: bool, long: bool, say: Callable[[str], None]
) -> Runner:
    """Steps recorded once and replayed, and the search in the first half precision that says what the model says."""
    from atas.evaluation import _cuda  # of no use elsewhere

    runner = replace(runner, repeat=_cuda.recorded, every=_EVERY_ON_CUDA)
    if not halves:
        return runner
    batch = torch.empty(runner.lanes, *images.shape[1:], device=runner.device)
    for kind in _cuda.HALVES:
        logits = _cuda.half_precision(model, kind, batch, long=long, say=say)
        if _cuda.agrees(logits, runner.judge, images.to(runner.device)):
            return replace(runner, logits=logits, precision=str(kind).removeprefix("torch."))
    return runner
