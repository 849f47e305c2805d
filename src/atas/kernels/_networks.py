"""Pre-activation networks by the kernels of this package, forward and back, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from atas.kernels import _head
from atas.kernels import _layers as layers
from atas.kernels._conv import Projection
from atas.kernels._launch import rehearsal
from atas.kernels._layers import Trace
from atas.kernels._overlap import weights
from atas.models import Normalize, PreActResNet, WideResNet
from atas.models._pooling import pooled
from atas.passes import mode
from atas.slope import slope

_SMALLEST: dict[type[nn.Module], tuple[int, ...]] = {PreActResNet: (), WideResNet: (10, 2)}  # what to build one with


class FusedForward:
    """The forward pass of a pre-activation network. `passes` counts those in train mode, as BatchNorm itself would."""

    def __init__(self, model: PreActResNet | WideResNet) -> None:
        self.model, self.passes = model, 0
        self.activated_shortcut = isinstance(model, WideResNet)
        self.blocks: list[Any] = [
            block for name, stage in model.named_children() if name.startswith("layer") for block in stage.children()
        ]
        self.following: list[nn.BatchNorm2d] = [*(block.bn1 for block in self.blocks[1:]), model.bn]

    def __call__(self, x: Tensor, stem: Tensor | None = None) -> Tensor:
        """Logits of pixels in [0, 1]. The gradient by the first convolution's result is that by `stem`."""
        model = self.model
        self.passes += model.training
        active = _Body.apply(x, stem, self, *self._parameters())
        if self._has_head(active):
            return _head.Head.apply(active, model.fc.weight, model.fc.bias)
        return model.fc(pooled(active, model.window))

    def slope(self, x: Tensor, direction: Tensor, y: Tensor) -> Tensor:
        """How steep the summed cross-entropy is at x along a direction, in train mode, for weights to learn from."""
        return slope(self.model, x, direction, y)

    def cut(self) -> Cut:
        """The network, cut behind its first convolution."""
        return Cut(self)

    def walk(self, x: Tensor) -> list[Trace]:
        """Through the stem and every block; what each convolution leaves."""
        blocks = self.blocks
        trace = layers.stem_forward(x, self.model.normalize, self.model.conv1, blocks[0].bn1)
        traces = [trace]
        for block, bn in zip(blocks, self.following, strict=True):
            inner = layers.forward(trace.active, block.conv1, None, block.bn2)
            trace = layers.forward(inner.active, block.conv2, self._beside(block, trace), bn)
            traces += [inner, trace]
        return traces

    def _beside(self, block: Any, before: Trace) -> Tensor | Projection:
        """What a block's shortcut adds."""
        projects = isinstance(block.shortcut, nn.Conv2d)
        source = before.active if projects and self.activated_shortcut else before.total
        assert source is not None
        return Projection(source, block.shortcut) if projects else source

    def rehearse(self, x: Tensor, modes: tuple[bool, ...] = (False, True)) -> None:
        """Have the kernels compiled, side by side within `side_by_side`: those of eval mode and those of train mode.
        Nothing is computed."""
        parameters = self._parameters()
        for training in modes:
            with rehearsal(), mode(self.model, training), torch.no_grad():
                traces = self.walk(x)
                way = WayBack(self, traces, parameters if training else [], image=True)
                way.go(torch.empty_like(traces[-1].active), traces[-1])
                weights.join()
                if self._has_head(traces[-1].active):
                    fc = self.model.fc
                    logits, _ = _head.forward(traces[-1].active, fc.weight, fc.bias)
                    _head.backward(logits, traces[-1].active.shape, fc.weight)

    def _has_head(self, active: Tensor) -> bool:
        return self.model.window is None and _head.fits(active)

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for name, parameter in self.model.named_parameters() if not name.startswith("fc.")]


class Cut:
    """A network cut behind its first convolution, for `methods.YOPO`."""

    def __init__(self, network: FusedForward) -> None:
        self._network, self._model = network, network.model

    def through(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The logits, and what stands for the convolution's result: it has its shape and gets its gradient."""
        conv = self._model.conv1
        nothing = torch.zeros((), dtype=conv.weight.dtype, device=x.device)
        stem = nothing.expand(len(x), conv.out_channels, *x.shape[2:]).requires_grad_(True)
        return self._network(x, stem), stem

    def to(self, x: Tensor) -> Tensor:
        """The convolution's result."""
        return self._model.conv1(self._model.normalize(x))

    @torch.no_grad()
    def pull(self, costate: Tensor, x: Tensor) -> Tensor:
        """The gradient of costate . to(x) by x, which is the same for all x."""
        normalize, conv = self._model.normalize, self._model.conv1
        costate = costate.contiguous(memory_format=torch.channels_last)
        return layers.stem_input_gradient(costate, x.contiguous(), normalize, conv)


class _Body(torch.autograd.Function):
    """From the image to the last activation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stem: Tensor | None, network: FusedForward, *parameters: Tensor) -> Tensor:
        """Through the stem and every block."""
        ctx.network, ctx.parameters, ctx.traces = network, parameters, network.walk(x)
        last = ctx.traces[-1]
        # Autograd keeps what a function returns; kept by the function as well, it would never be given back.
        ctx.save_for_backward(last.active)
        ctx.traces[-1] = Trace(last.x, last.total, x, last.saved)
        return last.active

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Back through every block and the stem."""
        (active,) = ctx.saved_tensors
        image, stem, _, *learns = ctx.needs_input_grad
        wanted = [parameter for parameter, learn in zip(ctx.parameters, learns, strict=True) if learn]
        way = WayBack(ctx.network, ctx.traces, wanted, image=image)
        last = ctx.traces[-1]
        total, by_image = way.go(_dense(gradient, active), Trace(last.x, last.total, active, last.saved))
        by_weights = (way.found.get(id(parameter)) for parameter in ctx.parameters)
        return by_image, total if stem else None, None, *by_weights


class WayBack:
    """A backward pass under way: what it found so far, by the parameter's identity."""

    def __init__(self, network: FusedForward, traces: list[Trace], wanted: Sequence[Tensor], *, image: bool) -> None:
        self.network, self.traces, self.image = network, traces, image
        self.wanted = {id(parameter) for parameter in wanted}
        self.found: dict[int, Tensor] = {}

    def go(self, gradient: Tensor, last: Trace) -> tuple[Tensor, Tensor | None]:
        """From the last activation to the first convolution's result, and to the image."""
        network, traces = self.network, self.traces
        total = self._note(
            network.following[-1], layers.activation_backward(gradient, last, network.following[-1], None)
        )
        for number in reversed(range(len(network.blocks))):
            before, inner = traces[2 * number], traces[2 * number + 1]
            total = self._block(network.blocks[number], total, before, inner)
        x, normalize, stem = traces[0].x, network.model.normalize, network.model.conv1
        if id(stem.weight) in self.wanted:
            with weights.aside(id(stem.weight), total, x):
                self.found[id(stem.weight)] = layers.stem_weight_gradient(total, traces[0], normalize, stem)
        return total, layers.stem_input_gradient(total, x, normalize, stem) if self.image else None

    def _block(self, block: Any, total: Tensor, before: Trace, inner: Trace) -> Tensor:
        self._weight(total, block.conv2, inner.active)
        by_inner = self._note(block.bn2, layers.backward(total, block.conv2, inner, block.bn2, None))
        self._weight(by_inner, block.conv1, before.active)
        if not isinstance(block.shortcut, nn.Conv2d):
            return self._note(block.bn1, layers.backward(by_inner, block.conv1, before, block.bn1, total))
        activated = self.network.activated_shortcut
        source = before.active if activated else before.total
        assert source is not None
        self._weight(total, block.shortcut, source)
        ways = by_inner, block.conv1, total, block.shortcut
        return self._note(block.bn1, layers.projecting_backward(*ways, before, block.bn1, activated))

    def _note(self, bn: nn.BatchNorm2d, found: layers.Gradients) -> Tensor:
        for parameter, gradient in ((bn.weight, found.weight), (bn.bias, found.bias)):
            if gradient is not None and id(parameter) in self.wanted:
                self.found[id(parameter)] = gradient
        return found.total

    def _weight(self, gradient: Tensor, conv: nn.Conv2d, x: Tensor) -> None:
        """The gradient by a weight, beside the rest of the way: nothing on the way needs it."""
        if id(conv.weight) in self.wanted:
            with weights.aside(id(conv.weight), gradient, x):
                self.found[id(conv.weight)] = layers.weight_gradient(gradient, conv, x)


def fused_forward(model: nn.Module) -> FusedForward | None:
    """The model's forward pass by hand-written kernels, or None for a model that has none or is partly frozen."""
    whole = all(module.training == model.training for module in model.modules())
    learns = all(weight.requires_grad for weight in model.parameters())
    return FusedForward(model) if whole and learns and has_kernels(model) else None


def has_kernels(model: nn.Module) -> TypeGuard[PreActResNet | WideResNet]:
    """Whether this is one of our networks as we made it: no subclass, no layer exchanged, no hook to be missed."""
    if type(model) not in (PreActResNet, WideResNet):
        return False
    ours = {type(module) for module in type(model)(2, Normalize(1), *_SMALLEST[type(model)]).modules()}
    for module in model.modules():
        if type(module) not in ours or module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return False
        if isinstance(module, nn.BatchNorm2d) and (module.momentum is None or not module.track_running_stats):
            return False
    return True


def _dense(gradient: Tensor, like: Tensor) -> Tensor:
    """A gradient in the layout and precision of the activations."""
    return gradient.to(like.dtype).contiguous(memory_format=torch.channels_last)
