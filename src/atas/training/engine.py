"""The engine: one training step as a function of tensors, and how it is run.

All that changes between steps lives in tensors on the device: the place in the epoch's order, the number of updates
(and with it the learning rate), the epoch. So a step reads nothing from the host and leaves nothing to it, and the
same function can be run as it is or captured once and replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ClassVar

import torch
from torch import Tensor, nn

from atas.data.resident import Batches
from atas.errors import UsageError
from atas.fusing import fusable
from atas.methods import Adaptive, Method
from atas.processes import ALONE, Processes
from atas.training import recipe
from atas.training.adding import add_up
from atas.training.batchnorm import running_statistics
from atas.training.ema import EMA
from atas.training.schedule import learning_rate, momentum_at
from atas.training.sgd import SGD
from atas.training.views import random_views, shown_size
from atas.twin import working_copy

_LOOK = 500


def choose_device(name: str) -> torch.device:
    """The device of that name, or for `auto` the GPU where there is one. One with a number becomes the current one, on
    which streams, graphs and kernels are made."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"there is no device '{name}'; use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"training runs on auto, cpu or cuda, not on '{name}'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("this machine has no CUDA device, or this PyTorch was built without CUDA; use device cpu")
    if device.type == "cuda" and device.index is not None:
        if device.index >= (count := torch.cuda.device_count()):
            raise UsageError(f"there is no device '{name}'; this machine has cuda:0 to cuda:{count - 1}")
        torch.cuda.set_device(device)
    return device


class Totals(nn.Module):
    """Sums over the steps of an epoch, on the device: loss, right answers, step sizes, examples. Each of several
    processes has those of its own examples."""

    sums: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(4, dtype=torch.float64, device=device))

    def read(self, peers: Processes = ALONE) -> tuple[float, float, float]:
        """Mean loss, accuracy and step size so far, over these processes; waits for the device."""
        loss, right, step_size, count = peers.add_up(self.sums.clone()).tolist()
        return (loss / count, right / count, step_size / count) if count else (0.0, 0.0, 0.0)


@fusable
def _tally(sums: Tensor, loss: Tensor, logits: Tensor, y: Tensor, index: Tensor, step_sizes: Tensor | None) -> None:
    right = (logits.argmax(1) == y).sum()
    size = torch.zeros_like(loss) if step_sizes is None else step_sizes[index].sum()
    values = (loss * len(y), right, size, torch.full_like(loss, len(y)))
    sums += torch.stack([value.double() for value in values])


class Engine:
    """Method, data, optimiser, schedule and averaged weights, put together. This one runs every step as it comes.

    Of several processes each makes its steps on its own rows; before weights change, gradients and BatchNorm's running
    statistics are averaged over all rows, so that all have the same model at every moment.
    """

    kind: ClassVar[str] = "eager"

    def __init__(
        self,
        settings: recipe.Recipe,
        model: nn.Module,
        method: Method,
        batches: Batches,
        peers: Processes = ALONE,
    ) -> None:
        self.device, self.peers = batches.images.device, peers
        self.settings, self.model, self.method, self.batches = settings, model, method, batches
        wanted = settings.engine.precision
        self._mixed = wanted == "bf16" or (wanted == "auto" and self.device.type == "cuda")
        self.working = working_copy(model, torch.bfloat16) if self._mixed else model
        self.ema = EMA(model, settings.training.ema) if settings.training.ema else None
        self.totals = Totals(self.device)
        self._learning = [parameter.requires_grad for parameter in model.parameters()]
        self._inputs = self._of_learning(self.working)
        self._optimizer = SGD(settings.optimizer, self._of_learning(model), self._inputs)
        self._gradients: list[Tensor | None] = [None] * len(self._inputs)
        total = settings.training.epochs * len(batches) * method.updates_per_step
        schedule, usual = settings.schedule, settings.optimizer.momentum
        update = torch.arange(total + 1)
        paces = learning_rate(schedule, update, total), momentum_at(schedule, usual, update, total)
        self._paces = torch.stack(paces, dim=1).to(self.device)  # rate and momentum of each update
        self._update = torch.zeros((), dtype=torch.int64, device=self.device)
        self._order = torch.zeros(len(batches.labels), dtype=torch.int64, device=self.device)
        self._place = torch.zeros((), dtype=torch.int64, device=self.device)
        self._plan: tuple[Tensor, ...] = ()  # the epoch's batches, on the host
        self._ahead: tuple[int, Tensor] | None = None  # an epoch to come, and its order
        self._epoch = self._next = self.updates = 0
        self.shown: int | None = None  # the side of images in this epoch, where they are not shown as they are stored
        self._share = 1.0  # of the examples of the step's global batch

    @property
    def best_model(self) -> nn.Module:
        """The model to evaluate: averaged weights where there are any."""
        return self.model if self.ema is None else self.ema.model

    @property
    def precision_name(self) -> str:
        """bf16 or float32."""
        return "bf16" if self._mixed else "float32"

    def precision(self) -> AbstractContextManager[object]:
        """The precision that this run trains in. Weights change within a step, so no cast of them may be kept."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._mixed, cache_enabled=False)

    def rate(self) -> float:
        """The learning rate of the next update."""
        return float(self._paces[self.updates, 0])

    @property
    def look_size(self) -> int:
        """How many images to ask about at a time."""
        return _LOOK

    @property
    def watched(self) -> nn.Module:
        """The model to look at during training."""
        return self.model

    def ask(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Call a function of tensors, and of the watched model, in the precision of this run."""
        with self.precision():
            return function(*inputs)

    def prepare(self, epoch: int = 0) -> None:
        """What takes time once, before the first step at the size that images have in this epoch."""
        data, frame = self.settings.data, self.batches.images.shape[2:]
        self.shown = shown_size(data, epoch, self.settings.training.epochs)
        if self.shown is not None:
            self.batches.views = random_views(data, self.shown, (frame[0], frame[1]))

    def begin(self, epoch: int, first: int) -> None:
        """Get ready for an epoch, from the given batch on."""
        self.prepare(epoch)
        self.method.start_epoch(epoch, self.settings.training.epochs)
        order = self._ahead[1] if self._ahead and self._ahead[0] == epoch else self.batches.order(epoch)
        self._epoch = epoch
        self.batches.begin(order, first)
        self._order.copy_(order)
        self._plan = order.split([self.batches.size(batch) for batch in range(len(self.batches))])
        self._place.fill_(first * self.batches.batch_size)
        self._next = first
        self._announce()

    def step(self) -> None:
        """The next training step of the epoch."""
        index = self._plan[self._next]
        self._share = self.batches.share(self._next)
        self.batches.stage(self._next)
        self.method.before_step(index)
        self.run(len(index))
        self.method.after_step(index)
        self._next += 1
        self._announce()
        self.updates += self.method.updates_per_step
        if self._next == len(self._plan):  # the device has still much to do: the host uses the time
            self._ahead = self._epoch + 1, self.batches.order(self._epoch + 1)

    def _announce(self) -> None:
        if self._next < len(self._plan):
            self.method.prefetch(self._plan[self._next])

    def run(self, size: int) -> None:
        """Make a step with a batch of this size."""
        self.learn(size)

    def learn(self, size: int) -> None:
        """One whole training step, on the device alone."""
        index = self._order[self._place + torch.arange(size, device=self.device)]
        batch = self.batches.take(index, self.method.epoch)
        if not self.working.training:  # otherwise layers that their owner keeps in eval mode stay so
            self.working.train()
        with self.precision():
            step = self.method.learn(self.working, self, batch.x, batch.y, batch.index, batch.view)
        if size:
            sizes = self.method.step_sizes if isinstance(self.method, Adaptive) else None
            _tally(self.totals.sums, step.loss, step.logits, batch.y, index, sizes)
        self._place += size

    def backward(self, loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Collect weight gradients; part of `Update`."""
        if not self.peers.alone:  # before the pass, in which a synchronised BatchNorm mixes what processes lose
            loss = loss * self._share
        found = self.differentiate(loss, [*self._inputs, *inputs])
        count = len(self._inputs)
        for row, gradient in enumerate(found[:count]):
            earlier = self._gradients[row]
            self._gradients[row] = gradient if earlier is None else earlier if gradient is None else earlier + gradient
        return found[count:] if self.peers.alone else tuple(gradient / self._share for gradient in found[count:])

    def differentiate(self, loss: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """The gradients of a loss; None for what it does not depend on."""
        return torch.autograd.grad(loss, tensors, allow_unused=True)

    def apply(self) -> None:
        """One step of the optimiser; part of `Update`."""
        if not self.peers.alone:
            self._agree()
        rate, momentum = self._paces.index_select(0, self._update.view(1)).view(2).unbind()
        self._optimizer.step(self._gradients, rate, momentum)
        self._gradients = [None] * len(self._inputs)
        self._update += 1
        if self.ema is not None:
            self.ema.follow()

    def _agree(self) -> None:
        """Gradients and running statistics become those of the global batch."""
        collected = {row: gradient for row, gradient in enumerate(self._gradients) if gradient is not None}
        statistics = running_statistics(self.working)
        found = add_up([*collected.values(), *(self._share * statistic for statistic in statistics)], self.peers)
        for row, agreed in zip(collected, found, strict=False):
            self._gradients[row] = agreed
        for statistic, agreed in zip(statistics, found[len(collected) :], strict=True):
            statistic.copy_(agreed)

    def __call__(self, loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Collect and apply; part of `Update`."""
        gradients = self.backward(loss, *inputs)
        self.apply()
        return gradients

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, by name."""
        parts: dict[str, nn.Module] = {"model": self.model, "method": self.method, "totals": self.totals}
        if self.ema is not None:
            parts["ema"] = self.ema
        found: dict[str, Tensor] = {}
        for part, module in parts.items():
            found |= {f"{part}.{name}": tensor for name, tensor in module.state_dict().items()}
        return found | self._momentum()

    def load_tensors(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Take up where `tensors` were taken, after so many updates."""

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

        self.model.load_state_dict(part("model."))
        self.method.load_state_dict(part("method."))
        self.totals.load_state_dict(part("totals."))
        if self.ema is not None:
            self.ema.load_state_dict(part("ema."))
        for name, momentum in self._momentum().items():
            momentum.copy_(tensors[name])
        self._optimizer.refresh()
        self._update.fill_(updates)
        self.updates = updates

    def _momentum(self) -> dict[str, Tensor]:
        names = [
            name for (name, _), learns in zip(self.model.named_parameters(), self._learning, strict=True) if learns
        ]
        return {f"momentum.{name}": tensor for name, tensor in zip(names, self._optimizer.momentum, strict=True)}

    def _of_learning(self, model: nn.Module) -> list[nn.Parameter]:
        return [parameter for parameter, learns in zip(model.parameters(), self._learning, strict=True) if learns]
