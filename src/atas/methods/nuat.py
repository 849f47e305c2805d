"""NuAT: one step, guided by the nuclear norm of the batch's difference of logits.

As GAT (see `gat.py`), with another distance and another weight. For a batch of B images and C classes, with the B x C
matrices of logits Z at the clean images and Z' at the perturbed ones:

    distance = |Z - Z'|_*                       nuclear norm: the sum of the singular values
    attack   : ascend  sum l(x0, y) + guide |Z - Z0|_*,  guide = weight in odd batches, else 0; eval mode
    loss     = mean l(x, y) + weight / B |Z - Z'|_*
    weight   : rises linearly from 0 in the first epoch to its full value after `ramp` of the training

Sriramanan et al., "Towards Efficient and Effective Adversarial Training", NeurIPS 2021. The norm takes the images of a
batch together: it is smaller if the logits of all of them move in few directions. A singular value decomposition cannot
be captured as a CUDA graph; matrix products of size C x C can. Several processes add up one such matrix, so the norm is
that of the global batch. The weight fits 10 classes: with 100 the same weight has failed in published comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from atas.core.autograd import to_float32
from atas.errors import UsageError
from atas.methods.base import CommonArgs
from atas.methods.checks import known_epochs
from atas.methods.gat import GuidedTraining
from atas.methods.update import Update
from atas.threat import Size, Threat

_ITERATIONS = 20  # singular values above 1e-4 of the norm converge; the others count at most as much as they are


class NuAT(GuidedTraining):
    """Nuclear-norm adversarial training (Sriramanan et al., 2021).

    `weight` is the full weight of the norm, reached after the share `ramp` of the training. `noise`, the size of the
    random start, is eps/2 and `step_size` is eps by default. Cost: three standard steps.

    >>> from atas import Linf
    >>> method = NuAT(Linf(8/255), examples=100, shape=(3, 32, 32))
    >>> [method.weight_in(epoch, 100) for epoch in (0, 45, 90, 99)]
    [0.0, 2.25, 4.5, 4.5]
    """

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        weight: float = 4.5,
        ramp: float = 0.9,
        noise: Size = "auto",
        step_size: Size = "auto",
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, weight=weight, noise=noise, step_size=step_size, **common)
        if not 0 <= ramp <= 1:
            raise UsageError(f"NuAT needs a ramp in [0, 1]; got {ramp}")
        self.ramp = ramp

    def weight_in(self, epoch: int, epochs: int | None) -> float:
        """Return the weight of an epoch."""
        if not self.ramp:
            return self.weight
        return self.weight * min(1.0, epoch / (self.ramp * known_epochs("nuat with a ramp", epochs)))

    def distance(self, logits: Tensor, clean: Tensor, update: Update) -> Tensor:
        """Return the nuclear norm of the difference of logits; of this process's part, where there are several."""
        return nuclear_norm(to_float32(logits) - to_float32(clean), update)


def nuclear_norm(matrix: Tensor, update: Update) -> Tensor:
    """Return the nuclear norm of a matrix, or the part of it that belongs to these rows where other processes have
    others. Its gradient U V^T is taken at the nonzero singular values."""
    rows = matrix.detach().double()
    (gram,) = update.total(rows.T @ rows)
    factor = rows @ inverse_square_root(gram)
    return (matrix * factor.to(matrix.dtype)).sum()


def inverse_square_root(gram: Tensor) -> Tensor:
    """Return (M^T M)^(-1/2) for a matrix M^T M, by the Newton-Schulz iteration in matrix products alone.

    A step maps every singular value s of M, scaled to (0, 1], to (15 s - 10 s^3 + 3 s^5) / 8, which is nearer to 1.
    """
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    scale = gram.trace().clamp_min(torch.finfo(gram.dtype).tiny)
    gram, root = gram / scale, identity / scale.sqrt()
    for _ in range(_ITERATIONS):
        step = (15 * identity - 10 * gram + 3 * gram @ gram) / 8
        root, gram = root @ step, step @ gram @ step
    return root
