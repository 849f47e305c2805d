"""SLAT: single-step adversarial training that also perturbs hidden layers.

For each image x with label y, and with h_k the output of hidden layer k, in train mode:

    g, g_k = gradients of l(x, y) with respect to x and each h_k          one pass, which gives them all
    x'     = P[x + a sgn g]                                               a = 0.9 eps
    h_k'   = h_k + d_k in a second pass at x', in which h_k has felt the perturbations before it
             d_k = clip_eps(b sgn g_k), then cut so that h_k' stays        b = 1.8 eps, so d_k is +-eps before the cut
             between the least and the largest h_k of its image and channel
    one SGD step on the loss of the second pass; d_k are constants in it

Park and Lee, "Reliably Fast Adversarial Training via Latent Adversarial Perturbation", ICCV 2021. In the authors' code,
hidden layers are the first convolution and the first group of blocks, and eps is that of the pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Unpack

import torch
from torch import Tensor, nn

from atas.core.autograd import freeze
from atas.core.split_model import find_first_layer
from atas.data.loader import Batch
from atas.errors import UsageError
from atas.methods.base import CommonArgs, Method, StepOutput
from atas.methods.step_warnings import warn_of_steps
from atas.methods.update import Update
from atas.threat import Size, Threat

_FIRST_BLOCKS = "layer1"


class SLAT(Method):
    """Single-step latent adversarial training (SLAT, 2021).

    `layers` are the names of hidden layers; by default the first convolution or linear layer and, in a model that has
    one, the module `layer1`. `step_size` (0.9 eps) is a, `layer_step_size` (1.8 eps) is b. Cost: two forward passes, a
    backward pass to the input, one to the weights.
    """

    compilable = False
    needs_hooks = True
    uses_fast_network = False
    weight_perturbations = ("ascent", "momentum")

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        layers: tuple[str, ...] | None = None,
        step_size: Size = "auto",
        layer_step_size: Size = "auto",
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        if layers is not None and not layers:
            raise UsageError("SLAT needs a hidden layer to perturb: name one or more in layers, or leave layers out")
        self.layers = layers
        self.step_size = threat.size("step_size", step_size, auto=0.9)
        self.layer_step_size = threat.size("layer_step_size", layer_step_size, auto=1.8)
        self.settings_warning = warn_of_steps(threat, self.step_size)

    def training_step(self, model: nn.Module, update: Update, batch: Batch) -> StepOutput:
        """Take the gradients of all places in one pass, and train on a pass with all perturbations."""
        layers = self._find_layers(model)
        with freeze(model):
            gradient, hidden = self._gradients(model, layers, batch)
        inputs = self.threat.ascend(batch.x, gradient, self.step_size * self.step_scale, batch.x).detach()
        size = self.layer_step_size * self.step_scale

        def objective() -> tuple[Tensor, Tensor]:
            following = iter(hidden)
            with replace_outputs(layers, lambda h: perturb_hidden(self.threat, h, next(following), size)):
                logits = model(inputs)
            return self.loss(logits, batch.y, batch.index), logits

        loss, logits, _ = self.minimize(model, update, objective)
        return StepOutput(loss.detach(), inputs, logits.detach())

    def _gradients(self, model: nn.Module, layers: list[nn.Module], batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the gradients of the loss with respect to the images and to the outputs of the layers, in the order of
        the pass."""
        outputs: list[Tensor] = []

        def keep(output: Tensor) -> Tensor:
            outputs.append(output)
            return output.clone()  # what comes next may work in place

        point = batch.x.detach().requires_grad_(True)
        with replace_outputs(layers, keep):
            loss = self.attack_loss(model(point), batch.y)
        if len(outputs) != len(layers):
            raise UsageError(
                f"a pass uses the {len(layers)} layers of SLAT {len(outputs)} times; name layers that everything goes "
                f"through once, with layers=[...]"
            )
        gradient, *hidden = torch.autograd.grad(loss, [point, *outputs])
        return gradient, hidden

    def _find_layers(self, model: nn.Module) -> list[nn.Module]:
        """Return the layers by their names, or those that the authors chose."""
        if self.layers is not None:
            return [find_first_layer(model, name) for name in self.layers]
        blocks = dict(model.named_modules()).get(_FIRST_BLOCKS)
        first = find_first_layer(model, None, use="for SLAT to perturb; name layers with layers=[...]")
        return [first] if blocks is None else [first, blocks]


@contextmanager
def replace_outputs(layers: Sequence[nn.Module], function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let a function of their outputs replace the outputs of some layers inside the context."""

    def replace(_module: nn.Module, _inputs: object, output: object) -> Tensor:
        if not isinstance(output, Tensor):
            raise UsageError(f"SLAT cannot perturb a layer that returns a {type(output).__name__}; name another one")
        return function(output)

    handles = [layer.register_forward_hook(replace) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def perturb_hidden(threat: Threat, output: Tensor, gradient: Tensor, size: Tensor) -> Tensor:
    """Return a layer's output plus a constant: a step of this size within the ball, cut so that each value stays in the
    range of its image and channel. Outputs without places, as of a linear layer, have no such range."""
    values = output.detach()
    change = threat.clip(threat.step(torch.zeros_like(values), gradient, size))
    if places := tuple(range(2, values.dim())):
        low, high = values.amin(places, keepdim=True), values.amax(places, keepdim=True)
        change = torch.maximum(torch.minimum(change, high - values), low - values)
    return output + change
