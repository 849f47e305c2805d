"""The engine: one training step as a function of tensors, run eagerly.

All state that changes between steps is in tensors on the device: the position in the epoch's order, the number of
updates (and with it the learning rate), the epoch. A step exchanges nothing with the host, so the same function can be
run eagerly, or captured once and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

import torch
from torch import Tensor, nn

from atas.core.autograd import temporary_values
from atas.core.model_state import state_tensors
from atas.data.loader import Loader
from atas.distributed.batchnorm import running_statistics
from atas.distributed.world import SINGLE, World, all_reduce_tensors
from atas.errors import UsageError
from atas.methods import Method
from atas.ops.precision import low_precision_copy
from atas.recipes import Recipe
from atas.training.data import train_resolution, train_views
from atas.training.ema import EMA
from atas.training.metrics import EpochSums, accumulate_metrics
from atas.training.optim import clip_gradients, create_optimizer
from atas.training.schedule import update_table

_EVAL_BATCH_SIZE = 500


class Engine:
    """Runs training steps: method, loader, optimiser, schedule and averaged weights together.

    With several ranks, each rank steps on its own rows. Before the weights change, gradients and BatchNorm's running
    statistics are averaged over all rows, so that all ranks keep the same model.
    """

    kind: ClassVar[str] = "eager"

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        method: Method,
        loader: Loader,
        world: World = SINGLE,
    ) -> None:
        self.device, self.world, self._distributed = loader.images.device, world, world.is_distributed
        self.recipe, self.model, self.method, self.loader = recipe, model, method, loader
        precision = recipe.engine.precision
        self._mixed = precision == "bf16" or (precision == "auto" and self.device.type == "cuda")
        self.compute_model = low_precision_copy(model, torch.bfloat16) if self._mixed else model
        self.network = self.compute_model  # an engine may run it by a faster implementation
        self.averages = {decay: self._average(model, decay) for decay in recipe.training.ema_decays}
        self.epoch_sums = EpochSums(self.device)
        self._is_trainable = [parameter.requires_grad for parameter in model.parameters()]
        self._trainable = self._trainable_of(self.compute_model)
        self._optimizer = create_optimizer(recipe.optimizer, model, self.compute_model)
        self._gradients: list[Tensor | None] = [None] * len(self._trainable)
        total = recipe.training.epochs * len(loader) * method.updates_per_step
        self._update_table = update_table(recipe.optimizer, recipe.schedule, total).to(self.device)
        self._update = torch.zeros((), dtype=torch.int64, device=self.device)
        self._order = torch.zeros(len(loader.labels), dtype=torch.int64, device=self.device)
        self._position = torch.zeros((), dtype=torch.int64, device=self.device)
        self._epoch_batches: tuple[Tensor, ...] = ()  # indices of the epoch's batches, on the host
        self._next_order: tuple[int, Tensor] | None = None  # the next epoch and its order
        self._epoch = self._next_batch = self.updates = 0
        self.resolution: int | None = None  # side of the images in this epoch; None: as stored
        self._batch_share = 1.0  # this rank's share of the examples in the global batch

    def _average(self, model: nn.Module, decay: float) -> EMA:
        return EMA(model, decay, self.recipe.training.ema_warmup)

    @property
    def final_model(self) -> nn.Module:
        """The model to evaluate: with averaged weights if there are any, those of the first decay."""
        return next((average.model for average in self.averages.values()), self.model)

    @property
    def precision_name(self) -> str:
        """The precision of training: bf16 or float32."""
        return "bf16" if self._mixed else "float32"

    def precision(self) -> AbstractContextManager[object]:
        """Return a context with the precision of this run. Weights change within a step, so casts are not cached."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._mixed, cache_enabled=False)

    def learning_rate(self) -> float:
        """Return the learning rate of the next update."""
        return float(self._update_table[self.updates, 0])

    @property
    def eval_batch_size(self) -> int:
        """The number of images that the monitor probes at once."""
        return _EVAL_BATCH_SIZE

    @property
    def eval_model(self) -> nn.Module:
        """The model that the monitor probes during training."""
        return self.model

    def run(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Call a function of tensors, and of `eval_model`, in the precision of this run."""
        with self.precision():
            return function(*inputs)

    def prepare(self, epoch: int = 0) -> None:
        """Prepare for the steps of this epoch; called before the first of them, outside of the measured time."""
        self.method.current_epoch = epoch
        data, epochs, frame = self.recipe.data, self.recipe.training.epochs, self.loader.images.shape[2:]
        self.resolution = train_resolution(data, epoch, epochs)
        if self.resolution is not None or data.view == "cropshift" or data.erase:
            self.loader.views = train_views(data, self.resolution, (frame[0], frame[1]), epochs)

    def start_epoch(self, epoch: int, first: int) -> None:
        """Start an epoch at the batch `first`."""
        self.prepare(epoch)
        self.method.start_epoch(epoch, self.recipe.training.epochs)
        order = self._next_order[1] if self._next_order and self._next_order[0] == epoch else self.loader.order(epoch)
        self._epoch = epoch
        self.loader.start_epoch(order, first)
        self._order.copy_(order)
        self._epoch_batches = order.split([self.loader.size(batch) for batch in range(len(self.loader))])
        self._position.fill_(first * self.loader.batch_size)
        self._next_batch = first
        self._prefetch()

    def step(self) -> None:
        """Run the next training step of the epoch."""
        index = self._epoch_batches[self._next_batch]
        self._batch_share = self.loader.batch_fraction(self._next_batch)
        self.loader.prefetch(self._next_batch)
        self.method.before_step(index)
        self.execute_step(len(index))
        self.method.after_step(index)
        self._next_batch += 1
        self._prefetch()
        self.updates += self.method.updates_per_step
        if self._next_batch == len(self._epoch_batches):  # the host draws the next order while the device is busy
            self._next_order = self._epoch + 1, self.loader.order(self._epoch + 1)

    def _prefetch(self) -> None:
        if self._next_batch < len(self._epoch_batches):
            self.method.prefetch(self._epoch_batches[self._next_batch])

    def execute_step(self, size: int) -> None:
        """Run a step with a batch of this size."""
        self.training_step(size)

    def enter_train_mode(self) -> None:
        """Put the model into train mode; layers that their owner keeps in eval mode stay so."""
        if not self.compute_model.training:
            self.compute_model.train()

    def training_step(self, size: int) -> None:
        """One whole training step, on the device alone."""
        index = self._order[self._position + torch.arange(size, device=self.device)]
        batch = self.loader.take(index, self.method.epoch)
        self.enter_train_mode()
        with self.precision(), self.method.teach(self.final_model, batch.x):
            step = self.method.training_step(self.network, self, batch)
        if size:
            accumulate_metrics(self.epoch_sums.sums, step.loss, step.logits, batch.y, index, self.method.step_sizes)
        self._position += size

    def backward(self, loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Add up weight gradients and return those of `inputs`; part of `Update`."""
        gradients, of_inputs = self._local_gradients(loss, inputs)
        for row, gradient in enumerate(gradients):
            earlier = self._gradients[row]
            self._gradients[row] = gradient if earlier is None else earlier if gradient is None else earlier + gradient
        return of_inputs

    def _local_gradients(
        self, loss: Tensor, inputs: tuple[Tensor, ...], *, summed: bool = False
    ) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]]:
        """Return this rank's part of the global batch's weight gradients, and the gradients of `inputs`."""
        weighs = self._distributed and not summed
        if weighs:  # before the pass: synchronised BatchNorm mixes the losses of all ranks in it
            loss = loss * self._batch_share
        gradients = self._grad(loss, [*self._trainable, *inputs])
        of_inputs = gradients[len(self._trainable) :]
        if weighs:
            of_inputs = tuple(gradient / self._batch_share for gradient in of_inputs)
        return gradients[: len(self._trainable)], of_inputs

    def total(self, *sums: Tensor) -> list[Tensor]:
        """Return sums over all ranks; part of `Update`."""
        if not self._distributed:
            return [value.detach() for value in sums]
        return all_reduce_tensors(sums, self.world)

    @property
    def weights(self) -> Sequence[Tensor]:
        """The trainable weights in float32; part of `Update`."""
        return self._optimizer.weights

    @property
    def momentum(self) -> Sequence[Tensor]:
        """The optimiser's momentum; part of `Update`."""
        return self._optimizer.momentum

    def weight_gradients(
        self, loss: Tensor, *inputs: Tensor, summed: bool = False
    ) -> tuple[list[Tensor | None], tuple[Tensor, ...]]:
        """Return the gradients of a loss without accumulating them; part of `Update`."""
        local, of_inputs = self._local_gradients(loss, inputs, summed=summed)
        gradients = [
            None if gradient is None else gradient.to(weight.dtype)
            for gradient, weight in zip(local, self.weights, strict=True)
        ]
        if self._distributed:
            found = {row: gradient for row, gradient in enumerate(gradients) if gradient is not None}
            for row, total in zip(found, all_reduce_tensors(list(found.values()), self.world), strict=True):
                gradients[row] = total
        return gradients, of_inputs

    def offset_weights(self, offsets: Sequence[Tensor | None]) -> AbstractContextManager[None]:
        """Offset the weights that passes use, which may be a low-precision copy; part of `Update`."""
        values = {row: self.weights[row].detach() + off for row, off in enumerate(offsets) if off is not None}
        return temporary_values([self._trainable[row] for row in values], list(values.values()))

    def _grad(self, loss: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradients of a loss; None for tensors that it does not depend on."""
        return torch.autograd.grad(loss, tensors, allow_unused=True)

    def apply(self) -> None:
        """Run one step of the optimiser with the gradients so far; part of `Update`."""
        if all(gradient is None for gradient in self._gradients):
            raise UsageError(
                f"no weight has a gradient of the training loss, so nothing would be learned: method "
                f"{self.recipe.method.name} or the model's forward pass detaches the loss from the weights"
            )
        if self._distributed:
            self._all_reduce()
        if (limit := self.recipe.optimizer.clip_norm) is not None:
            self._gradients = clip_gradients(self._gradients, limit)
        self._optimizer.step(self._gradients, *self._update_table.index_select(0, self._update.view(1))[0].unbind())
        self._gradients = [None] * len(self._trainable)
        self._update += 1
        for average in self.averages.values():
            average.update(self.method.average_decay(average.decay))

    def _all_reduce(self) -> None:
        """Replace gradients and running statistics by those of the global batch."""
        gradients = {row: gradient for row, gradient in enumerate(self._gradients) if gradient is not None}
        statistics = running_statistics(self.compute_model)
        summed = all_reduce_tensors(
            [*gradients.values(), *(self._batch_share * statistic for statistic in statistics)], self.world
        )
        for row, total in zip(gradients, summed, strict=False):
            self._gradients[row] = total
        for statistic, total in zip(statistics, summed[len(gradients) :], strict=True):
            statistic.copy_(total)

    def __call__(self, loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run `backward` and `apply`; part of `Update`."""
        gradients = self.backward(loss, *inputs)
        self.apply()
        return gradients

    def state_tensors(self) -> dict[str, Tensor]:
        """Return all tensors that the next step depends on, by name."""
        parts: dict[str, nn.Module] = {"model": self.model, "method": self.method, "totals": self.epoch_sums}
        parts |= self._named_averages()
        tensors: dict[str, Tensor] = {}
        for part, module in parts.items():
            tensors |= {f"{part}.{name}": tensor for name, tensor in state_tensors(module).items()}
        return tensors | self._optimizer_state()

    def load_state_tensors(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Restore the state that `state_tensors` returned after this number of updates."""

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

        self.model.load_state_dict(part("model."))
        self.method.load_state_dict(part("method."))
        self.epoch_sums.load_state_dict(part("totals."))
        for name, average in self._named_averages().items():
            average.load_state_dict(part(f"{name}."))
        for name, value in self._optimizer_state().items():
            value.copy_(tensors[name])
        self._optimizer.refresh()
        self._update.fill_(updates)
        self.updates = updates

    def sharded_tensors(self) -> set[str]:
        """Return the names of the state's tensors that hold a row for each example or position of this rank."""
        return {f"method.{name}" for name in self.method.sharded_tensors()}

    def _named_averages(self) -> dict[str, EMA]:
        """Return the averages by the names of their parts of the state: `ema`, `ema2`, ..."""
        numbers = ("", *range(2, len(self.averages) + 1))
        return {f"ema{number}": average for number, average in zip(numbers, self.averages.values(), strict=False)}

    def _optimizer_state(self) -> dict[str, Tensor]:
        names = [
            name for (name, _), learns in zip(self.model.named_parameters(), self._is_trainable, strict=True) if learns
        ]
        return {
            f"{kind}.{name}": tensor
            for kind, tensors in self._optimizer.state().items()
            for name, tensor in zip(names, tensors, strict=True)
        }

    def _trainable_of(self, model: nn.Module) -> list[nn.Parameter]:
        return [parameter for parameter, learns in zip(model.parameters(), self._is_trainable, strict=True) if learns]
