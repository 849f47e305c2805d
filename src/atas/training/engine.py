"""The eager engine: runs one training step after the other and keeps count on the device."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from atas.data.resident import Batch
from atas.errors import UsageError
from atas.methods import Adaptive, Method, OptimizerUpdate
from atas.training import recipe
from atas.training.ema import EMA
from atas.training.schedule import learning_rate


def choose_device(name: str) -> torch.device:
    """The device of that name, or for `auto` the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"there is no device '{name}'; use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("this machine has no CUDA device, or this PyTorch was built without CUDA; use device cpu")
    return device


def precision(name: str, device: torch.device) -> AbstractContextManager[object]:
    """Mixed precision where it is asked for. Weights change within a step, so no cast of them may be kept."""
    mixed = name == "bf16" or (name == "auto" and device.type == "cuda")
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=mixed, cache_enabled=False)


class Totals(nn.Module):
    """Sums over the steps of an epoch, on the device: loss, right answers, step sizes, examples."""

    sums: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(4, dtype=torch.float64, device=device))

    def add(self, loss: Tensor, right: Tensor, step_size: Tensor, count: int) -> None:
        """Add one batch; nothing is read back."""
        self.sums += torch.stack(
            [loss.double() * count, right.double(), step_size.double(), self.sums.new_tensor(count)]
        )

    def read(self) -> tuple[float, float, float]:
        """Mean loss, accuracy and step size so far; waits for the device."""
        loss, right, step_size, count = self.sums.tolist()
        return (loss / count, right / count, step_size / count) if count else (0.0, 0.0, 0.0)


class Eager:
    """Method, optimiser, schedule and averaged weights, put together for one step."""

    def __init__(self, settings: recipe.Recipe, model: nn.Module, method: Method, steps_per_epoch: int) -> None:
        self.device = next(model.parameters()).device
        self.model, self.method, self.settings = model, method, settings
        self.total_updates = settings.training.epochs * steps_per_epoch * method.updates_per_step
        self.updates = 0
        self.optimizer = torch.optim.SGD(
            model.parameters(),
            lr=0.0,
            momentum=settings.optimizer.momentum,
            weight_decay=settings.optimizer.weight_decay,
            nesterov=settings.optimizer.nesterov,
        )
        self.ema = EMA(model, settings.training.ema) if settings.training.ema else None
        self.totals = Totals(self.device)
        self._set_rate()

    @property
    def best_model(self) -> nn.Module:
        """The model to evaluate: averaged weights where there are any."""
        return self.model if self.ema is None else self.ema.model

    def precision(self) -> AbstractContextManager[object]:
        """The precision that this run trains in."""
        return precision(self.settings.engine.precision, self.device)

    def learn(self, batch: Batch) -> None:
        """One training step."""
        self.model.train()
        update = OptimizerUpdate(self.optimizer, after=self._after_update)
        with self.precision():
            step = self.method.learn(self.model, update, batch.x, batch.y, batch.index, batch.view)
        zero = self.totals.sums.new_zeros(())
        self.totals.add(
            step.loss,
            (step.logits.argmax(1) == batch.y).sum(),
            self.method.step_sizes[batch.index].sum() if isinstance(self.method, Adaptive) else zero,
            len(batch.y),
        )

    def rate(self) -> float:
        """The learning rate of the next update."""
        return learning_rate(self.settings.schedule, self.updates, self.total_updates)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, by name."""
        parts: dict[str, nn.Module] = {"model": self.model, "method": self.method, "totals": self.totals}
        if self.ema is not None:
            parts["ema"] = self.ema
        found: dict[str, Tensor] = {}
        for part, module in parts.items():
            found |= {f"{part}.{name}": tensor for name, tensor in module.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            momentum = self.optimizer.state.get(parameter, {}).get("momentum_buffer")
            if momentum is not None:
                found[f"momentum.{name}"] = momentum
        return found

    def load_tensors(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Take up where `tensors` were taken, after so many updates."""

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

        self.model.load_state_dict(part("model."))
        self.method.load_state_dict(part("method."))
        self.totals.load_state_dict(part("totals."))
        if self.ema is not None:
            self.ema.load_state_dict(part("ema."))
        momentum = part("momentum.")
        for name, parameter in self.model.named_parameters():
            self.optimizer.state[parameter].clear()
            if name in momentum:
                self.optimizer.state[parameter]["momentum_buffer"] = momentum[name].to(self.device).clone()
        self.updates = updates
        self._set_rate()

    def _after_update(self) -> None:
        self.updates += 1
        if self.ema is not None:
            self.ema.follow(self.model)
        self._set_rate()

    def _set_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
