"""The CUDA graph engine: a whole training step as one CUDA graph over compiled code.

The step is the same function that the eager engine runs. The network and the small functions around it run as
hand-written kernels; functions without a kernel are compiled. The step runs a few times to warm up, is captured as a
graph, and is replayed from then on: the host does nothing else. The short last batch of an epoch gets its own graph,
in which nothing is compiled, because it is one step in hundreds. So does every resolution of the images.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import EllipsisType

import torch
from torch import Tensor, nn

from atas.core.dispatch import implements, use_fast_ops
from atas.core.perturbations import PerturbationStore
from atas.data.loader import Loader
from atas.distributed.world import SINGLE, World
from atas.errors import AtasError
from atas.methods import Method
from atas.ops import enable_kernels
from atas.ops.cuda_graphs import GraphedFunction, capture, warm_up
from atas.ops.cuda_graphs import weight_grad_stream as weights_aside
from atas.ops.networks import CompiledNetwork, accelerate
from atas.recipes import Recipe
from atas.training.engine import Engine
from atas.training.metrics import accumulate_metrics
from atas.training.optim import FusedSGD

_FALLBACKS = {
    "fast": "cannot be compiled ({why}); capturing it without compilation",
    "plain": "cannot be captured ({why}); running it eagerly, slower",
}
_Shape = tuple[int, int | None]  # images in a batch, and the side at which they are shown


def channels_last(model: nn.Module) -> nn.Module:
    """The model with its weights laid out as convolutions on tensor cores want them; values stay."""
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return model


def register_kernels() -> None:
    """Register all Triton kernels, with that of a function of this package."""
    if enable_kernels():
        from atas.ops.triton.cross_entropy import accumulate

        implements(accumulate_metrics)(accumulate)


class CudaGraphEngine(Engine):
    """Runs a step a few times to record it, then replays the record."""

    kind = "captured"

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        method: Method,
        loader: Loader,
        log: Callable[[str], None] = print,
        world: World = SINGLE,
    ) -> None:
        super().__init__(recipe, channels_last(model), method, loader, world)
        register_kernels()
        torch.backends.cudnn.benchmark = not recipe.engine.deterministic
        method.checks.skip_labels = True
        self._log = log
        self._optimizer = FusedSGD(recipe.optimizer, self._trainable_of(model), self._trainable)
        self._graphs: dict[_Shape, torch.cuda.CUDAGraph | None] = {}
        self._accelerated = accelerate(self.compute_model) if method.uses_fast_network else None
        self._forward_passes: dict[_Shape, int] = {}
        self._eval_graph: GraphedFunction | None = None
        self._captures_eval = True
        self._untracked_batches = 0

    def prepare(self, epoch: int = 0) -> None:
        """Compile and capture the step for whole batches and for the short last one, at the size of this epoch.

        What cannot be compiled is captured as it is, and what cannot be captured either runs as it comes; that is said
        once a size. Records of another size are given up before, as they hold the memory of a whole step each. With
        several processes the averages lie in the record, and all processes must record alike: whole batches alone, and
        a step that cannot be is an error.
        """
        super().prepare(epoch)
        for shape in [shape for shape in self._graphs if shape[1] != self.resolution]:
            del self._graphs[shape]
        self._batch_share = self.loader.batch_fraction(0)
        whole, last = self.loader.size(0), self.loader.size(len(self.loader) - 1)
        if (whole, self.resolution) not in self._graphs:
            talks = self.recipe.engine.sync_batchnorm and self.world.size > 1  # within a pass, which is not compiled
            compiles = self.method.compilable and not (self.recipe.engine.deterministic or talks)
            self._graphs[whole, self.resolution] = self._capture_or_fall_back(
                whole, fast=self._accelerated is not None or compiles
            )
        if (last, self.resolution) not in self._graphs:
            captured = self._graphs[whole, self.resolution] is not None and self.world.size == 1
            self._graphs[last, self.resolution] = (
                self._capture_or_fall_back(last, fast=self._accelerated is not None) if captured else None
            )

    def _capture_or_fall_back(self, size: int, *, fast: bool) -> torch.cuda.CUDAGraph | None:
        """Return the graph of a step, fast or else plain; None if the step cannot be captured at all."""
        name = f"the step of method {self.recipe.method.name} on this model"
        if not fast and not self.method.compilable and not self._graphs:
            self._log(f"{name} cannot be compiled; capturing it without compilation")
        for attempt in ("fast", "plain") if fast else ("plain",):
            try:
                return self._capture(size, fast=attempt == "fast")
            except AtasError:
                raise
            except Exception as error:
                if self.world.size > 1:  # all ranks must replay the same graph
                    raise AtasError(
                        f"the step cannot be captured ({_first_line(error)}); with several processes set "
                        f"engine.kind=eager"
                    ) from error
                self._log(f"{name} {_FALLBACKS[attempt].format(why=_first_line(error))}")
        return None

    @property
    def eval_batch_size(self) -> int:
        """As in training: the kernels are there."""
        return self.loader.size(0)

    @property
    def eval_model(self) -> nn.Module:
        """The copy that steps are made with, by kernels where it has them."""
        return self._accelerated or self.compute_model

    def run(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """As ever, but recorded at the first call and replayed at those with inputs of the same shapes.

        Weights and statistics are read where they live, so a replay sees them as they are then.
        """
        with use_fast_ops():
            if self._eval_graph is None and self._captures_eval:
                self._eval_graph = self._capture_eval(functools.partial(super().run, function), inputs)
            if self._eval_graph is not None and self._eval_graph.accepts(inputs):
                return self._eval_graph(inputs)
            return super().run(function, *inputs)

    def _capture_eval(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> GraphedFunction | None:
        try:
            return GraphedFunction(function, inputs)
        except AtasError:
            raise
        except Exception as error:
            self._log(f"the monitor's look cannot be captured ({_first_line(error)}); running it as it comes, slower")
            self._captures_eval = False
            return None

    def execute_step(self, size: int) -> None:
        """Replay a step with a batch of this size."""
        graph = self._graphs.get((size, self.resolution))
        if graph is None or self._batch_share != self.loader.batch_fraction(0):
            self.training_step(size)
            return
        graph.replay()
        self._untracked_batches += self._forward_passes[size, self.resolution]

    def _grad(self, loss: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """The gradients of a loss, with those that were computed on the second stream."""
        found = super()._grad(loss, tensors)
        weights_aside.wait()
        return found

    def state_tensors(self) -> dict[str, Tensor]:
        """As ever; BatchNorm's count of batches, which the kernels leave alone, is brought up to date first."""
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d) and module.num_batches_tracked is not None:
                module.num_batches_tracked += self._untracked_batches
        self._untracked_batches = 0
        if self.ema is not None:
            self.ema.copy_integers()
        return super().state_tensors()

    @functools.cached_property
    def _fast_network(self) -> nn.Module:
        return self._accelerated or CompiledNetwork(self.compute_model)

    def _capture(self, size: int, *, fast: bool) -> torch.cuda.CUDAGraph:
        began = time.perf_counter()
        compiles = fast and size == self.loader.size(0)  # the short batch is one step in hundreds
        if compiles:
            at = "" if self.resolution is None else f" for images of {self.resolution} x {self.resolution}"
            self._log(f"compiling the training step{at} ...")
        self.method.before_step(torch.arange(size))  # where a step finds its rows does not change from now on
        before = [(tensor, where, tensor[where].clone()) for tensor, where in self._mutable_state(size)]
        for counter in (self._update, self._position):
            counter.zero_()  # at the end of an epoch, or of all, there is no next step to rehearse
        try:
            backend = "inductor" if compiles and not self.recipe.engine.deterministic else None
            with self._use_fast_network(backend) if fast else nullcontext():
                if fast and self._accelerated:
                    channels, *frame = self.loader.images.shape[1:]
                    sides = frame if self.resolution is None else (self.resolution, self.resolution)
                    self._accelerated.precompile(torch.empty(size, channels, *sides, device=self.device))
                warm_up(functools.partial(self._warmup_step, size))
                self._optimizer.begin_capture(self.method.updates_per_step)
                passes = self._accelerated.train_forward_count if self._accelerated else 0
                graph, _ = capture(functools.partial(self.training_step, size))
                self._forward_passes[size, self.resolution] = (
                    self._accelerated.train_forward_count if self._accelerated else 0
                ) - passes
                self._optimizer.finish_capture()
        finally:
            for tensor, where, value in before:
                tensor[where] = value
            self._optimizer.refresh()
            self._gradients = [None] * len(self._trainable)  # of a step that failed
        torch.cuda.synchronize()
        if compiles:
            self._log(f"compiled and captured in {time.perf_counter() - began:.1f} s")
        return graph

    def _mutable_state(self, size: int) -> list[tuple[Tensor, Tensor | EllipsisType]]:
        """What rehearsals with a batch of this size change, and where in it; host memory they do not touch.

        Of a memory of perturbations, the largest of all (3.9 GB for ImageNet), a step writes the rows of its batch
        alone, and every rehearsal is of the first batch in the epoch's order.
        """
        memories = {
            f"method.{name}.delta" for name, part in self.method.named_modules() if isinstance(part, PerturbationStore)
        }
        rows = self._order[:size].unique()
        found: list[tuple[Tensor, Tensor | EllipsisType]] = [(self._update, ...), (self._position, ...)]
        for name, tensor in self.state_tensors().items():
            if tensor.device.type == self.device.type:
                found.append((tensor, rows if name in memories else ...))
        return found

    @contextmanager
    def _use_fast_network(self, compile_with: str | None) -> Iterator[None]:
        """Inside, steps run by the fast network and by the fast implementations of the functions around it."""
        self.network = self._fast_network
        try:
            with use_fast_ops(compile_with):
                yield
        finally:
            self.network = self.compute_model

    def _warmup_step(self, size: int) -> None:
        """A step that leaves the place in the epoch's order where it was."""
        self.training_step(size)
        self._position -= size


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
