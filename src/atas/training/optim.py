"""SGD, AdamW, Muon and gradient clipping.

What changes with the update, such as the learning rate, is a tensor, so a step can be captured and replayed. The
forward pass may use a copy of the weights in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from atas.recipes import OptimizerConfig
from atas.training.schedule import BETAS

_ALIGNMENT = 16  # bytes that the kernel reads at once
_EPS = 1e-8  # of AdamW
DEFAULT_MATRIX_RATE = 0.1
_TINY = 1e-6  # keeps the factor of a clipped gradient finite


class Optimizer:
    """What all optimisers share. `momentum` is the average of gradients that methods may perturb weights along.

    `compute_weights` are the tensors that the forward pass uses: the weights themselves, or copies in lower precision,
    which each step updates. Nothing is read on the host. `decays` says for each weight whether it decays; all do by
    default.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        weights: Sequence[Tensor],
        compute_weights: Sequence[Tensor],
        decays: Sequence[bool] | None = None,
    ) -> None:
        self.config = config
        self.weights, self.compute_weights = list(weights), list(compute_weights)
        self.decays = [True] * len(self.weights) if decays is None else list(decays)
        self.momentum = [torch.zeros_like(weight) for weight in self.weights]
        self.create_state()

    def create_state(self) -> None:
        """Create the tensors that the optimiser needs beside the momentum; none by default."""

    def state(self) -> dict[str, list[Tensor]]:
        """Return the tensors, one for each weight, that the next step depends on beside the weights."""
        return {"momentum": self.momentum}

    def step(self, gradients: Sequence[Tensor | None], *scalars: Tensor) -> None:
        """Update the weights with this update's row of `schedule.update_table`; those without a gradient stay."""
        raise NotImplementedError

    def begin_capture(self, steps: int) -> None:
        """Prepare for the capture of `steps` steps; nothing to do here."""

    def finish_capture(self) -> None:
        """Finish the capture; nothing to do here."""

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights to `compute_weights`."""
        for weight, compute_weight in zip(self.weights, self.compute_weights, strict=True):
            if compute_weight is not weight:
                compute_weight.copy_(weight)


class SGD(Optimizer):
    """g <- g + decay w, m <- momentum m + g, w <- w - rate m (with Nesterov: g + momentum m instead of m).

    Computes the same as `torch.optim.SGD`.
    """

    @staticmethod
    def supports(weights: Sequence[Tensor], compute_weights: Sequence[Tensor]) -> bool:
        """Return whether these weights can be updated: all can."""
        return True

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None], *scalars: Tensor) -> None:
        """Update the weights by rate and momentum; those without a gradient stay."""
        rate, momentum = scalars
        self._descend(gradients, rate, momentum)
        self.refresh()

    def _descend(self, gradients: Sequence[Tensor | None], rate: Tensor, momentum: Tensor) -> None:
        rows = [row for row, gradient in enumerate(gradients) if gradient is not None]
        if not rows:
            return
        weights = [self.weights[row] for row in rows]
        momenta = [self.momentum[row] for row in rows]
        steps = [gradients[row].to(self.weights[row].dtype) for row in rows]  # type: ignore[union-attr]
        if all(self.decays):
            steps = list(torch._foreach_add(steps, weights, alpha=self.config.weight_decay))
        else:
            decays = [self.config.weight_decay * self.decays[row] for row in rows]
            steps = list(torch._foreach_add(steps, torch._foreach_mul(weights, decays)))
        torch._foreach_mul_(momenta, momentum)
        torch._foreach_add_(momenta, steps)
        if self.config.nesterov:
            torch._foreach_add_(steps, torch._foreach_mul(momenta, momentum))
        else:
            steps = momenta
        torch._foreach_sub_(weights, torch._foreach_mul(steps, rate))


class AdamW(Optimizer):
    """w <- (1 - rate decay) w, then w <- w - rate m / (sqrt(s) + eps), where m and s are averages of gradients and of
    their squares, corrected for their start at zero.

    Computes the same as `torch.optim.AdamW`.
    """

    def create_state(self) -> None:
        """Create the averages of squares."""
        self.squares = [torch.zeros_like(weight) for weight in self.weights]

    def state(self) -> dict[str, list[Tensor]]:
        """Return both averages."""
        return super().state() | {"squares": self.squares}

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None], *scalars: Tensor) -> None:
        """Update the weights by rate and corrections of both averages; those without a gradient stay."""
        rate, first_correction, second_correction = scalars
        first_beta, second_beta = self.config.betas or BETAS
        rows = [row for row, gradient in enumerate(gradients) if gradient is not None]
        decayed = [_as_real(self.weights[row]) for row in rows if self.decays[row]]
        weights, momenta, squares = (
            [_as_real(tensors[row]) for row in rows] for tensors in (self.weights, self.momentum, self.squares)
        )
        steps = [_as_real(gradients[row].to(self.weights[row].dtype)) for row in rows]  # type: ignore[union-attr]
        if decayed and self.config.weight_decay:
            torch._foreach_mul_(decayed, 1 - rate * self.config.weight_decay)
        torch._foreach_lerp_(momenta, steps, 1 - first_beta)
        torch._foreach_mul_(squares, second_beta)
        torch._foreach_addcmul_(squares, steps, steps, 1 - second_beta)
        scales = torch._foreach_sqrt(squares)
        torch._foreach_mul_(scales, second_correction.rsqrt())
        torch._foreach_add_(scales, _EPS if self.config.eps is None else self.config.eps)
        steps = list(torch._foreach_div(momenta, scales))
        torch._foreach_mul_(steps, rate / first_correction)
        torch._foreach_sub_(weights, steps)
        self.refresh()


class Muon(SGD):
    """SGD with orthogonal steps for convolutions (Muon, Jordan et al., 2024).

    The weight w of a convolution is seen as a matrix with a row for each output. With its gradient g,

        m <- momentum m + g
        d  = the semi-orthogonal matrix nearest to g + momentum m, by `orthogonalize`
        w <- w - rate matrix_rate |w| d / |d|, then scaled to the norm that it started with

    So a step has the same size in all directions, and a fixed one relative to the weight; there is no weight decay. All
    other weights, and convolutions that start at zero, are updated as by `SGD`.
    """

    def create_state(self) -> None:
        """Note the norms that weights of convolutions keep; those that start at zero have none to keep."""
        self.norms = [weight.detach().norm() for weight in self.weights]
        self._is_matrix = [
            weight.dim() == 4 and bool(norm > 0) for weight, norm in zip(self.weights, self.norms, strict=True)
        ]
        rate = self.config.matrix_rate
        self._matrix_rate = DEFAULT_MATRIX_RATE if rate is None else rate

    def state(self) -> dict[str, list[Tensor]]:
        """Return the momentum, and the norms that weights of convolutions keep."""
        return super().state() | {"norms": self.norms}

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None], *scalars: Tensor) -> None:
        """Update the weights by rate and momentum; those without a gradient stay."""
        rate, momentum = scalars
        others = [None if skip else one for skip, one in zip(self._is_matrix, gradients, strict=True)]
        self._descend(others, rate, momentum)
        same_shape: dict[torch.Size, list[int]] = {}
        for row, gradient in enumerate(gradients):
            if self._is_matrix[row] and gradient is not None:
                same_shape.setdefault(gradient.shape, []).append(row)
        for rows in same_shape.values():
            self._step_orthogonally(rows, gradients, rate, momentum)
        self.refresh()

    def _step_orthogonally(
        self, rows: Sequence[int], gradients: Sequence[Tensor | None], rate: Tensor, momentum: Tensor
    ) -> None:
        """Update weights of one shape."""
        weights, momenta = [self.weights[row] for row in rows], [self.momentum[row] for row in rows]
        steps = [gradients[row].to(self.weights[row].dtype) for row in rows]  # type: ignore[union-attr]
        torch._foreach_mul_(momenta, momentum)
        torch._foreach_add_(momenta, steps)
        ahead = torch._foreach_add(steps, torch._foreach_mul(momenta, momentum))
        norms = torch.stack([self.norms[row] for row in rows])[:, None, None]
        directions = orthogonalize(_as_matrices(ahead)).to(norms.dtype)
        lengths = rate * self._matrix_rate * norms
        moved = _as_matrices(weights) - directions * (lengths / _norms(directions).clamp_min(_TINY))
        for weight, matrix in zip(weights, moved * (norms / _norms(moved)), strict=True):
            weight.copy_(matrix.view(weight.shape))


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return a batch of matrices with the same singular vectors, and singular values between 0.6 and 1.3.

    Each step of the Newton-Schulz iteration applies an odd polynomial to the singular values, by products of matrices
    alone. Its coefficients are those of Muon, with which values from about 0.005 of the norm on arrive in that range.
    On a GPU the products are in bf16.
    """
    is_wide = matrices.shape[1] <= matrices.shape[2]
    x = (matrices if is_wide else matrices.mT) / (_norms(matrices) + _TINY**2)
    x = x.bfloat16() if x.is_cuda else x
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(steps):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x if is_wide else x.mT


def _as_matrices(weights: Sequence[Tensor]) -> Tensor:
    """Return weights of one shape as a batch of matrices with a row for each output."""
    return torch.stack([weight.flatten(1) for weight in weights])


def _norms(matrices: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrices, keepdim=True)


def create_optimizer(config: OptimizerConfig, model: nn.Module, compute_model: nn.Module) -> Optimizer:
    """Create the optimiser of a recipe for the weights of a model that are trained."""
    rows = [row for row, parameter in enumerate(model.parameters()) if parameter.requires_grad]
    weights, compute_weights = (
        [tensors[row] for row in rows] for tensors in (list(model.parameters()), list(compute_model.parameters()))
    )
    decays = _decays(config, model)
    return _OPTIMIZERS[config.name](config, weights, compute_weights, [decays[row] for row in rows])


_OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adamw": AdamW, "muon": Muon}


def _decays(config: OptimizerConfig, model: nn.Module) -> list[bool]:
    """Return for each parameter whether it decays: without `decay_norms` not those of one dimension, and not those that
    a part of the model names in `no_weight_decay()`, as networks of timm do."""
    if config.decay_norms in (None, True):
        return [True for _ in model.parameters()]
    excluded = {
        f"{path}.{name}" if path else name
        for path, part in model.named_modules()
        if callable(names := getattr(part, "no_weight_decay", None))
        for name in names()
    }
    return [parameter.dim() > 1 and name not in excluded for name, parameter in model.named_parameters()]


def clip_gradients(gradients: Sequence[Tensor | None], limit: float) -> list[Tensor | None]:
    """Return the gradients, all multiplied by one number if their common norm is above the limit; as
    `torch.nn.utils.clip_grad_norm_`, in float32 at least."""
    wide = [None if gradient is None else gradient.to(_at_least_float32(gradient.dtype)) for gradient in gradients]
    found = [gradient for gradient in wide if gradient is not None]
    if not found:
        return wide
    norms = [norm.to(torch.float32) for norm in torch._foreach_norm(found)]
    scale = (limit / (torch.linalg.vector_norm(torch.stack(norms)) + _TINY)).clamp_max(1)
    scaled = iter(torch._foreach_mul(found, scale))
    return [None if gradient is None else next(scaled) for gradient in wide]


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _as_real(tensor: Tensor) -> Tensor:
    """Return the same memory as real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class FusedSGD(SGD):
    """`SGD` in one Triton kernel that reads and writes every weight once; `supports` says for which weights."""

    @staticmethod
    def supports(weights: Sequence[Tensor], compute_weights: Sequence[Tensor]) -> bool:
        """Return whether the kernel can update these weights: it goes over their memory from the first address on."""
        copied = [
            (weight, copied) for weight, copied in zip(weights, compute_weights, strict=True) if copied is not weight
        ]
        return all(weight.dtype == torch.float32 and _is_aligned(weight) for weight in weights) and all(
            copied.dtype == torch.bfloat16 and _is_aligned(copied) and copied.stride() == weight.stride()
            for weight, copied in copied
        )

    def __init__(self, config: OptimizerConfig, weights: Sequence[Tensor], compute_weights: Sequence[Tensor]) -> None:
        super().__init__(config, weights, compute_weights)
        from atas.ops.triton.sgd import SGDUpdate  # needs Triton

        self._update = SGDUpdate(self.weights, self.compute_weights, self.momentum)

    def step(self, gradients: Sequence[Tensor | None], *scalars: Tensor) -> None:
        """Update the weights; those without a gradient stay as they are."""
        rate, momentum = scalars
        decay, nesterov = self.config.weight_decay, self.config.nesterov
        self._update.step(gradients, rate, momentum, weight_decay=decay, nesterov=nesterov)

    def begin_capture(self, steps: int) -> None:
        """Allocate the address tables of `steps` steps, outside of the memory pool of the capture."""
        self._update.begin_capture(steps)

    def finish_capture(self) -> None:
        """Fill the address tables of the captured steps."""
        self._update.finish_capture()


def _is_aligned(tensor: Tensor) -> bool:
    """Return whether the elements fill one range of memory, in any order of axes, that starts at sixteen bytes."""
    filled = 1 if tensor.numel() else 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and filled and stride != filled:
            return False
        filled *= size
    return tensor.data_ptr() % _ALIGNMENT == 0
