"""Base classes of training methods.

`Method` is what every method is: a module without parameters whose per-example state is in buffers, and whose
`training_step` calls the engine's `Update`. `InputPerturbation` trains with its loss on perturbed inputs and is defined
by its attack. `PersistentPerturbation` starts each attack from the example's perturbation of the last epoch.

A step of most methods, ATAS among them, is `InputPerturbation.training_step`:

    attack(model, batch)          the method itself: perturbed inputs, from input gradients alone
    loss(logits, y, index)        cross-entropy at these inputs, with `targets` and `consistency` if there are any
    minimize(..., objective)      gradient of this loss, at perturbed weights if the method perturbs them, and update

An engine calls it with its own `Update`; `step` and `perturb` are for a loop of your own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, TypedDict, Unpack

import torch
from torch import Tensor, nn

from atas.core.arguments import check_argument, check_count, check_device, check_seed
from atas.core.autograd import (
    cross_entropy,
    cross_entropy_sum,
    freeze,
    input_gradient,
    keep_statistics,
    set_mode,
    soft_cross_entropy,
)
from atas.core.dispatch import fast_op
from atas.core.perturbations import FullResolution, LowResolution, PerturbationStore, Placement
from atas.core.resized_crop import AnyView
from atas.core.rng import CounterRNG
from atas.core.validation import DeviceChecks, check_logits, check_module, check_trainable, explain_precision
from atas.data.loader import Batch
from atas.distributed.sharding import DataShard
from atas.errors import UsageError
from atas.methods.checks import (
    CheckedSettings,
    LoopChecks,
    check_kind,
    check_problem,
    check_state_names,
    check_state_tensors,
)
from atas.methods.consistency import Consistency
from atas.methods.targets import LabelTargets, make_targets
from atas.methods.update import OptimizerUpdate, Update
from atas.methods.weight_perturbation import FORMS, Directions, WeightGradientTap, WeightPerturbation
from atas.threat import Threat

AttackMode: TypeAlias = Literal["auto", "train", "eval"]  # of the whole model in an attack; auto is the method's own


class CommonArgs(TypedDict, total=False):
    """Arguments of every method besides its own settings."""

    pad: int
    device: torch.device | str | None
    seed: int
    targets: LabelTargets | None
    consistency: Consistency | None


class StepOutput(NamedTuple):
    """Result of a training step: loss, the inputs that the weights were trained on, and their logits."""

    loss: Tensor
    inputs: Tensor
    logits: Tensor


class AttackStart(NamedTuple):
    """Where the attack on a batch began, and the model's logits there."""

    inputs: Tensor
    logits: Tensor


class Method(CheckedSettings, nn.Module, ABC):
    """A training method. It has no parameters; its per-example state is in buffers.

    A buffer with rows has one row for every example, or for every position in a batch, and each of several processes
    holds the rows of its own examples; a module lists its buffers with other rows in `replicated_buffers`. `epoch` and
    `step_scale` are tensors, so a captured CUDA graph sees their changes. `step_scale` shrinks every attack step after
    a run was rolled back because of a collapse. `targets` are what the loss compares logits with, by default the
    labels; `consistency` adds a term to it.
    """

    # What a class says of its attack and its training step
    attack_mode: Literal["train", "eval"] = "train"
    adversarial: ClassVar[bool] = True  # False if the method trains on clean images
    has_start: ClassVar[bool] = False  # True if the attack keeps its logits at the start, for `consistency`
    updates_per_step: int = 1

    # What its passes need of the model
    needs_hooks: ClassVar[bool] = False  # hooks of the model's layers
    needs_second_derivative: ClassVar[bool] = False  # a derivative of the input gradient
    compilable: ClassVar[bool] = True  # False if a pass needs either
    uses_fast_network: bool = True  # False if a pass needs what accelerated networks lack

    # What it keeps of the examples
    checks_indices: bool = False  # True if the method keeps state for each index
    fixed_size: ClassVar[bool] = False  # True if training images must not change their size between epochs
    replicated_buffers: ClassVar[frozenset[str]] = frozenset()  # equal in all processes, such as a row per class

    # What it can be combined with
    own_targets: ClassVar[tuple[str, ...]] = ()  # settings from which the class makes its targets itself
    own_consistency: ClassVar[tuple[str, ...]] = ()  # settings from which it makes its consistency term itself
    weight_perturbations: ClassVar[tuple[str, ...]] = ()  # forms of weight perturbation that its step implements

    # State
    settings_warning: str | None = None  # about steps that cannot work; `atas.train` prints it
    _remembers: bool = True  # whether `loss` updates what the targets remember
    epoch: Tensor
    step_scale: Tensor

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Forget the inherited forms of weight perturbation where a class has a training step of its own."""
        super().__init_subclass__(**keywords)
        if "training_step" in vars(cls) and "weight_perturbations" not in vars(cls):
            cls.weight_perturbations = ()

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        pad: int = 4,
        device: torch.device | str | None = None,
        seed: int = 0,
        targets: LabelTargets | None = None,
        consistency: Consistency | None = None,
    ) -> None:
        super().__init__()
        device, seed = check_device(device), check_seed(seed)
        check_problem(threat, examples, shape, pad)
        self.threat, self.examples, self.shape, self.pad, self.seed = threat, examples, tuple(shape), pad, seed
        self.shard = DataShard(examples)
        self.checks = DeviceChecks(device)
        self._loop = LoopChecks(examples)
        self.current_epoch = -1  # as `epoch`, on the host; an engine sets it earlier
        self._weight_perturbation: WeightPerturbation | None = None
        self.register_buffer("epoch", torch.tensor(-1, device=device))
        self.register_buffer("step_scale", torch.tensor(1.0, device=device))
        check_kind("targets", targets, LabelTargets)
        check_kind("consistency", consistency, Consistency)
        if consistency is not None and not self.has_start:
            raise UsageError(f"{type(self).__name__} has no start to be consistent with; leave out consistency")
        self.targets, self.consistency = targets, None if consistency is None else consistency.to(device)
        if targets is not None:
            targets.setup(examples, device)
            self.checks_indices = self.checks_indices or bool(targets.state_dict())

    @classmethod
    def check_own_parts(cls, given: Mapping[str, Any]) -> None:
        """Raise UsageError if arguments contain targets or consistency that the class makes itself."""
        for part, settings in (("targets", cls.own_targets), ("consistency", cls.own_consistency)):
            if settings and given.get(part) is not None:
                names = ", ".join(settings)
                raise UsageError(f"{cls.__name__} has {part} of its own: set {names}, and leave out {part}")

    # Before the steps

    def check_module(self, model: nn.Module, *, trains: bool = True) -> None:
        """Raise UsageError if this method cannot train the model, or with trains=False perturb its inputs."""
        check_module(model, trains=trains, hooks=self.needs_hooks, second_derivative=self.needs_second_derivative)

    def set_attack_mode(self, mode: AttackMode) -> None:
        """Let attacks run in this mode instead of the method's own, which `auto` stands for."""
        if mode != "auto":
            self.attack_mode = mode

    def set_shard(self, shard: DataShard) -> None:
        """Called by engines before the first step: this method's examples are this shard of the training set, and an
        index is a row of the shard."""
        self.shard = shard
        self._loop.reset()

    def start_epoch(self, epoch: int, epochs: int | None = None) -> None:
        """Start an epoch, counted from 0, of `epochs` in all. Starting the same epoch again, for example after a
        resume, changes nothing."""
        check_argument("epoch", epoch, int)
        check_argument("epochs", epochs, int | None)
        if epoch < 0:
            raise UsageError(f"epochs count from 0; got {epoch}")
        if epochs is not None and 1 <= epochs <= epoch:  # Lightning has -1 for an open end
            raise UsageError(
                f"epoch {epoch}, counted from 0, is beyond the last of epochs={epochs}; pass the number of all epochs "
                f"as epochs, or leave it out"
            )
        is_plain = type(self).loss in (Method.loss, InputPerturbation.loss)
        needs_loss = self.targets is not None or self.consistency is not None or not is_plain
        self._loop.start_epoch(self.checks, needs_loss=needs_loss)
        self.current_epoch = epoch
        for part in (self.targets, self.consistency):
            if part is not None:
                part.start_epoch(epoch, epochs)
        if epoch != int(self.epoch):
            self.epoch.fill_(epoch)
            self.on_new_epoch(epoch, epochs)

    def on_new_epoch(self, epoch: int, epochs: int | None) -> None:
        """Called when an epoch starts for the first time."""

    # A step

    @abstractmethod
    def training_step(self, model: nn.Module, update: Update, batch: Batch) -> StepOutput:
        """Run one training step on checked inputs, with the model in train mode."""

    def perturb(self, model: nn.Module, x: Tensor, y: Tensor, index: Tensor, view: AnyView | None = None) -> Tensor:
        """Return the inputs to train on with `loss`, in your own loop."""
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
        batch = self._loop.batch(self, model, x, y, index, view, trains=True)
        check_trainable(model)
        update = OptimizerUpdate(optimizer)
        self.before_step(batch.index)
        with explain_precision(model, x), set_mode(model, training=True):
            output = self.training_step(model, update, batch)
        self.after_step(batch.index)
        return output

    # Weight perturbation

    @property
    def weight_perturbation(self) -> WeightPerturbation | None:
        """The perturbation of the weights in a training step; None, the default, for none."""
        return self._weight_perturbation

    @weight_perturbation.setter
    def weight_perturbation(self, perturbation: WeightPerturbation | None) -> None:
        check_kind("weight_perturbation", perturbation, WeightPerturbation)
        if perturbation is not None:
            self.check_weight_perturbation(perturbation.form)
        self._weight_perturbation = perturbation

    @property
    def perturbs_weights(self) -> bool:
        """Whether the steps of this epoch perturb weights; known on the host, where engines choose the step to run."""
        perturbation = self.weight_perturbation
        return perturbation is not None and self.current_epoch >= perturbation.from_epoch

    @classmethod
    def check_weight_perturbation(cls, form: str) -> None:
        """Raise UsageError if the method's step does not implement this form of weight perturbation."""
        if form not in cls.weight_perturbations:
            possible = ", ".join(cls.weight_perturbations) or "none"
            raise UsageError(
                f"{cls.__name__} cannot perturb weights in the form {form}; forms that it supports: {possible}"
            )

    def perturbed_weights(
        self,
        model: nn.Module,
        update: Update,
        objective: Callable[[], Tensor] | None = None,
        attack_gradients: Directions | None = None,
    ) -> AbstractContextManager[None]:
        """Return a context for the passes that weights are trained on, with the method's weight perturbation if it has
        one. `objective` returns the loss of these passes."""
        if self.weight_perturbation is None or not self.perturbs_weights:
            return nullcontext()

        def first_loss() -> Tensor:
            with self.keep_targets():
                return objective()  # type: ignore[misc]

        first = None if objective is None else first_loss
        return self.weight_perturbation.around(model, update, first, attack_gradients)

    def minimize(
        self,
        model: nn.Module,
        update: Update,
        objective: Callable[[], tuple[Tensor, Tensor]],
        *inputs: Tensor,
        attack_gradients: Directions | None = None,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Update the weights with the gradient of an objective, at perturbed weights if the method perturbs them.

        `objective` returns loss and logits; a weight perturbation may call it twice. Return both, and the gradients of
        `inputs`.
        """
        with self.perturbed_weights(model, update, lambda: objective()[0], attack_gradients):
            loss, logits = objective()
            gradients = update.backward(loss, *inputs)
        update.apply()
        return loss, logits, gradients

    # For engines

    def prefetch(self, index: Tensor) -> None:
        """Called by engines: the next step is on these examples, so their state can be fetched already."""

    def before_step(self, index: Tensor) -> None:
        """Called by engines just before a step on these examples."""

    def after_step(self, index: Tensor) -> None:
        """Called by engines once the step on these examples was queued."""

    def sharded_tensors(self) -> set[str]:
        """Return the names of the tensors of the state that have rows of a process's own examples or positions."""
        replicated = {
            f"{prefix}.{name}".removeprefix(".")
            for prefix, module in self.named_modules()
            for name in getattr(module, "replicated_buffers", ())
        }
        return {name for name, tensor in self.state_dict(keep_vars=True).items() if tensor.dim()} - replicated

    @property
    def step_sizes(self) -> Tensor | None:
        """The last step size of every example, for methods with adaptive step sizes."""
        return None

    def average_decay(self, decay: float) -> float | Tensor:
        """Return the decay of averaged weights in this step, given the usual one (`training.ema`)."""
        return decay

    def shrink_steps(self, factor: float) -> None:
        """Multiply all later attack steps by this factor."""
        check_argument("factor", factor, float)
        self.step_scale.mul_(factor)

    # Losses

    def loss(self, logits: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Return the training loss of these examples: mean cross-entropy with the labels, or with `targets`.

        Call it once for a training batch, as it updates what the targets remember; see also `keep_targets`.
        """
        self._loop.uses_loss = True
        y = self.checks.labels(y, check_logits(logits, len(y)).shape[1])
        if self.targets is None:
            return cross_entropy(logits, y)
        index = self.checks.index(index.long(), self.examples)
        targets = make_targets(self.targets, logits.detach(), y.long(), index, self.rng(index), self._remembers)
        return soft_cross_entropy(logits, targets)

    def teach(self, teacher: nn.Module, x: Tensor) -> AbstractContextManager[None]:
        """Return a context for the losses of a batch, in which targets of a teacher (`EMATeacher`) know its predictions
        for the clean images."""
        return nullcontext() if self.targets is None else self.targets.teach(teacher, x)

    @contextmanager
    def keep_targets(self) -> Iterator[None]:
        """Let `loss` change no state inside the context: for a further evaluation of the loss within a step."""
        before, self._remembers = self._remembers, False
        try:
            yield
        finally:
            self._remembers = before

    def attack_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the attack loss: summed cross-entropy, so an example's gradient does not depend on its batch."""
        return cross_entropy_sum(logits, self.checks.labels(y, check_logits(logits, len(y)).shape[1]))

    def rng(self, index: Tensor, draw: int = 0) -> CounterRNG:
        """Return the random numbers of these examples in this epoch; `draw` numbers independent ones, for methods that
        need several."""
        return CounterRNG(self.seed, self.epoch, self.shard.global_index(index) + draw * self.shard.examples)

    # State

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Restore the state that `state_dict` of such a method returned.

        Perturbations may have been stored with another `dtype`.
        """
        check_state_names(self, state_dict, strict=strict)
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        state = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        check_state_tensors(self, state, f"{self.examples} examples of shape {self.shape}")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._loop.reset()


class InputPerturbation(Method):
    """A method that trains with its loss on perturbed inputs. Subclasses implement `attack`."""

    _start: AttackStart | None = None  # of the current batch, if its loss uses it
    _update: Update | None = None  # of the training step that runs

    weight_perturbations = FORMS

    @abstractmethod
    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the perturbed inputs. The model is in `attack_mode` and its weights are frozen."""

    def perturb(self, model: nn.Module, x: Tensor, y: Tensor, index: Tensor, view: AnyView | None = None) -> Tensor:
        """Return the inputs to train on with `loss`, in your own loop; costs one attack."""
        if self.weight_perturbation is not None:
            raise UsageError(
                "perturb returns inputs only, and this method also perturbs weights: use method.step, or "
                "weight_perturbation.around in your own step"
            )
        if self.consistency is not None and self.consistency.through == "both":
            raise UsageError('consistency through "both" takes another pass: use method.step instead')
        batch = self._loop.batch(self, model, x, y, index, view, trains=False)
        self._loop.perturbs = True
        self.before_step(batch.index)
        with explain_precision(model, x):
            perturbed = self._attack(model, batch)
        self.after_step(batch.index)
        return perturbed

    def training_step(self, model: nn.Module, update: Update, batch: Batch) -> StepOutput:
        """Attack, then update the weights with the loss at the perturbed inputs."""

        def objective() -> tuple[Tensor, Tensor]:
            logits = self._logits(model, inputs)
            return self.loss(logits, batch.y, batch.index), logits

        self._update = update
        try:
            inputs, gradients = self._attack_with_gradients(model, update, batch)
            loss, logits, _ = self.minimize(model, update, objective, attack_gradients=gradients)
        finally:
            self._update = None
        return StepOutput(loss.detach(), inputs, logits.detach())

    def total(self, *sums: Tensor) -> Sequence[Tensor]:
        """Return sums over the global batch, given sums over this process's examples. In a user's own loop they are
        equal."""
        return [value.detach() for value in sums] if self._update is None else self._update.total(*sums)

    def batchnorm_inputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the inputs for re-estimating BatchNorm statistics, by an attack in eval mode that does not change the
        state of the method."""
        with set_mode(model, training=False), freeze(model), keep_statistics(self):
            return self.attack(model, batch).detach()

    def start_gradient(
        self, model: nn.Module, start: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return the input gradient of the attack's loss at its start, and keep the logits for `consistency`. `loss`
        replaces `attack_loss`; it must be summed over the batch, too."""
        gradient, logits = input_gradient(model, start, y, loss or self.attack_loss)
        if self.consistency is not None:
            self._keep_start(start, logits)
        return gradient

    def _keep_start(self, inputs: Tensor, logits: Tensor) -> None:
        """Keep where the attack began until `loss` takes it."""
        self._start = AttackStart(inputs, logits)

    def loss(self, logits: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Return the loss at the perturbed inputs of the last attack, with the consistency term if there is one."""
        loss = super().loss(logits, y, index)
        if self.consistency is None:
            return loss
        return loss + self.consistency(logits, self._start_logits("consistency", len(logits)))

    def _start_logits(self, what: str, count: int) -> Tensor:
        """Return the logits at the start of the attack on this batch, which a training step uses once in `what`."""
        if self._start is None or len(self._start.logits) != count:
            raise UsageError(f"{what} needs the start of this batch's attack: call method.perturb on it first")
        logits = self._start.logits
        if self._remembers:
            self._start = None
        return logits

    def _logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Run the model at the perturbed inputs, and before at the start if consistency goes through both."""
        if self._start is not None and self.consistency is not None and self.consistency.through == "both":
            self._keep_start(self._start.inputs, model(self._start.inputs))
        return model(inputs)

    def _attack(self, model: nn.Module, batch: Batch) -> Tensor:
        with set_mode(model, training=self.attack_mode == "train"), freeze(model):
            return self.attack(model, batch).detach()

    def _attack_with_gradients(
        self, model: nn.Module, update: Update, batch: Batch
    ) -> tuple[Tensor, Directions | None]:
        """Attack; return also the weight gradients of its last pass if the weight perturbation needs them."""
        perturbation = self.weight_perturbation if self.perturbs_weights else None
        if perturbation is None or perturbation.form != "attack":
            return self._attack(model, batch), None
        tap = WeightGradientTap(model, update)
        with set_mode(model, training=self.attack_mode == "train"):
            return self.attack(tap, batch).detach(), tap.gradients


class PersistentPerturbation(InputPerturbation):
    """A method whose attack starts from the example's perturbation of the last epoch.

    Perturbations start as uniform noise and are reset to new noise every `reset_every` epochs, as in the code of ATTA
    and ATAS: at the start of the 10th, 20th, ... epoch, but never of the last. `grid` stores them on `grid` x `grid`
    cells instead of every pixel, for images that are resampled. `store` keeps them on the device or in host memory.
    With `write_back=False` the new perturbations are dropped, so each attack starts from the noise of the last reset:
    the released ImageNet code of ATAS does so, by mistake.
    """

    attack_mode = "eval"
    checks_indices = True
    has_start = True

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
        write_back: bool = True,
        attack_mode: AttackMode = "auto",
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        self.set_attack_mode(attack_mode)
        self.write_back = write_back
        self.reset_every = check_count("reset_every", reset_every)
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

    def batchnorm_inputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the images with their stored perturbations, which costs no attack."""
        return self.load_start(batch.x, batch.index, batch.view)

    def load_start(self, x: Tensor, index: Tensor, view: AnyView) -> Tensor:
        """Return the start of the attack: the image with its stored perturbation."""
        return projected_start(self.memory, x, index, view)


@fast_op
def projected_start(memory: PerturbationStore, x: Tensor, index: Tensor, view: AnyView) -> Tensor:
    """Add the stored perturbations to the images and project."""
    return memory.threat.project(x + memory.load(index, view, x.dtype), x)
