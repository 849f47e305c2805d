"""Base classes of training methods, and the interface between a method and an engine.

`Method` is what every method is: a module without parameters whose per-example state is in buffers, and whose
`training_step` calls the engine's `Update`. `InputPerturbation` trains with cross-entropy on perturbed inputs and is
defined by its attack. `PersistentPerturbation` starts each attack from the example's perturbation of the last epoch.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypedDict, Unpack

import torch
from torch import Tensor, nn

from atas.core.augment import View
from atas.core.autograd import contiguous, cross_entropy, cross_entropy_sum, freeze, set_mode
from atas.core.dispatch import fast_op
from atas.core.perturbations import FullResolution, LowResolution, PerturbationStore, Placement
from atas.core.resized_crop import AnyView, BoxView
from atas.core.rng import CounterRNG
from atas.core.validation import (
    DeviceChecks,
    IndexConsistency,
    check_argument,
    check_count,
    check_device,
    check_logits,
    check_module,
    check_optimizer,
    check_seed,
    check_shapes,
    check_trainable,
    explain_precision,
    plain_types,
)
from atas.data.loader import Batch
from atas.distributed.sharding import DataShard
from atas.errors import CheckpointError, DataError, UsageError, first_few
from atas.threat import Threat

_CANNOT_LOAD = "this state cannot be loaded: "


class CommonArgs(TypedDict, total=False):
    """Arguments of every method besides its own settings."""

    pad: int
    device: torch.device | str | None
    seed: int


class StepOutput(NamedTuple):
    """Result of a training step: loss, the inputs that the weights were trained on, and their logits."""

    loss: Tensor
    inputs: Tensor
    logits: Tensor


class Update(Protocol):
    """The engine's part of a training step: gradients, all-reduce, optimiser.

    Methods call it and know nothing of precision, processes or CUDA graphs.
    """

    def backward(self, loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Accumulate weight gradients of the loss, and return its gradients with respect to `inputs`."""

    def apply(self) -> None:
        """Update the weights with the accumulated gradients."""

    def __call__(self, loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Call `backward`, then `apply`."""


class OptimizerUpdate:
    """An `Update` around a torch optimiser."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer)
        self._optimizer = optimizer
        optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Accumulate weight gradients in `.grad`, as `loss.backward()` does."""
        for tensor in inputs:
            tensor.retain_grad()
        loss.backward()
        gradients = tuple(tensor.grad for tensor in inputs if tensor.grad is not None)
        for tensor in inputs:
            tensor.grad = None
        return gradients

    def apply(self) -> None:
        """Take one optimiser step."""
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def __call__(self, loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Call `backward`, then `apply`."""
        gradients = self.backward(loss, *inputs)
        self.apply()
        return gradients


@functools.cache
def _annotations(method: type[Method]) -> dict[str, Any]:
    """Return the types of the settings of a method's class and its bases."""
    kinds: dict[str, Any] = {}
    for base in reversed(method.__mro__):
        kinds |= plain_types(vars(base)["__init__"]) if issubclass(base, Method) and "__init__" in vars(base) else {}
    return kinds


class Method(nn.Module, ABC):
    """A training method. It has no parameters; its per-example state is in buffers.

    A buffer with rows has one row for every example, or for every position in a batch. Each of several processes holds
    the rows of its own examples. `epoch` and `step_scale` are tensors, so a captured CUDA graph sees their changes.
    `step_scale` shrinks every attack step after a run was rolled back because of a collapse.
    """

    attack_mode: ClassVar[Literal["train", "eval"]] = "train"
    adversarial: ClassVar[bool] = True  # False if the method trains on clean images
    compilable: ClassVar[bool] = True  # False if a pass needs hooks or a second derivative
    needs_hooks: ClassVar[bool] = False  # True if a pass needs hooks of the model's layers
    needs_second_derivative: ClassVar[bool] = False  # True if the input gradient is differentiated
    checks_indices: bool = False  # True if the method keeps state for each index
    uses_fast_network: bool = True  # False if a pass needs what accelerated networks lack
    updates_per_step: int = 1
    epoch: Tensor
    step_scale: Tensor

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Check the types of all settings, whichever class of the method declares them."""
        kinds = _annotations(cls)
        for name in settings.keys() & kinds.keys():
            check_argument(name, settings[name], kinds[name])
        return super().__new__(cls)

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        pad: int = 4,
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        device, seed = check_device(device), check_seed(seed)
        if not isinstance(threat, Threat):
            raise UsageError(f"the first argument is the threat model, such as atas.Linf(8/255); got {threat!r}")
        three = isinstance(shape, Sequence) and len(shape) == 3
        whole = three and all(isinstance(number, Integral) for number in (examples, pad, *shape))
        if not whole or examples < 1 or min(shape) < 1 or pad < 0:
            raise UsageError(
                f"a method needs examples >= 1, a shape (C, H, W) and pad >= 0, all whole numbers; "
                f"got examples={examples}, shape={shape}, pad={pad}"
            )
        threat.check_budget(shape)
        self.threat, self.examples, self.shape, self.pad, self.seed = threat, examples, tuple(shape), pad, seed
        self.shard = DataShard(examples)
        self.checks = DeviceChecks(device)
        self._index_check = IndexConsistency(examples)
        self._epoch_started = False
        self._checked_model: tuple[int, bool] | None = None  # by id: a reference would keep it, and be pickled
        self.register_buffer("epoch", torch.tensor(-1, device=device))
        self.register_buffer("step_scale", torch.tensor(1.0, device=device))

    def check_module(self, model: nn.Module, *, trains: bool = True) -> None:
        """Raise UsageError if this method cannot train the model, or with trains=False perturb its inputs."""
        check_module(model, trains=trains, hooks=self.needs_hooks, second_derivative=self.needs_second_derivative)

    def set_shard(self, shard: DataShard) -> None:
        """Called by engines before the first step: this method's examples are this shard of the training set, and an
        index is a row of the shard."""
        self.shard = shard
        self._index_check.reset()

    def start_epoch(self, epoch: int, epochs: int | None = None) -> None:
        """Start an epoch, counted from 0, of `epochs` in all. Starting the same epoch again, for example after a
        resume, changes nothing."""
        check_argument("epoch", epoch, int)
        check_argument("epochs", epochs, int | None)
        if epoch < 0:
            raise UsageError(f"epochs count from 0; got {epoch}")
        if epochs is not None and 1 <= epochs <= epoch:  # Lightning has -1 for an open end
            raise UsageError(
                f"epoch {epoch}, counted from 0, is beyond the last of epochs={epochs}; give the number of all epochs "
                f"as epochs, or leave it out"
            )
        self.checks.raise_if_set()
        self._index_check.check()
        self._epoch_started = True
        if epoch != int(self.epoch):
            self.epoch.fill_(epoch)
            self.on_new_epoch(epoch, epochs)

    def on_new_epoch(self, epoch: int, epochs: int | None) -> None:
        """Called when an epoch starts for the first time."""

    @abstractmethod
    def training_step(self, model: nn.Module, update: Update, batch: Batch) -> StepOutput:
        """Run one training step on checked inputs, with the model in train mode."""

    def perturb(self, model: nn.Module, x: Tensor, y: Tensor, index: Tensor, view: AnyView | None = None) -> Tensor:
        """Return the inputs to train on with cross-entropy, in your own loop."""
        raise UsageError(f"{type(self).__name__} trains on more than perturbed inputs: use method.step instead")

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        x: Tensor,
        y: Tensor,
        index: Tensor,
        view: AnyView | None = None,
    ) -> StepOutput:
        """Run one whole training step, whatever the method needs: attack, loss, backward passes, optimiser."""
        batch = self._checked(model, x, y, index, view, trains=True)
        check_trainable(model)
        update = OptimizerUpdate(optimizer)
        self.before_step(batch.index)
        with explain_precision(model, x), set_mode(model, training=True):
            output = self.training_step(model, update, batch)
        self.after_step(batch.index)
        return output

    def prefetch(self, index: Tensor) -> None:
        """Called by engines: the next step is on these examples, so their state can be fetched already."""

    def before_step(self, index: Tensor) -> None:
        """Called by engines just before a step on these examples."""

    def after_step(self, index: Tensor) -> None:
        """Called by engines once the step on these examples was queued."""

    @property
    def step_sizes(self) -> Tensor | None:
        """The last step size of every example, for methods with adaptive step sizes."""
        return None

    def shrink_steps(self, factor: float) -> None:
        """Multiply all later attack steps by this factor."""
        check_argument("factor", factor, float)
        self.step_scale.mul_(factor)

    def loss(self, logits: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Return the training loss of these examples: mean cross-entropy with the labels."""
        return cross_entropy(logits, self.checks.labels(y, check_logits(logits, len(y)).shape[1]))

    def attack_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the attack loss: summed cross-entropy, so an example's gradient does not depend on its batch."""
        return cross_entropy_sum(logits, self.checks.labels(y, check_logits(logits, len(y)).shape[1]))

    def rng(self, index: Tensor) -> CounterRNG:
        """Return the random numbers of these examples in this epoch."""
        return CounterRNG(self.seed, self.epoch, self.shard.global_index(index))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Restore the state that `state_dict` of such a method returned.

        Perturbations may have been stored with another `dtype`.
        """
        if not isinstance(state_dict, Mapping):
            raise CheckpointError(f"a state is what method.state_dict() returns; got {type(state_dict).__name__}")
        own = self.state_dict(keep_vars=True)
        missing, others = [list(names) for names in (own.keys() - state_dict.keys(), state_dict.keys() - own.keys())]
        if strict and (missing or others):
            lacks, holds = first_few(sorted(missing)), first_few(sorted(map(str, others)))
            found = [f"lacks {lacks}"] * bool(missing) + [f"also holds {holds}"] * bool(others)
            raise CheckpointError(
                f"this is the state of another method: it {' and '.join(found)}; load a state of "
                f"{type(self).__name__} with the same settings"
            )
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        coded = {f"{name}.delta" for name, part in self.named_modules() if isinstance(part, PerturbationStore)}
        for name, own in self.state_dict(keep_vars=True).items():
            if prefix + name not in state_dict:
                continue
            given = state_dict[prefix + name]
            if not isinstance(given, Tensor):
                raise CheckpointError(f"{_CANNOT_LOAD}{name} is a {type(given).__name__} in it, not a tensor")
            if given.shape != own.shape:
                raise CheckpointError(
                    f"this state is of a method that was made for other data or with other settings: {name} has the "
                    f"shape {tuple(given.shape)} in it and {tuple(own.shape)} in this method for {self.examples} "
                    f"examples of shape {self.shape}; create the method as the one that was saved"
                )
            if name not in coded and given.is_floating_point() != own.is_floating_point():
                raise CheckpointError(
                    f"{_CANNOT_LOAD}{name} is {given.dtype} in it and {own.dtype} in this "
                    f"method; create the method as the one that was saved"
                )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._index_check.reset()

    def _checked(
        self, model: nn.Module, x: Tensor, y: Tensor, index: Tensor, view: AnyView | None, *, trains: bool
    ) -> Batch:
        if not self._epoch_started:
            raise UsageError("call method.start_epoch(epoch, epochs=...) before the first batch of each epoch")
        if self._checked_model != (id(model), trains):  # once, not in every step
            self.check_module(model, trains=trains)
            self._checked_model = id(model), trains
        check_shapes(x, y, index, (self.shape[0], *view.size) if isinstance(view, BoxView) else self.shape)
        for name, tensor in (("labels", y), ("indices", index), ("the method", self.epoch)):
            if tensor.device != x.device:
                raise DataError(f"{name} lives on {tensor.device}, the images on {x.device}: move it there with .to()")
        if not len(x):
            raise DataError("a batch without images has nothing to train on; leave it out")
        if view is None:
            view = View.centre(len(x), self.pad, x.device)
        elif isinstance(view, BoxView):
            if len(view) != len(x):
                raise DataError(f"a view of {len(view)} images does not fit {len(x)} images; draw it from this batch")
        elif not isinstance(view, View):
            raise DataError(
                f"a view is what atas.random_view gives with the images, or None; got {type(view).__name__}"
            )
        elif view.pad != self.pad or len(view) != len(x):
            raise DataError(
                f"a view of {len(view)} images with pad={view.pad} does not fit {len(x)} images and a method with "
                f"pad={self.pad}; draw it from this batch and create the method with the same pad"
            )
        self.checks.images(x)
        x = contiguous(x) if x.is_contiguous() else x  # the caller's channels_last stays
        y, index = y.long(), self.checks.index(index.long(), self.examples)
        if self.checks_indices:
            self.checks.distinct(index)
            self._index_check.update(index, y)
        return Batch(x, y, index, view)


class InputPerturbation(Method):
    """A method that trains with cross-entropy on perturbed inputs. Subclasses implement `attack`."""

    @abstractmethod
    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the perturbed inputs. The model is in `attack_mode` and its weights are frozen."""

    def perturb(self, model: nn.Module, x: Tensor, y: Tensor, index: Tensor, view: AnyView | None = None) -> Tensor:
        """Return the inputs to train on with cross-entropy, in your own loop; costs one attack."""
        batch = self._checked(model, x, y, index, view, trains=False)
        self.before_step(batch.index)
        with explain_precision(model, x):
            perturbed = self._attack(model, batch)
        self.after_step(batch.index)
        return perturbed

    def training_step(self, model: nn.Module, update: Update, batch: Batch) -> StepOutput:
        """Attack, then update the weights with the loss at the perturbed inputs."""
        inputs = self._attack(model, batch)
        logits = model(inputs)
        loss = self.loss(logits, batch.y, batch.index)
        update(loss)
        return StepOutput(loss.detach(), inputs, logits.detach())

    def _attack(self, model: nn.Module, batch: Batch) -> Tensor:
        with set_mode(model, training=self.attack_mode == "train"), freeze(model):
            return self.attack(model, batch).detach()


class PersistentPerturbation(InputPerturbation):
    """A method whose attack starts from the example's perturbation of the last epoch.

    Perturbations start as uniform noise and are reset to new noise every `reset_every` epochs, as in the code of ATTA
    and ATAS: at the start of the 10th, 20th, ... epoch, but never of the last. `grid` stores them on `grid` x `grid`
    cells instead of every pixel, for images that are resampled. `store` keeps them on the device or in host memory.
    """

    attack_mode = "eval"
    checks_indices = True

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        reset_every: int,
        dtype: torch.dtype | Literal["auto"],
        grid: int | None = None,
        store: Placement = "device",
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        self.reset_every = check_count("reset_every", reset_every)
        if dtype == "auto":
            dtype = torch.int8 if threat.fits_int8 else torch.float16
        device = common.get("device")
        self.memory: PerturbationStore = (
            FullResolution(threat, examples, shape, pad=self.pad, dtype=dtype, device=device, store=store)
            if grid is None
            else LowResolution(threat, examples, shape, grid=grid, dtype=dtype, device=device, store=store)
        )
        self.memory.reset(self.seed, 0, self.shard.global_index)

    def set_shard(self, shard: DataShard) -> None:
        """Start with the noise of this shard's examples."""
        super().set_shard(shard)
        self.memory.reset(self.seed, 0, self.shard.global_index)

    def on_new_epoch(self, epoch: int, epochs: int | None) -> None:
        """Reset the perturbations when it is due."""
        number = epoch + 1  # as the authors count
        if number % self.reset_every == 0 and epoch > 0 and number != epochs:
            self.memory.reset(self.seed, epoch, self.shard.global_index)

    def prefetch(self, index: Tensor) -> None:
        """Start fetching perturbations from the host."""
        self.memory.prefetch(index)

    def before_step(self, index: Tensor) -> None:
        """Make the perturbations available on the device."""
        self.memory.before_step(index)

    def after_step(self, index: Tensor) -> None:
        """Start writing the new perturbations back to the host."""
        self.memory.after_step(index)

    def load_start(self, x: Tensor, index: Tensor, view: AnyView) -> Tensor:
        """Return the start of the attack: the image with its stored perturbation."""
        return projected_start(self.memory, x, index, view)


@fast_op
def projected_start(memory: PerturbationStore, x: Tensor, index: Tensor, view: AnyView) -> Tensor:
    """Add the stored perturbations to the images and project."""
    return memory.threat.project(x + memory.load(index, view, x.dtype), x)
