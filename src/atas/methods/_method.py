"""What every training method is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor, nn

from atas.augment import View
from atas.boxes import AnyView, BoxView
from atas.checks import Constancy, Guard, check_shapes, checked_logits, low_precision_named
from atas.errors import CheckpointError, DataError, UsageError
from atas.noise import Draw
from atas.parts import Part
from atas.passes import cross_entropy, cross_entropy_sum, frozen, mode
from atas.threat import Threat


class Common(TypedDict, total=False):
    """What every method takes besides its own settings."""

    pad: int
    device: torch.device | str | None
    seed: int


class Step(NamedTuple):
    """What one training step did: the loss, the inputs that the weights learnt from, and the logits there."""

    loss: Tensor
    inputs: Tensor
    logits: Tensor


class Update(Protocol):
    """How weights change; the engine's part of a step. Methods know nothing of precision, processes or graphs."""

    def backward(self, loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Add the loss's weight gradients to those collected, and return its gradients for `inputs`."""

    def apply(self) -> None:
        """Change the weights by the collected gradients."""

    def __call__(self, loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Both at once."""


class OptimizerUpdate:
    """An `Update` around an optimiser; `after` is called when the weights have changed."""

    def __init__(self, optimizer: torch.optim.Optimizer, after: Callable[[], None] | None = None) -> None:
        self._optimizer, self._after = optimizer, after
        optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Collect weight gradients in `.grad`, as `loss.backward()` does."""
        for tensor in inputs:
            tensor.retain_grad()
        loss.backward()
        gradients = tuple(tensor.grad for tensor in inputs if tensor.grad is not None)
        for tensor in inputs:
            tensor.grad = None
        return gradients

    def apply(self) -> None:
        """One step of the optimiser."""
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._after is not None:
            self._after()

    def __call__(self, loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Collect and apply."""
        gradients = self.backward(loss, *inputs)
        self.apply()
        return gradients


class Method(nn.Module, ABC):
    """A way to train a robust model. It has no parameters; what it remembers of each example is in buffers. A buffer
    with rows has one for every example, or for every place in a batch: several processes each have their own.

    `epoch` and `step_scale` are tensors so that a captured step follows them; `step_scale` shrinks every attack step
    when a run is rolled back after a collapse.
    """

    attack_mode: ClassVar[Literal["train", "eval"]] = "train"
    compilable: ClassVar[bool] = True  # False where a pass of the model needs hooks or a second derivative
    checks_indices: bool = False  # True where an index leads to what was kept of its example
    by_kernels: bool = True  # False where a pass needs what even our networks' kernels do not have
    updates_per_step: int = 1
    epoch: Tensor
    step_scale: Tensor

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
        if not isinstance(threat, Threat):
            raise UsageError(f"the first argument is the threat model, such as atas.Linf(8/255); got {threat!r}")
        three = isinstance(shape, Sequence) and len(shape) == 3
        whole = three and all(isinstance(number, Integral) for number in (examples, pad, *shape))
        if not whole or examples < 1 or min(shape) < 1 or pad < 0:
            raise UsageError(
                f"a method needs examples >= 1, a shape (C, H, W) and pad >= 0, all whole numbers; "
                f"got examples={examples}, shape={shape}, pad={pad}"
            )
        threat.check_images(shape)
        self.threat, self.examples, self.shape, self.pad, self.seed = threat, examples, tuple(shape), pad, seed
        self.part = Part(examples)
        self.guard = Guard(device)
        self._constancy = Constancy(examples)
        self._begun = False
        self.register_buffer("epoch", torch.tensor(-1, device=device))
        self.register_buffer("step_scale", torch.tensor(1.0, device=device))

    def own(self, part: Part) -> None:
        """For engines, before the first step: the examples that this method was made for are a part of the training
        set; an index is a row of it."""
        self.part = part
        self._constancy.forget()

    def start_epoch(self, epoch: int, epochs: int | None = None) -> None:
        """Begin an epoch, counted from 0; `epochs` is how many there will be. Once an epoch has begun, calling this
        for it again, after a resume for example, changes nothing."""
        if epoch < 0:
            raise UsageError(f"epochs count from 0; got {epoch}")
        if epochs is not None and 1 <= epochs <= epoch:  # Lightning has -1 for an open end
            raise UsageError(
                f"epoch {epoch}, counted from 0, is beyond the last of epochs={epochs}; give the number of all epochs "
                f"as epochs, or leave it out"
            )
        self.guard.raise_if_set()
        self._constancy.check()
        self._begun = True
        if epoch != int(self.epoch):
            self.epoch.fill_(epoch)
            self.on_new_epoch(epoch, epochs)

    def on_new_epoch(self, epoch: int, epochs: int | None) -> None:
        """What a method does when an epoch begins for the first time."""

    @abstractmethod
    def learn(self, model: nn.Module, update: Update, x: Tensor, y: Tensor, index: Tensor, view: AnyView) -> Step:
        """One whole training step on checked inputs, with the model in train mode."""

    def perturb(self, model: nn.Module, x: Tensor, y: Tensor, index: Tensor, view: AnyView | None = None) -> Tensor:
        """The inputs to train on with cross-entropy, in your own loop."""
        raise UsageError(f"{type(self).__name__} trains on more than perturbed inputs: use method.step instead")

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        x: Tensor,
        y: Tensor,
        index: Tensor,
        view: AnyView | None = None,
    ) -> Step:
        """One whole training step, whatever the method needs: attack, loss, backward passes, optimiser."""
        y, index, view = self._checked(x, y, index, view)
        self.before_step(index)
        with low_precision_named(model, x), mode(model, training=True):
            done = self.learn(model, OptimizerUpdate(optimizer), x, y, index, view)
        self.after_step(index)
        return done

    def prefetch(self, index: Tensor) -> None:
        """For engines: the next step will be on these examples. What lives elsewhere may be on its way by then."""

    def before_step(self, index: Tensor) -> None:
        """For engines: a step on these examples, on the host or the device, follows."""

    def after_step(self, index: Tensor) -> None:
        """For engines: the step on these examples has been asked of the device."""

    def shrink_steps(self, factor: float) -> None:
        """Multiply every later attack step by this factor."""
        self.step_scale.mul_(factor)

    def mean_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy as the weights see it."""
        return cross_entropy(logits, self.guard.labels(y, checked_logits(logits, len(y)).shape[1]))

    def summed_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy as the attack sees it: an example's gradient does not depend on its batch."""
        return cross_entropy_sum(logits, self.guard.labels(y, checked_logits(logits, len(y)).shape[1]))

    def draw(self, index: Tensor) -> Draw:
        """The random numbers of these examples in this epoch."""
        return Draw(self.seed, self.epoch, self.part.numbers(index))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name, own in self.state_dict(keep_vars=True).items():
            given = state_dict.get(prefix + name)
            if isinstance(given, Tensor) and given.shape != own.shape:
                raise CheckpointError(
                    f"this state is of a method that was made for other data or with other settings: {name} has the "
                    f"shape {tuple(given.shape)} in it and {tuple(own.shape)} in this method for {self.examples} "
                    f"examples of shape {self.shape}; create the method as the one that was saved"
                )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._constancy.forget()

    def _checked(self, x: Tensor, y: Tensor, index: Tensor, view: AnyView | None) -> tuple[Tensor, Tensor, AnyView]:
        if not self._begun:
            raise UsageError("call method.start_epoch(epoch, epochs=...) before the first batch of each epoch")
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
        self.guard.images(x)
        y, index = y.long(), self.guard.index(index.long(), self.examples)
        if self.checks_indices:
            self._constancy.note(index, y)
        return y, index, view


class Perturbing(Method):
    """A method that trains with cross-entropy on perturbed inputs; it is defined by its attack."""

    @abstractmethod
    def attack(self, model: nn.Module, x: Tensor, y: Tensor, index: Tensor, view: AnyView) -> Tensor:
        """The perturbed inputs. The model is in the method's attack mode and its weights take no gradient."""

    def perturb(self, model: nn.Module, x: Tensor, y: Tensor, index: Tensor, view: AnyView | None = None) -> Tensor:
        """The inputs to train on with cross-entropy, in your own loop; costs one attack."""
        y, index, view = self._checked(x, y, index, view)
        self.before_step(index)
        with low_precision_named(model, x):
            perturbed = self._attack(model, x, y, index, view)
        self.after_step(index)
        return perturbed

    def learn(self, model: nn.Module, update: Update, x: Tensor, y: Tensor, index: Tensor, view: AnyView) -> Step:
        """Perturb, then one update with the mean cross-entropy there."""
        inputs = self._attack(model, x, y, index, view)
        logits = model(inputs)
        loss = self.mean_loss(logits, y)
        update(loss)
        return Step(loss.detach(), inputs, logits.detach())

    def _attack(self, model: nn.Module, x: Tensor, y: Tensor, index: Tensor, view: AnyView) -> Tensor:
        with mode(model, training=self.attack_mode == "train"), frozen(model):
            return self.attack(model, x, y, index, view).detach()
