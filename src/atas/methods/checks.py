"""Checks of a method's arguments: settings, batches of a user's own training loop, and saved state."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

from atas.core.arguments import check_argument, describe, plain_types
from atas.core.augment import View
from atas.core.autograd import contiguous
from atas.core.crop_shift import ShiftView
from atas.core.erasing import ErasedView
from atas.core.perturbations import PerturbationStore
from atas.core.resized_crop import AnyView, BoxView
from atas.core.validation import DeviceChecks, IndexConsistency, check_shapes
from atas.data.loader import Batch
from atas.errors import CheckpointError, DataError, UsageError, first_few
from atas.threat import Threat

if TYPE_CHECKING:
    from atas.methods.base import Method

_MAX_EXAMPLES = 2**40
_CANNOT_LOAD = "this state cannot be loaded: "


class CheckedSettings:
    """A class whose settings are checked by the types that it or a base class declares for them."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Check the types of all settings before any class uses one."""
        kinds = _annotations(cls)  # type: ignore[arg-type]
        for name in settings.keys() & kinds.keys():
            check_argument(name, settings[name], kinds[name])
        return super().__new__(cls)


@functools.cache
def _annotations(kind: type[CheckedSettings]) -> dict[str, Any]:
    """Return the types of the settings of a class and its bases."""
    kinds: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, CheckedSettings) and "__init__" in vars(base):
            kinds |= plain_types(vars(base)["__init__"])
    return kinds


def check_problem(threat: object, examples: int, shape: Sequence[int], pad: int) -> None:
    """Raise UsageError unless a method can train on this number of images of this shape with this threat model."""
    if not isinstance(threat, Threat):
        raise UsageError(f"the first argument is the threat model, such as atas.Linf(8/255); got {threat!r}")
    if threat.unmasked is not threat:
        raise UsageError("training has no mask: pass the threat model without it, and mask only attacks")
    three = isinstance(shape, Sequence) and len(shape) == 3
    whole = three and all(isinstance(number, Integral) for number in (examples, pad, *shape))
    if not whole or not 1 <= examples <= _MAX_EXAMPLES or min(shape) < 1 or pad < 0:
        raise UsageError(
            f"a method needs 1 to {_MAX_EXAMPLES:,} examples, a shape (C, H, W) and pad >= 0, all whole numbers; "
            f"got examples={examples}, shape={shape}, pad={pad}"
        )
    threat.check_budget(shape)


class LoopChecks:
    """Checks of a user's own training loop, which calls `start_epoch`, then `perturb` and `loss`, or `step`."""

    def __init__(self, examples: int) -> None:
        self.perturbs = self.uses_loss = False  # whether `perturb` and `loss` were called in this epoch
        self._epoch_started = False
        self._indices = IndexConsistency(examples)
        self._checked_model: tuple[int, bool] | None = None  # by id: a reference would keep it, and be pickled

    def reset(self) -> None:
        """Forget which example an index names."""
        self._indices.reset()

    def start_epoch(self, checks: DeviceChecks, *, needs_loss: bool) -> None:
        """Raise if a check of the last epoch failed. With `needs_loss`, training without `loss` is an error."""
        if needs_loss and self.perturbs and not self.uses_loss:
            raise UsageError(
                "the last epoch was trained with another loss than method.loss, which has this method's targets and "
                "terms; use loss = method.loss(model(x_adv), y, index)"
            )
        self.perturbs = self.uses_loss = False
        checks.raise_if_set()
        self._indices.check()
        self._epoch_started = True

    def batch(
        self,
        method: Method,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        index: Tensor,
        view: AnyView | None,
        *,
        trains: bool,
    ) -> Batch:
        """Return a batch for a method; raise if model, images, labels, indices or view do not fit it."""
        if not self._epoch_started:
            raise UsageError("call method.start_epoch(epoch, epochs=...) before the first batch of each epoch")
        if self._checked_model != (id(model), trains):  # once, not in every step
            method.check_module(model, trains=trains)
            self._checked_model = id(model), trains
        if index is None:
            raise DataError("indices must be a tensor; got None: pass the position of each image in the training set")
        check_shapes(x, y, index, (method.shape[0], *view.size) if isinstance(view, BoxView) else method.shape)
        for name, tensor in (("labels", y), ("indices", index), ("the method", method.epoch)):
            if tensor.device != x.device:
                raise DataError(f"{name} lives on {tensor.device}, the images on {x.device}: move it there with .to()")
        if not len(x):
            raise DataError("a batch without images has nothing to train on; leave it out")
        view = checked_view(view, x, method.pad)
        method.checks.images(x)
        x = contiguous(x) if x.is_contiguous() else x  # the caller's channels_last stays
        y, index = y.long(), method.checks.index(index.long(), method.examples)
        if method.checks_indices:
            method.checks.distinct(index)
            self._indices.update(index, y)
        return Batch(x, y, index, view)


def known_epochs(what: str, epochs: int | None) -> int:
    """Return the number of all epochs; raise UsageError if `what` depends on it and it is not known."""
    if epochs is None or epochs < 1:
        raise UsageError(f"{what} needs the number of epochs: start_epoch(epoch, epochs=...)")
    return epochs


def check_shown_shape(x: Tensor, shape: Sequence[int], what: str) -> None:
    """Raise DataError unless images have the shape of the stored perturbations; `what` begins the message."""
    if x.shape[1:] != tuple(shape):
        raise DataError(
            f"{what}, {tuple(shape)} here; show the images at that size, or create the method with "
            f"shape={tuple(x.shape[1:])}"
        )


def carried_rows(carried: Tensor, x: Tensor, name: str) -> Tensor:
    """Return the first rows of the perturbations that a method carries from batch to batch, one for each image; `name`
    is the method's name in messages."""
    if len(x) > len(carried):
        raise DataError(
            f"a batch of {len(x)} is larger than the {len(carried)} perturbations that {name} carries along; create "
            f"the method with batch_size={len(x)}"
        )
    check_shown_shape(x, carried.shape[1:], f"{name} carries perturbations of one shape along")
    return carried[: len(x)].to(x.dtype)


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise UsageError unless a part of a method is of its class or None."""
    if value is not None and not isinstance(value, kind):
        raise UsageError(f"{name} must be an atas.methods.{kind.__name__} or None; got {describe(value)}")


def checked_view(view: AnyView | None, x: Tensor, pad: int) -> AnyView:
    """Return the view of a batch, or the centre without one; raise DataError if it does not fit images and method."""
    view = View.centre(len(x), pad, x.device) if view is None else view
    shown = view.view if isinstance(view, ErasedView) else view
    if not isinstance(shown, AnyView):
        raise DataError(f"a view is what atas.random_view gives with the images, or None; got {type(view).__name__}")
    if isinstance(shown, View) and (shown.pad != pad or len(view) != len(x)):
        raise DataError(
            f"a view of {len(view)} images with pad={shown.pad} does not fit {len(x)} images and a method with "
            f"pad={pad}; draw it from this batch and create the method with the same pad"
        )
    if len(view) != len(x) or (isinstance(shown, ShiftView) and shown.size != x.shape[2:]):
        raise DataError(f"a view of {len(view)} images does not fit {len(x)} images; draw it from this batch")
    return view


def check_state_names(module: nn.Module, state: object, *, strict: bool) -> None:
    """Raise CheckpointError unless this is a state dict, and with `strict` one with exactly the module's names."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"a state is what method.state_dict() returns; got {type(state).__name__}")
    own = module.state_dict(keep_vars=True)
    missing, others = own.keys() - state.keys(), state.keys() - own.keys()
    if not strict or not (missing or others):
        return
    found = [f"lacks {first_few(sorted(missing))}"] * bool(missing)
    found += [f"also holds {first_few(sorted(map(str, others)))}"] * bool(others)
    raise CheckpointError(
        f"this is the state of another method: it {' and '.join(found)}; load a state of {type(module).__name__} with "
        f"the same settings"
    )


def check_state_tensors(module: nn.Module, state: Mapping[str, Any], data: str) -> None:
    """Raise CheckpointError for values that do not fit the tensors of their names; `data` describes the module's data.

    Perturbations may have been stored with another `dtype`.
    """
    coded = {f"{name}.delta" for name, part in module.named_modules() if isinstance(part, PerturbationStore)}
    for name, own in module.state_dict(keep_vars=True).items():
        if name not in state:
            continue
        value = state[name]
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{_CANNOT_LOAD}{name} is a {type(value).__name__} in it, not a tensor")
        if value.shape != own.shape:
            raise CheckpointError(
                f"this state is of a method that was made for other data or with other settings: {name} has the shape "
                f"{tuple(value.shape)} in it and {tuple(own.shape)} in this method for {data}; create the method as "
                f"the one that was saved"
            )
        if name not in coded and value.is_floating_point() != own.is_floating_point():
            raise CheckpointError(
                f"{_CANNOT_LOAD}{name} is {value.dtype} in it and {own.dtype} in this method; create the method as the "
                f"one that was saved"
            )
