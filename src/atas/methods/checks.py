"""Checks of what a method is given: settings, epochs, views of a batch, and saved state."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor, nn

from atas.core.augment import View
from atas.core.crop_shift import ShiftView
from atas.core.erasing import ErasedView
from atas.core.perturbations import PerturbationStore
from atas.core.resized_crop import AnyView
from atas.core.validation import check_argument, describe, plain_types
from atas.errors import CheckpointError, DataError, UsageError, first_few

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


def known_epochs(what: str, epochs: int | None) -> int:
    """Return the number of all epochs; raise UsageError if it is not known, where something depends on it."""
    if epochs is None or epochs < 1:
        raise UsageError(f"{what} needs the number of epochs: start_epoch(epoch, epochs=...)")
    return epochs


def check_shown_shape(x: Tensor, shape: Sequence[int], what: str) -> None:
    """Raise DataError unless images have the shape that the method keeps perturbations of; `what` says so."""
    if x.shape[1:] != tuple(shape):
        raise DataError(
            f"{what}, {tuple(shape)} here; show the images at that size, or create the method with "
            f"shape={tuple(x.shape[1:])}"
        )


def carried_rows(carried: Tensor, x: Tensor, name: str) -> Tensor:
    """Return the perturbations that a method carries from batch to batch for the images of this batch; `name` is how
    messages call the method."""
    if len(x) > len(carried):
        raise DataError(
            f"a batch of {len(x)} is larger than the {len(carried)} perturbations that {name} carries along; create "
            f"the method with batch_size={len(x)}"
        )
    check_shown_shape(x, carried.shape[1:], f"{name} carries perturbations of one shape along")
    return carried[: len(x)].to(x.dtype)


def check_own_targets(name: str, settings: str, common: Mapping[str, Any]) -> None:
    """Raise UsageError if targets are given to a method that makes its own from these settings."""
    if common.get("targets") is not None:
        raise UsageError(f"{name} has targets of its own; set its {settings}, and leave out targets")


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
