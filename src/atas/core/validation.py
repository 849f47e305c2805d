"""Checks of images, labels, indices and models, with messages that say how to fix the problem.

On the CPU a wrong value raises at once. On a GPU, reading values would synchronise the host at every step. There
`DeviceChecks` sets a flag on the device, clamps indices and labels so that no kernel can fault, and raises when the
flag is next read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from atas._utils.system import is_out_of_memory
from atas.core.arguments import describe
from atas.errors import AtasError, DataError, UsageError

_LOW = (torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_TOLERANCE = 1e-4  # allows for rounding by a resize or by half precision

_NOT_FINITE = "the images hold NaN or infinite values; look for a division by zero in the preprocessing"
_RANGE = (
    "the images leave [0, 1]{values}; divide uint8 images by 255, undo any normalisation (it belongs inside the model) "
    "and clamp after resizing"
)
_LABEL = "a label lies outside of 0..{last}, the classes that the model has{values}; check the labels or num_classes"
FIXED_GRAPH = (
    "the graph of this model is fixed in eval mode, so it can be evaluated but not trained; to train, pass the network "
    "that it was made from"
)
_COMPILED = "torch.compile", "torch.jit"
_MIN_REPEATS = 256  # repeated examples that the check needs
_CHANCE_SHARE = 0.8  # share of the label changes that random indices would cause
_INCONSISTENT = (
    "an index must name the same example in every epoch, but {changed} of {again} that came again had another label; "
    "feed the row in the training set, as atas.indexed(dataset) does, not the place in a batch or in a shuffled order "
    "(or, where labels change by design, set method.checks_indices = False)"
)
_INDEX = (
    "an example's index lies outside of 0..{last}{values}; create the method with examples=len(train_set) and feed "
    "indices of that set"
)
_DUPLICATES = (
    "an example occurs more than once in a batch{values}, and its perturbation or gradient norm could be stored only "
    "once; draw batches without replacement"
)


def check_shapes(x: Tensor, y: Tensor, index: Tensor | None, shape: Sequence[int] | None) -> None:
    """Raise if shapes or dtypes are wrong. Values are not read."""
    for name, value in (("images", x), ("labels", y), ("indices", index)):
        if not isinstance(value, Tensor) and (value is not None or name != "indices"):
            raise DataError(f"{name} must be a tensor; got {type(value).__name__}: convert with torch.as_tensor()")
    if not x.dtype.is_floating_point:
        raise DataError(f"images must be float in [0, 1]; got {x.dtype}: convert with x.float() / 255")
    if x.dtype in _LOW:
        raise DataError(
            f"images must be float32, or the budget is lost in rounding; got {x.dtype}: convert with x.float() and "
            f"leave low precision to torch.autocast"
        )
    if shape is not None and tuple(x.shape[1:]) != tuple(shape):
        channels_last = x.dim() == 4 and (x.shape[3], *x.shape[1:3]) == tuple(shape)
        remedy = (
            "put the channels first, x.permute(0, 3, 1, 2)"
            if channels_last
            else f"create it with shape={(*x.shape[1:],)}"
        )
        raise DataError(f"images of shape {(*x.shape[1:],)} do not fit a method made for {(*shape,)}; {remedy}")
    if x.dim() != 4:
        raise DataError(f"images must be a batch (N, C, H, W); got shape {tuple(x.shape)}")
    for name, value in (("labels", y), ("indices", index)):
        if value is None:
            continue
        if value.shape != (len(x),):
            raise DataError(f"{name} must be one number an image, shape ({len(x)},); got {tuple(value.shape)}")
        if value.dtype.is_floating_point or value.dtype == torch.bool:
            raise DataError(f"{name} must be integers; got {value.dtype}: convert with .long()")


def check_module(
    model: object,
    *,
    trains: bool = False,
    bare: bool = False,
    hooks: bool = False,
    second_derivative: bool = False,
) -> None:
    """Raise unless the model is a module whose weights can take part in a backward pass, and is fit for its use.

    Args:
        model: what the caller passed as the model.
        trains: it runs in train mode, so its graph must not be fixed in eval mode.
        bare: it must not be wrapped for several devices.
        hooks: hooks of its layers must be called.
        second_derivative: its input gradient must be differentiable.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model must be a torch.nn.Module; got {type(model).__name__}: wrap it in one")
    parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    if bare and parallel:
        raise UsageError(
            f"the model is wrapped in {type(model).__name__}: pass the network itself, model.module; several "
            f"processes of torchrun share a training without a wrapper"
        )
    inner: nn.Module = model.module if parallel else model  # type: ignore[assignment]
    if trains and is_fixed_graph(inner):
        raise UsageError(FIXED_GRAPH)
    compiled = hasattr(inner, "_orig_mod")
    if hooks and (compiled or isinstance(inner, torch.jit.ScriptModule)):
        raise UsageError(
            f"this method needs hooks of the model's layers, which a model of {_COMPILED[not compiled]} does not call: "
            f"pass the network that it was made from{' (model._orig_mod)' if compiled else ''}"
        )
    if second_derivative and (compiled or inner._compiled_call_impl is not None):
        raise UsageError(
            "this method needs a second derivative, which a model of torch.compile does not have: pass the network as "
            "it was before torch.compile"
        )
    if any(map(is_lazy, itertools.chain(model.parameters(), model.buffers()))):
        raise UsageError("the model has lazy layers without weights as yet: call it once on a batch of images")
    # A subclass of Tensor may say that it is there and hold its values elsewhere.
    if any(tensor.is_meta and type(tensor.data) is Tensor for tensor in (*model.parameters(), *model.buffers())):
        raise UsageError(
            "the model is on the device 'meta', without weights: create it on the CPU and load its weights"
        )
    if any(tensor.is_inference() for tensor in itertools.chain(model.parameters(), model.buffers())):
        raise UsageError(
            "the model was made in torch.inference_mode(), without gradients: make or load it outside of that"
        )


def is_fixed_graph(model: nn.Module) -> bool:
    """Return whether the model is a graph in eval mode without a train mode: of torch.jit.freeze or torch.export."""
    return not hasattr(model, "training") or (isinstance(model, torch.fx.GraphModule) and "train" in vars(model))


@contextmanager
def explain_model_errors(sentence: str) -> Iterator[None]:
    """Turn errors of a trial call of a model into a UsageError; `sentence` contains `{why}`."""
    try:
        yield
    except AtasError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError) as error:
        if is_out_of_memory(error):
            raise
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(sentence.format(why=why)) from error


def check_trainable(model: nn.Module) -> None:
    """Raise unless the model has weights to train."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("the model has no weights to train; set requires_grad on parameters")


def check_optimizer(optimizer: object) -> None:
    """Raise unless this is an optimiser of weights to train."""
    if not (callable(getattr(optimizer, "step", None)) and callable(getattr(optimizer, "zero_grad", None))):
        raise UsageError(f"the optimizer must be a torch.optim.Optimizer; got {describe(optimizer)}")
    groups = getattr(optimizer, "param_groups", None)  # wrappers of optimisers may have none
    if groups is not None and not any(weight.requires_grad for group in groups for weight in group["params"]):
        raise UsageError("no weight of the optimizer is trained; set requires_grad on parameters of the model")


@contextmanager
def explain_precision(model: nn.Module, x: Tensor) -> Iterator[None]:
    """Explain errors of models whose weights have another precision than the images."""
    try:
        yield
    except (torch.OutOfMemoryError, AtasError):
        raise
    except RuntimeError as error:
        dtypes = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
        if low := [dtype for dtype in _LOW if dtype in dtypes]:
            dtype, remedy = low[0], "convert it with model.float() and leave low precision to torch.autocast"
        elif len(dtypes - {x.dtype}) == len(dtypes) == 1 and "type" in str(error):
            dtype = dtypes.pop()
            remedy = f"convert the images with x.to({dtype})"
        else:
            raise
        raise UsageError(
            f"the model has weights in {dtype} and cannot take images in {x.dtype} ({str(error).splitlines()[0]}); "
            f"{remedy}"
        ) from error


_NO_DERIVATIVE = re.compile(r"is not implemented|once_differentiable|does not support|second.?order|double.?backward")


@contextmanager
def explain_second_derivative(name: str) -> Iterator[None]:
    """Explain errors of models without a second derivative; `name` is what needs it."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, AtasError) or not _NO_DERIVATIVE.search(str(error)):
            raise
        raise UsageError(
            f"{name} needs a second derivative, which an operation of this model lacks "
            f"({str(error).splitlines()[0]}); replace that operation or use another method"
        ) from error


MODEL_FAILED = "the model cannot take float32 images of shape {shape}: {{why}}"


def check_logits(output: object, examples: int) -> Tensor:
    """Return the model's output if it is logits of shape (examples, classes), else raise."""
    if not isinstance(output, Tensor):
        raise UsageError(
            f"the model must return a tensor of logits (N, classes); got {type(output).__name__}: wrap it in a module "
            f"that returns the logits alone"
        )
    if output.dim() != 2 or len(output) != examples or output.shape[1] < 2:
        raise UsageError(
            f"the model must return logits of shape ({examples}, classes) with two classes or more for {examples} "
            f"images; got {tuple(output.shape)}"
        )
    return output


def check_images(x: Tensor) -> None:
    """Raise if pixels are outside [0, 1] or not finite. Reads the values, on any device."""
    low, high = torch.aminmax(x.detach()) if x.numel() else (torch.zeros(()), torch.zeros(()))
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise DataError(_NOT_FINITE)
    if float(low) < -_TOLERANCE or float(high) > 1 + _TOLERANCE:
        raise DataError(_RANGE.format(values=f" (from {float(low):.4g} to {float(high):.4g})"))


def check_labels(y: Tensor, classes: int) -> None:
    """Raise if a label is not a class of the model. Reads the values, on any device."""
    if y.numel() and not 0 <= int(y.min()) <= int(y.max()) < classes:
        raise DataError(_LABEL.format(last=classes - 1, values=f" (found {int(y.min())} to {int(y.max())})"))


def check_targets(targets: Tensor, classes: int) -> None:
    """Raise if a target class is not a class of the model. Reads the values, on any device."""
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < classes:
        values = f"{int(targets.min())} to {int(targets.max())}"
        raise DataError(f"targets must be classes that the model has, 0 to {classes - 1}; got {values}")


def check_rows(rows: object, examples: int) -> None:
    """Raise unless these are indices of some of the examples."""
    if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype not in _INTEGERS:
        raise UsageError(f"rows must be a tensor of indices, such as torch.arange(100); got {describe(rows)}")
    if not len(rows) or not 0 <= int(rows.min()) <= int(rows.max()) < examples:
        found = f"{int(rows.min())} to {int(rows.max())}" if len(rows) else "none"
        raise UsageError(f"rows must be indices in 0..{examples - 1}, at least one; got {found}")


class DeviceChecks(nn.Module):
    """Checks that raise at once on the CPU and set a flag on other devices, which `raise_if_set` reads."""

    flags: Tensor

    def __init__(self, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("flags", torch.zeros(5, dtype=torch.bool, device=device), persistent=False)
        self._last_label = self._last_index = 0
        self.skip_labels = False  # set by engines, which check labels when data is loaded, and make indices themselves

    def images(self, x: Tensor) -> None:
        """Check that pixels are finite and in [0, 1]."""
        if x.device.type == "cpu":
            return check_images(x)
        low, high = torch.aminmax(x.detach())
        self.flags[0] |= ~(torch.isfinite(low) & torch.isfinite(high))
        self.flags[1] |= (low < -_TOLERANCE) | (high > 1 + _TOLERANCE)
        return None

    def labels(self, y: Tensor, classes: int) -> Tensor:
        """Check that labels are classes of the model; return them clamped."""
        if self.skip_labels:
            return y
        self._last_label = classes - 1
        if y.device.type == "cpu":
            check_labels(y, classes)
            return y
        self.flags[2] |= ((y < 0) | (y >= classes)).any()
        return y.clamp(0, classes - 1)

    def index(self, index: Tensor, examples: int) -> Tensor:
        """Check that indices are examples of the training set; return them clamped."""
        if self.skip_labels:
            return index
        self._last_index = examples - 1
        if index.device.type == "cpu":
            if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < examples:
                values = f" (found {int(index.min())} to {int(index.max())})"
                raise DataError(_INDEX.format(last=examples - 1, values=values))
            return index
        self.flags[3] |= ((index < 0) | (index >= examples)).any()
        return index.clamp(0, examples - 1)

    def distinct(self, index: Tensor) -> None:
        """Check that no example occurs twice in a batch."""
        ordered = index.sort().values
        repeated = ordered[1:] == ordered[:-1]
        if index.device.type == "cpu":
            if bool(repeated.any()):
                raise DataError(_DUPLICATES.format(values=f" (example {int(ordered[1:][repeated][0])})"))
            return
        self.flags[4] |= repeated.any()

    def raise_if_set(self) -> None:
        """Raise if a device check failed since the last call. Synchronises the host."""
        not_finite, out_of_range, label, index, duplicate = self.flags.tolist()
        self.flags.zero_()
        if not_finite:
            raise DataError(_NOT_FINITE)
        if out_of_range:
            raise DataError(_RANGE.format(values=""))
        if label:
            raise DataError(_LABEL.format(last=self._last_label, values=""))
        if index:
            raise DataError(_INDEX.format(last=self._last_index, values=""))
        if duplicate:
            raise DataError(_DUPLICATES.format(values=""))


class IndexConsistency:
    """Checks by labels that an index names the same example in every epoch."""

    def __init__(self, examples: int) -> None:
        self._examples = examples
        self.reset()

    def reset(self) -> None:
        """Forget all labels."""
        self._labels = self._counts = torch.empty(0)

    def update(self, index: Tensor, y: Tensor) -> None:
        """Record a batch with valid indices. Does not synchronise the host."""
        if self._labels.device != index.device or not len(self._labels):
            with torch.inference_mode(False):
                self._labels = torch.full((self._examples,), -1, device=index.device)
                self._counts = torch.zeros(2, dtype=torch.int64, device=index.device)
        before = self._labels[index]
        again = before >= 0
        self._counts += torch.stack([again.sum(), (again & (before != y)).sum()])
        self._labels[index] = y

    def check(self) -> None:
        """Raise if almost as many labels changed as with random indices. Synchronises the host."""
        if not len(self._labels):
            return
        again, changed = self._counts.tolist()
        if again < _MIN_REPEATS:
            return
        self._counts.zero_()
        shares = self._labels[self._labels >= 0].bincount().double() / (self._labels >= 0).sum()
        if changed > _CHANCE_SHARE * (1 - float(shares.square().sum())) * again:
            self.reset()
            raise DataError(_INCONSISTENT.format(changed=changed, again=again))
