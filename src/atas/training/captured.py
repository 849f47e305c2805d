"""The captured engine: a whole training step as one CUDA graph over compiled code.

The step is the same function that the eager engine runs. Its parts (the network, and the small functions around it) run
as kernels written by hand or, where there are none, are compiled. The step is run a few times to warm up, recorded as a
graph, and from then on replayed: the host does nothing else. The short last batch of an epoch gets a graph of its own,
in which nothing is compiled, because it is one step in hundreds. So does every size at which images are shown.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import EllipsisType

import torch
from torch import Tensor, nn

from atas.data.resident import Batches
from atas.errors import AtasError
from atas.fusing import compiled, fused
from atas.graphs import record, warm_up
from atas.kernels import fused_forward, side_by_side, small_functions
from atas.kernels import weights as weights_aside
from atas.memory import Memory
from atas.methods import Method
from atas.processes import ALONE, Processes
from atas.training import recipe
from atas.training._fused_sgd import FusedSGD
from atas.training.engine import Engine

_Shape = tuple[int, int | None]  # images in a batch, and the side at which they are shown


def channels_last(model: nn.Module) -> nn.Module:
    """The model with its weights laid out as convolutions on tensor cores want them; values stay."""
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return model


class Captured(Engine):
    """Runs a step a few times to record it, then replays the record."""

    kind = "captured"

    def __init__(
        self,
        settings: recipe.Recipe,
        model: nn.Module,
        method: Method,
        batches: Batches,
        say: Callable[[str], None] = print,
        peers: Processes = ALONE,
    ) -> None:
        super().__init__(settings, channels_last(model), method, batches, peers)
        torch.backends.cudnn.benchmark = not settings.engine.deterministic
        method.guard.trusts_labels = True
        self._say = say
        self._optimizer = FusedSGD(settings.optimizer, self._of_learning(model), self._inputs)
        self._graphs: dict[_Shape, torch.cuda.CUDAGraph | None] = {}
        self._plain = self.working.forward
        self._by_hand = fused_forward(self.working) if method.by_kernels else None
        self._passes: dict[_Shape, int] = {}
        self._answer: Recorded | None = None
        self._records = True
        self._uncounted = 0

    def prepare(self, epoch: int = 0) -> None:
        """Compile and capture the step for whole batches and for the short last one, at the size of this epoch.

        What cannot be compiled is captured as it is, and what cannot be captured either runs as it comes; that is said
        once a size. Records of another size are given up before, as they hold the memory of a whole step each. With
        several processes the averages lie in the record, and all processes must record alike: whole batches alone, and
        a step that cannot be is an error.
        """
        super().prepare(epoch)
        for shape in [shape for shape in self._graphs if shape[1] != self.shown]:
            del self._graphs[shape]
        self._share = self.batches.share(0)
        whole, last = self.batches.size(0), self.batches.size(len(self.batches) - 1)
        if (whole, self.shown) not in self._graphs:
            talks = self.settings.engine.sync_batchnorm and not self.peers.alone  # within a pass, which is not compiled
            compiles = self.method.compilable and not (self.settings.engine.deterministic or talks)
            self._graphs[whole, self.shown] = self._try(whole, fast=self._by_hand is not None or compiles)
        if (last, self.shown) not in self._graphs:
            captured = self._graphs[whole, self.shown] is not None and self.peers.alone
            self._graphs[last, self.shown] = self._try(last, fast=self._by_hand is not None) if captured else None

    def _try(self, size: int, *, fast: bool) -> torch.cuda.CUDAGraph | None:
        name = f"the step of method {self.settings.method.name} on this model"
        if fast:
            try:
                return self._capture(size, fast=True)
            except AtasError:
                raise
            except Exception as error:
                self._must_not_differ(error)
                self._say(f"{name} cannot be compiled ({_first_line(error)}); capturing it as it is")
        elif not self.method.compilable and not self._graphs:
            self._say(f"{name} cannot be compiled; capturing it as it is")
        try:
            return self._capture(size, fast=False)
        except AtasError:
            raise
        except Exception as error:
            self._must_not_differ(error)
            self._say(f"{name} cannot be captured ({_first_line(error)}); running it as it comes, slower")
            return None

    def _must_not_differ(self, error: Exception) -> None:
        """Several processes must all record the same or nothing."""
        if not self.peers.alone:
            raise AtasError(
                f"the step cannot be recorded ({_first_line(error)}); with several processes set engine.kind=eager"
            ) from error

    @property
    def look_size(self) -> int:
        """As in training: the kernels are there."""
        return self.batches.size(0)

    @property
    def watched(self) -> nn.Module:
        """The copy that steps are made with."""
        return self.working

    def ask(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """As ever, but recorded at the first call and replayed at those with inputs of the same shapes.

        Weights and statistics are read where they live, so a replay sees them as they are then.
        """
        with self._fast_forward(self._by_hand is not None), fused(None, by_hand=small_functions()):
            if self._answer is None and self._records:
                self._answer = self._record(functools.partial(super().ask, function), inputs)
            if self._answer is not None and self._answer.takes(inputs):
                return self._answer(inputs)
            return super().ask(function, *inputs)

    def _record(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Recorded | None:
        try:
            return Recorded(function, inputs)
        except AtasError:
            raise
        except Exception as error:
            self._say(f"the monitor's look cannot be captured ({_first_line(error)}); running it as it comes, slower")
            self._records = False
            return None

    def run(self, size: int) -> None:
        """Replay a step with a batch of this size."""
        graph = self._graphs.get((size, self.shown))
        if graph is None or self._share != self.batches.share(0):
            self.learn(size)
            return
        graph.replay()
        self._uncounted += self._passes[size, self.shown]

    def differentiate(self, loss: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """The gradients of a loss, with those that were computed on the second stream."""
        found = super().differentiate(loss, tensors)
        weights_aside.join()
        return found

    def tensors(self) -> dict[str, Tensor]:
        """As ever; BatchNorm's count of batches, which the kernels leave alone, is brought up to date first."""
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d) and module.num_batches_tracked is not None:
                module.num_batches_tracked += self._uncounted
        self._uncounted = 0
        if self.ema is not None:
            self.ema.copy_counts()
        return super().tensors()

    @functools.cached_property
    def _fast(self) -> Callable[[Tensor], Tensor]:
        return self._by_hand or compiled(self._plain, "inductor")

    def _capture(self, size: int, *, fast: bool) -> torch.cuda.CUDAGraph:
        began = time.perf_counter()
        compiles = fast and size == self.batches.size(0)  # the short batch is one step in hundreds
        if compiles:
            at = "" if self.shown is None else f" for images of {self.shown} x {self.shown}"
            self._say(f"compiling the training step{at} ...")
        self.method.before_step(torch.arange(size))  # where a step finds its rows does not change from now on
        before = [(tensor, where, tensor[where].clone()) for tensor, where in self._changing(size)]
        for counter in (self._update, self._place):
            counter.zero_()  # at the end of an epoch, or of all, there is no next step to rehearse
        try:
            backend = "inductor" if compiles and not self.settings.engine.deterministic else None
            with self._fast_forward(fast), fused(backend, by_hand=small_functions() if fast else None):
                if fast and self._by_hand:
                    with side_by_side():
                        channels, *frame = self.batches.images.shape[1:]
                        sides = frame if self.shown is None else (self.shown, self.shown)
                        self._by_hand.rehearse(torch.empty(size, channels, *sides, device=self.device))
                warm_up(functools.partial(self._rehearsal, size))
                self._optimizer.begin_capture(self.method.updates_per_step)
                passes = self._by_hand.passes if self._by_hand else 0
                graph, _ = record(functools.partial(self.learn, size))
                self._passes[size, self.shown] = (self._by_hand.passes if self._by_hand else 0) - passes
                self._optimizer.finish_capture()
        finally:
            for tensor, where, value in before:
                tensor[where] = value
            self._optimizer.refresh()
            self._gradients = [None] * len(self._inputs)  # of a step that failed
        torch.cuda.synchronize()
        if compiles:
            self._say(f"compiled and captured in {time.perf_counter() - began:.1f} s")
        return graph

    def _changing(self, size: int) -> list[tuple[Tensor, Tensor | EllipsisType]]:
        """What rehearsals with a batch of this size change, and where in it; host memory they do not touch.

        Of a memory of perturbations, the largest of all (3.9 GB for ImageNet), a step writes the rows of its batch
        alone, and every rehearsal is of the first batch in the epoch's order.
        """
        memories = {f"method.{name}.delta" for name, part in self.method.named_modules() if isinstance(part, Memory)}
        rows = self._order[:size].unique()
        found: list[tuple[Tensor, Tensor | EllipsisType]] = [(self._update, ...), (self._place, ...)]
        for name, tensor in self.tensors().items():
            if tensor.device.type == self.device.type:
                found.append((tensor, rows if name in memories else ...))
        return found

    @contextmanager
    def _fast_forward(self, wanted: bool) -> Iterator[None]:
        """Inside, where wanted, the working copy runs by its faster forward pass."""
        if wanted:
            self.working.forward = self._fast
        try:
            yield
        finally:
            self.working.forward = self._plain

    def _rehearsal(self, size: int) -> None:
        """A step that leaves the place in the epoch's order where it was."""
        self.learn(size)
        self._place -= size


class Recorded:
    """A function of tensors as a CUDA graph. The inputs of later calls are copied to where those of the first lived."""

    def __init__(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        self._inputs = [tensor.clone() for tensor in inputs]
        warm_up(lambda: function(*self._inputs), times=1)
        self._graph, self._output = record(lambda: function(*self._inputs))

    def takes(self, inputs: tuple[Tensor, ...]) -> bool:
        """Whether these are of the shapes that it was recorded with."""
        return [tensor.shape for tensor in inputs] == [tensor.shape for tensor in self._inputs]

    def __call__(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Replay it."""
        for old, new in zip(self._inputs, inputs, strict=True):
            old.copy_(new)
        self._graph.replay()
        return self._output.clone()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
