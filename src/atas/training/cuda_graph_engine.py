"""The CUDA graph engine: a whole training step as one CUDA graph over compiled code.

The step is the same function that the eager engine runs. The network and the small functions around it run as
Triton kernels; functions without a kernel are compiled. The step runs three times to warm up, is captured as a graph,
and is replayed from then on. The short last batch of an epoch has its own graph, in which nothing is compiled, because
it is one step in hundreds. Each resolution of the images has its own graphs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import EllipsisType

import torch
from torch import Tensor, nn

from atas._utils.formatting import first_line
from atas.core.dispatch import implements, use_fast_ops
from atas.core.perturbations import PerturbationStore
from atas.data.loader import Loader
from atas.distributed.world import SINGLE, World
from atas.errors import AtasError
from atas.methods import Method
from atas.methods.targets import RememberedPredictions
from atas.ops import enable_kernels
from atas.ops.cuda_graphs import WARMUP_CALLS, GraphedFunction, capture, warm_up
from atas.ops.cuda_graphs import weight_grad_stream as weights_aside
from atas.ops.networks import AcceleratedNetwork, CompiledNetwork, accelerate, channels_last, takes_channels_last
from atas.recipes import Recipe
from atas.training.data import train_resolution
from atas.training.ema import EMA, FusedEMA
from atas.training.engine import Engine
from atas.training.metrics import accumulate_metrics
from atas.training.optim import SGD, FusedSGD

_FALLBACKS = {
    "fast": "cannot be compiled ({why}); capturing it without compilation",
    "plain": "cannot be captured ({why}); running it eagerly, which takes several times as long for small networks",
}
_Variant = tuple[int | None, bool]  # side of the images in pixels, and whether weights are perturbed
_Step = tuple[int, _Variant]  # number of images in a batch


def lay_out(
    model: nn.Module, recipe: Recipe, loader: Loader, log: Callable[[str], None] = print, world: World = SINGLE
) -> nn.Module:
    """Lay out the weights of convolutions for tensor cores, in place, if the network can compute with that."""
    shape = loader.images.shape[1:]
    if (side := train_resolution(recipe.data, 0, recipe.training.epochs)) is not None:
        shape = torch.Size([shape[0], side, side])
    images = torch.empty(2, *shape, device=loader.images.device)
    if world.on_rank0(lambda: takes_channels_last(model, images)):  # gradients of all ranks are added up in one layout
        return channels_last(model)
    log(
        "the network does not compute the same with weights in channels_last, often because of view() in place of "
        "reshape(); they keep their layout, which is slower"
    )
    return model


@functools.cache
def register_kernels() -> None:
    """Register all Triton kernels, with that of a function of this package."""
    if enable_kernels():
        from atas.ops.triton.cross_entropy import accumulate

        implements(accumulate_metrics)(accumulate)


@dataclass(frozen=True)
class CudaBackend:
    """What the engine needs a GPU for. Tests without one pass replacements that run on the CPU."""

    warm_up: Callable[[Callable[[], object], int], None] = warm_up
    capture: Callable[[Callable[[], object]], tuple[torch.cuda.CUDAGraph, object]] = capture
    accelerate: Callable[[nn.Module], AcceleratedNetwork | None] = accelerate
    optimizer: type[SGD] = FusedSGD
    average: type[EMA] = FusedEMA


class CudaGraphEngine(Engine):
    """Captures a step as a CUDA graph, and replays it."""

    kind = "captured"

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        method: Method,
        loader: Loader,
        log: Callable[[str], None] = print,
        world: World = SINGLE,
        backend: CudaBackend | None = None,
    ) -> None:
        self._backend = backend or CudaBackend()
        super().__init__(recipe, lay_out(model, recipe, loader, log, world), method, loader, world)
        register_kernels()
        torch.backends.cudnn.benchmark = not recipe.engine.deterministic
        method.checks.skip_labels = True
        self._log = log
        weights, optimizer = self._trainable_of(model), self._backend.optimizer
        if type(self._optimizer) is SGD and all(self._optimizer.decays):  # the kernel knows no other case
            if optimizer.supports(weights, self._trainable):
                self._optimizer = optimizer(recipe.optimizer, weights, self._trainable)
            else:
                log("some weights are not float32, dense and aligned; updating weights without the kernel, slower")
        self._graphs: dict[_Step, torch.cuda.CUDAGraph | None] = {}
        self._accelerated = self._backend.accelerate(self.compute_model) if method.uses_fast_network else None
        self._forward_passes: dict[_Step, int] = {}
        self._eval_graph: GraphedFunction | None = None
        self._captures_eval = True
        self._untracked_batches = 0

    def _average(self, model: nn.Module, decay: float) -> EMA:
        return self._backend.average(model, decay, self.recipe.training.ema_warmup)

    def prepare(self, epoch: int = 0) -> None:
        """Compile and capture the step for full batches and for the last, shorter one.

        Fall back to capture without compilation, then to eager, and log each fallback once per resolution. Graphs of
        other resolutions, or without perturbed weights, are freed first: each holds the memory of a whole step. With
        several ranks the all-reduce is part of the graph, all ranks fall back together, and only full batches are
        captured.
        """
        super().prepare(epoch)
        variant = self._variant
        for step in [step for step in self._graphs if step[1] != variant]:
            del self._graphs[step]
        self._batch_share = self.loader.batch_fraction(0)
        whole, last = self.loader.size(0), self.loader.size(len(self.loader) - 1)
        if (whole, variant) not in self._graphs:
            compiles = self.method.compilable and not (self.recipe.engine.deterministic or self._passes_communicate)
            self._graphs[whole, variant] = self._capture_or_fall_back(
                whole, fast=self._accelerated is not None or compiles
            )
        if (last, variant) not in self._graphs:
            captured = self._graphs[whole, variant] is not None and not self._distributed
            self._graphs[last, variant] = (
                self._capture_or_fall_back(last, fast=self._accelerated is not None) if captured else None
            )

    @property
    def _variant(self) -> _Variant:
        """What decides, besides the number of images, which graph is the step of this epoch."""
        return self.resolution, self.method.perturbs_weights

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
                self._log(f"{name} {_FALLBACKS[attempt].format(why=first_line(error))}")
        return None

    @property
    def eval_batch_size(self) -> int:
        """The number of images that the monitor probes at once: as in training, so kernels are compiled already."""
        return self.loader.size(0)

    @property
    def eval_model(self) -> nn.Module:
        """The copy that steps are made with, by kernels where it has them."""
        return self._accelerated or self.compute_model

    def run(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Call a function of tensors; capture it at the first call, and replay it for inputs of the same shapes.

        A graph reads weights and statistics from their memory, so a replay uses their current values.
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
            self._log(f"the monitor's probe cannot be captured ({first_line(error)}); running it eagerly, slower")
            self._captures_eval = False
            return None

    def execute_step(self, size: int) -> None:
        """Replay the step with a batch of this size; run it eagerly if it was not captured."""
        graph = self._graphs.get((size, self._variant))
        if graph is None or self._batch_share != self.loader.batch_fraction(0):
            self.training_step(size)
            return
        graph.replay()
        self._untracked_batches += self._forward_passes[size, self._variant]

    def _grad(self, loss: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradients of a loss, with those that were computed on the second stream."""
        gradients = super()._grad(loss, tensors)
        weights_aside.wait()
        return gradients

    def state_tensors(self) -> dict[str, Tensor]:
        """Return all tensors that the next step depends on; first update BatchNorm's counts, which kernels do not."""
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d) and module.num_batches_tracked is not None:
                module.num_batches_tracked += self._untracked_batches
        self._untracked_batches = 0
        for average in self.averages.values():
            average.copy_integers()
        return super().state_tensors()

    @functools.cached_property
    def _fast_network(self) -> nn.Module:
        return self._accelerated or CompiledNetwork(self.compute_model, log=self._log)

    @property
    def _passes_communicate(self) -> bool:
        """Whether forward and backward passes exchange data between ranks; such passes are not compiled."""
        return self.recipe.engine.sync_batchnorm and self._distributed

    def _capture(self, size: int, *, fast: bool) -> torch.cuda.CUDAGraph:
        began = time.perf_counter()
        compiles = fast and size == self.loader.size(0)  # the short batch is one step in hundreds
        if compiles:
            at = "" if self.resolution is None else f" for images of {self.resolution} x {self.resolution}"
            self._log(f"compiling the training step{at} ...")
        self.method.before_step(torch.arange(size))  # the addresses of a step's rows are fixed from now on
        before = [(tensor, where, tensor[where].clone()) for tensor, where in self._mutable_state(size)]
        for counter in (self._update, self._position):
            counter.zero_()  # after the last step of an epoch there is no next one to warm up with
        try:
            backend = "inductor" if compiles and not self.recipe.engine.deterministic else None
            with self._use_fast_network(backend) if fast else nullcontext():
                if fast and self._accelerated:
                    channels, *frame = self.loader.images.shape[1:]
                    sides = frame if self.resolution is None else (self.resolution, self.resolution)
                    self._accelerated.precompile(torch.empty(size, channels, *sides, device=self.device))
                self._warm_up(size)
                self._optimizer.begin_capture(self.method.updates_per_step)
                passes = self._accelerated.train_forward_count if self._accelerated else 0
                graph, _ = self.world.on_all_ranks(
                    lambda: self._backend.capture(functools.partial(self.training_step, size))
                )
                self._forward_passes[size, self._variant] = (
                    self._accelerated.train_forward_count if self._accelerated else 0
                ) - passes
                self._optimizer.finish_capture()
        finally:
            for tensor, where, value in before:
                tensor[where] = value
            self._optimizer.refresh()
            self._gradients = [None] * len(self._trainable)  # a failed step may have left some
        torch.cuda.synchronize()
        if compiles:
            self._log(f"compiled and captured in {time.perf_counter() - began:.1f} s")
        return graph

    def _warm_up(self, size: int) -> None:
        """Run steps before a capture.

        A rank that fails before a collective would leave the others waiting in it. So the first step is run without
        communication, and all ranks go on only if it has succeeded on each.
        """
        if self._distributed and not self._passes_communicate:
            self._distributed = False
            try:
                self.world.on_all_ranks(lambda: self._backend.warm_up(functools.partial(self._warmup_step, size), 1))
            finally:
                self._distributed = True
        self._backend.warm_up(functools.partial(self._warmup_step, size), WARMUP_CALLS)

    def _mutable_state(self, size: int) -> list[tuple[Tensor, Tensor | EllipsisType]]:
        """Return the tensors on the device that warm-up steps change, with the rows that change.

        Of stored perturbations and remembered predictions, the largest tensors (3.9 and 2.6 GB for ImageNet), a step
        writes the rows of its batch only. Every warm-up step takes the first batch of the epoch's order.
        """
        stores = {
            f"method.{name}.delta" for name, part in self.method.named_modules() if isinstance(part, PerturbationStore)
        } | {
            f"method.{name}.average"
            for name, part in self.method.named_modules()
            if isinstance(part, RememberedPredictions)
        }
        rows = self._order[:size].unique()
        state: list[tuple[Tensor, Tensor | EllipsisType]] = [(self._update, ...), (self._position, ...)]
        for name, tensor in self.state_tensors().items():
            if tensor.device.type == self.device.type:
                state.append((tensor, rows if name in stores else ...))
        return state

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
        """Run a step and keep the position in the epoch's order."""
        self.training_step(size)
        self._position -= size
