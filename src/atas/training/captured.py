"""The captured engine: a whole training step as one CUDA graph over compiled code.

The step is the same function that the eager engine runs. Its parts are compiled (the network, and the small functions
around it), it is run a few times to warm up, recorded as a graph, and from then on replayed: the host does nothing
else. The short last batch of an epoch gets a graph of its own, uncompiled, because it is one step in hundreds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from atas.data.resident import Resident
from atas.fusing import fused
from atas.kernels import fused_forward
from atas.kernels import weights as weights_aside
from atas.methods import Method
from atas.training import recipe
from atas.training._fused_sgd import FusedSGD
from atas.training.engine import Engine

_WARM_UP = 3
_RECOMPILES = 64  # a process may train many models, one after the other


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
        batches: Resident,
        say: Callable[[str], None] = print,
    ) -> None:
        super().__init__(settings, channels_last(model), method, batches)
        torch.backends.cudnn.benchmark = True
        method.guard.trusts_labels = True
        self._say = say
        self._optimizer = FusedSGD(settings.optimizer, self._of_learning(model), self._inputs)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._plain = self.working.forward
        self._by_hand = fused_forward(self.working) if method.compilable else None
        self._fast = self._by_hand or torch.compile(self.working.forward, dynamic=False, fullgraph=True)
        self._passes: dict[int, int] = {}
        self._uncounted = 0

    def prepare(self) -> None:
        """Compile and capture the step for whole batches and for the short last one."""
        for size in (self.batches.size(0), self.batches.size(len(self.batches) - 1)):
            if size not in self._graphs:
                self._graphs[size] = self._capture(size)

    def run(self, size: int) -> None:
        """Replay a step with a batch of this size."""
        self._graphs[size].replay()
        self._uncounted += self._passes[size]

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
        return super().tensors()

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        compiled = self.method.compilable and size == self.batches.batch_size
        began = time.perf_counter()
        if compiled:
            self._say("compiling the training step (once; kept for later runs) ...")
        elif not self.method.compilable and not self._graphs:
            self._say(f"method {self.settings.method.name} cannot be compiled; its step is captured as it is")
        changing = [*self.tensors().values(), self._update, self._place]
        before = [tensor.clone() for tensor in changing]
        graph = torch.cuda.CUDAGraph()
        self.working.forward = self._fast if compiled or self._by_hand else self._plain
        with fused("inductor" if compiled else None), torch._dynamo.config.patch(recompile_limit=_RECOMPILES):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP):
                    self.learn(size)
                    self._place -= size
            torch.cuda.current_stream().wait_stream(stream)
            self._optimizer.begin_capture(self.method.updates_per_step)
            passes = self._by_hand.passes if self._by_hand else 0
            with torch.cuda.graph(graph):
                self.learn(size)
            self._passes[size] = (self._by_hand.passes if self._by_hand else 0) - passes
            self._optimizer.finish_capture()
        self.working.forward = self._plain
        for tensor, value in zip(changing, before, strict=True):
            tensor.copy_(value)
        self._optimizer.refresh()
        torch.cuda.synchronize()
        if compiled:
            self._say(f"compiled and captured in {time.perf_counter() - began:.1f} s")
        return graph
