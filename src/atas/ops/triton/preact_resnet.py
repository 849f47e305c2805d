"""Forward and backward passes of PreActResNet and WideResNet through the kernels of this package.

A layer is a convolution, an optional residual addition, BatchNorm and ReLU. Each direction of a layer runs as few
kernels as possible: those of `conv` where they support the convolution, otherwise cuDNN's convolution and the passes of
`batchnorm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from atas.core.autograd import set_mode
from atas.core.split_model import SplitModel
from atas.models import Normalize, PreActResNet, WideResNet
from atas.models.layers import spatial_mean
from atas.ops.cuda_graphs import weight_grad_stream
from atas.ops.jvp import loss_jvp
from atas.ops.networks import AcceleratedNetwork
from atas.ops.triton import batchnorm, conv_stride2, conv_tiling, head
from atas.ops.triton import conv as conv_kernels
from atas.ops.triton import stem as stem_kernels
from atas.ops.triton.conv import Projection
from atas.ops.triton.launch import compile_only, first_order, parallel_compile


@dataclass
class LayerState:
    """The tensors that a layer keeps for its backward pass: `bn_state` in train mode, `patches` in the stem."""

    x: Tensor
    pre_bn: Tensor | None
    act: Tensor
    bn_state: Tensor | None = None
    patches: Tensor | None = None


def conv_bn_relu(x: Tensor, conv: nn.Conv2d, residual: Tensor | Projection | None, bn: nn.BatchNorm2d) -> LayerState:
    """Compute pre_bn = conv(x) + residual and act = relu(bn(pre_bn)), in the mode that BatchNorm is in."""
    supported = conv_tiling.supports(conv, x)
    if isinstance(residual, Projection) and not (supported and conv_tiling.supports(residual.conv, residual.source)):
        residual = conv2d(residual.source, residual.conv)
    if supported:
        if bn.training:
            return LayerState(x, *conv_kernels.forward_train(x, conv, residual, bn))
        return LayerState(x, *conv_kernels.forward_eval(x, conv, residual, bn))
    assert bn.running_mean is not None
    assert bn.running_var is not None
    assert not isinstance(residual, Projection)
    out = conv2d(x, conv)
    statistics = bn.weight, bn.bias, bn.running_mean, bn.running_var
    if bn.training:
        assert bn.momentum is not None
        return LayerState(x, *batchnorm.forward_train(out, residual, *statistics, bn.momentum, bn.eps))
    return LayerState(x, *batchnorm.forward_eval(out, residual, *statistics, bn.eps))


def stem_forward(x: Tensor, normalize: Normalize, conv: nn.Conv2d, bn: nn.BatchNorm2d) -> LayerState:
    """Compute pre_bn = conv(normalize(x)) and act = relu(bn(pre_bn)); the state keeps the original image."""
    if not stem_kernels.supports(conv):
        return replace(conv_bn_relu(normalized_input(x, normalize, conv), conv, None, bn), x=x)
    x = x.contiguous()
    if bn.training:
        return LayerState(x, *stem_kernels.forward_train(x, normalize, conv, bn))
    return LayerState(x, *stem_kernels.forward_eval(x, normalize, conv, bn))


def stem_input_grad(gradient: Tensor, x: Tensor, normalize: Normalize, conv: nn.Conv2d) -> Tensor:
    """Return the gradient by the image."""
    if stem_kernels.supports(conv):
        return stem_kernels.input_grad(gradient, x, normalize, conv)
    return conv_input_grad(gradient, conv, normalized_input(x, normalize, conv)).to(x.dtype) / normalize.std


def stem_weight_grad(gradient: Tensor, state: LayerState, normalize: Normalize, conv: nn.Conv2d) -> Tensor:
    """Return the gradient by the weight of the first convolution."""
    if state.patches is not None:
        return stem_kernels.weight_grad(gradient, state.patches, conv)
    return conv_weight_grad(gradient, conv, normalized_input(state.x, normalize, conv))


def normalized_input(x: Tensor, normalize: Normalize, conv: nn.Conv2d) -> Tensor:
    """Return the image as the first convolution takes it."""
    return normalize(x).to(conv.weight.dtype, memory_format=torch.channels_last)


@dataclass
class LayerGradients:
    """Gradients by the input of BatchNorm and, in train mode, by its weight and bias."""

    pre_bn: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None


def conv_bn_relu_backward(
    gradient: Tensor, conv: nn.Conv2d, state: LayerState, bn: nn.BatchNorm2d, residual_grad: Tensor | None
) -> LayerGradients:
    """Go from a convolution's output back through it and the ReLU and BatchNorm before it; `residual_grad` is added."""
    if not conv_tiling.supports(conv, state.act, backward=True):
        return bn_relu_backward(conv_input_grad(gradient, conv, state.act), state, bn, residual_grad)
    if state.bn_state is None:
        return LayerGradients(conv_kernels.backward_eval(gradient, conv, state.act, residual_grad, bn))
    assert state.pre_bn is not None
    return LayerGradients(*conv_kernels.backward_train(gradient, conv, state.pre_bn, state.bn_state, residual_grad))


def downsample_backward(
    main_grad: Tensor,
    conv: nn.Conv2d,
    shortcut_grad: Tensor,
    shortcut: nn.Conv2d,
    state: LayerState,
    bn: nn.BatchNorm2d,
    activated: bool,
) -> LayerGradients:
    """Go from the outputs of a block's first convolution and of its shortcut back to the block's input."""
    if conv_stride2.supports(conv, shortcut, state.act):
        args = main_grad, conv, shortcut_grad, shortcut
        if state.bn_state is None:
            return LayerGradients(conv_stride2.backward_eval(*args, state.act, bn, activated))
        assert state.pre_bn is not None
        return LayerGradients(*conv_stride2.backward_train(*args, state.pre_bn, state.bn_state, activated))
    residual_grad = conv_input_grad(shortcut_grad, shortcut, state.act)
    if activated:
        return bn_relu_backward(conv_input_grad(main_grad, conv, state.act).add_(residual_grad), state, bn, None)
    return conv_bn_relu_backward(main_grad, conv, state, bn, residual_grad)


def bn_relu_backward(
    gradient: Tensor, state: LayerState, bn: nn.BatchNorm2d, residual_grad: Tensor | None
) -> LayerGradients:
    """Go from relu(bn(pre_bn)) back to pre_bn; `residual_grad` is added."""
    if state.bn_state is None:
        assert bn.running_var is not None
        return LayerGradients(
            batchnorm.backward_eval(state.act, gradient, residual_grad, bn.weight, bn.running_var, bn.eps)
        )
    assert state.pre_bn is not None
    return LayerGradients(*batchnorm.backward_train(state.pre_bn, gradient, residual_grad, state.bn_state))


def conv2d(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """Convolve as `nn.Conv2d` does."""
    return torch.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)


def conv_input_grad(gradient: Tensor, conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Return the gradient by the input of a convolution.

    Without a stride this is a convolution with rotated weights, and cuDNN's forward kernels are faster.
    """
    same = tuple(size // 2 for size in conv.kernel_size)
    odd = all(size % 2 for size in conv.kernel_size)
    if odd and (conv.stride, conv.padding, conv.dilation, conv.groups) == ((1, 1), same, (1, 1), 1):
        rotated = conv.weight.flip(2, 3).transpose(0, 1).contiguous(memory_format=torch.channels_last)
        return torch.conv2d(gradient, rotated, None, 1, same)
    return _convolution_backward(gradient, conv, x, 0)


def conv_weight_grad(gradient: Tensor, conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Return the gradient by the weight of a convolution."""
    return _convolution_backward(gradient, conv, x, 1)


def _convolution_backward(gradient: Tensor, conv: nn.Conv2d, x: Tensor, which: int) -> Tensor:
    needs_grad = [which == 0, which == 1, False]
    arguments = (None, conv.stride, conv.padding, conv.dilation, False, [0, 0], conv.groups, needs_grad)
    result = torch.ops.aten.convolution_backward(gradient, x, conv.weight, *arguments)[which]
    assert result is not None
    return result


class PreActNetwork(AcceleratedNetwork):
    """A pre-activation network by kernels."""

    model: PreActResNet | WideResNet

    def __init__(self, model: PreActResNet | WideResNet) -> None:
        super().__init__(model)
        self.activated_shortcut = isinstance(model, WideResNet)
        self.blocks: list[Any] = [
            block for name, stage in model.named_children() if name.startswith("layer") for block in stage.children()
        ]
        assert model.bn is not None  # `has_kernels` refuses the variants without it
        self.next_bns: list[nn.BatchNorm2d] = [*(block.bn1 for block in self.blocks[1:]), model.bn]

    def forward(self, x: Tensor, stem: Tensor | None = None) -> Tensor:
        """Return the logits of pixels in [0, 1]. `stem` gets the gradient by the first convolution's output."""
        model = self.model
        self.train_forward_count += model.training
        act = _Body.apply(x, stem, self, *self._body_parameters())
        if self._has_head(act):
            return head.PoolLinear.apply(act, model.fc.weight, model.fc.bias)
        return model.fc(spatial_mean(act, model.window))

    def loss_jvp(self, x: Tensor, direction: Tensor, y: Tensor) -> Tensor:
        """Return the derivative of the summed cross-entropy at x along a direction, in train mode."""
        return loss_jvp(self.model, x, direction, y)

    def split_first_layer(self) -> SplitModel:
        """Return the network split behind its first convolution."""
        return FirstLayerSplit(self)

    def forward_layers(self, x: Tensor) -> list[LayerState]:
        """Run the stem and every block; return the state of each layer."""
        blocks = self.blocks
        state = stem_forward(x, self.model.normalize, self.model.conv1, blocks[0].bn1)
        states = [state]
        for block, bn in zip(blocks, self.next_bns, strict=True):
            hidden = conv_bn_relu(state.act, block.conv1, None, block.bn2)
            state = conv_bn_relu(hidden.act, block.conv2, self._residual(block, state), bn)
            states += [hidden, state]
        return states

    def _residual(self, block: Any, block_input: LayerState) -> Tensor | Projection:
        """Return the term that a block's shortcut adds."""
        projects = isinstance(block.shortcut, nn.Conv2d)
        source = block_input.act if projects and self.activated_shortcut else block_input.pre_bn
        assert source is not None
        return Projection(source, block.shortcut) if projects else source

    def precompile(self, x: Tensor, modes: tuple[bool, ...] = (False, True)) -> None:
        """Compile the kernels for batches like x in these modes, in parallel. Nothing is run."""
        with parallel_compile():
            for training in modes:
                with compile_only(), set_mode(self.model, training), torch.no_grad():
                    self._compile_passes(x, self._body_parameters() if training else [])

    def _compile_passes(self, x: Tensor, learning: list[nn.Parameter]) -> None:
        states = self.forward_layers(x)
        backward_pass = BackwardPass(self, states, learning, image=True)
        backward_pass.run(torch.empty_like(states[-1].act), states[-1])
        weight_grad_stream.wait()
        if self._has_head(states[-1].act):
            fc = self.model.fc
            logits, _ = head.forward(states[-1].act, fc.weight, fc.bias)
            head.backward(logits, states[-1].act.shape, fc.weight)

    def _has_head(self, act: Tensor) -> bool:
        return self.model.window is None and head.supports(act)

    def _body_parameters(self) -> list[nn.Parameter]:
        return [parameter for name, parameter in self.model.named_parameters() if not name.startswith("fc.")]


class FirstLayerSplit:
    """A network split behind its first convolution, for `methods.YOPO`."""

    def __init__(self, network: PreActNetwork) -> None:
        self._network, self._model = network, network.model

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, and a tensor of the shape of the convolution's output that gets its gradient."""
        conv = self._model.conv1
        nothing = torch.zeros((), dtype=conv.weight.dtype, device=x.device)
        stem = nothing.expand(len(x), conv.out_channels, *x.shape[2:]).requires_grad_(True)
        return self._network(x, stem), stem

    def first_layer(self, x: Tensor) -> Tensor:
        """Return the output of the convolution."""
        return self._model.conv1(self._model.normalize(x))

    @torch.no_grad()
    def first_layer_vjp(self, adjoint: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of adjoint . first_layer(x) by x, which is the same for all x."""
        normalize, conv = self._model.normalize, self._model.conv1
        adjoint = adjoint.contiguous(memory_format=torch.channels_last)
        return stem_input_grad(adjoint, x.contiguous(), normalize, conv)


class _Body(torch.autograd.Function):
    """From the image to the last activation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stem: Tensor | None, network: PreActNetwork, *parameters: Tensor) -> Tensor:
        """Through the stem and every block."""
        ctx.network, ctx.parameters, ctx.states = network, parameters, network.forward_layers(x)
        last = ctx.states[-1]
        # Autograd holds the output; a second reference from ctx would be a cycle that is never freed.
        ctx.save_for_backward(last.act)
        ctx.states[-1] = LayerState(last.x, last.pre_bn, x, last.bn_state)
        return last.act

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Back through every block and the stem."""
        (act,) = ctx.saved_tensors
        needs_image_grad, needs_stem_grad, _, *learning = ctx.needs_input_grad
        needs_grad = [parameter for parameter, learn in zip(ctx.parameters, learning, strict=True) if learn]
        backward_pass = BackwardPass(ctx.network, ctx.states, needs_grad, image=needs_image_grad)
        last = ctx.states[-1]
        grad, image_grad = backward_pass.run(
            _match_layout(gradient, act), LayerState(last.x, last.pre_bn, act, last.bn_state)
        )
        weight_grads = (backward_pass.grads.get(id(parameter)) for parameter in ctx.parameters)
        return image_grad, grad if needs_stem_grad else None, None, *weight_grads


class BackwardPass:
    """A backward pass; `grads` holds the gradients so far, by the id of the parameter."""

    def __init__(
        self, network: PreActNetwork, states: list[LayerState], needs_grad: Sequence[Tensor], *, image: bool
    ) -> None:
        self.network, self.states, self.image = network, states, image
        self.needs_grad = {id(parameter) for parameter in needs_grad}
        self.grads: dict[int, Tensor] = {}

    def run(self, gradient: Tensor, last: LayerState) -> tuple[Tensor, Tensor | None]:
        """Return the gradients by the output of the first convolution and by the image."""
        network, states = self.network, self.states
        grad = self._keep_bn_grads(network.next_bns[-1], bn_relu_backward(gradient, last, network.next_bns[-1], None))
        for i in reversed(range(len(network.blocks))):
            block_input, hidden = states[2 * i], states[2 * i + 1]
            grad = self._block(network.blocks[i], grad, block_input, hidden)
        x, normalize, stem = states[0].x, network.model.normalize, network.model.conv1
        if id(stem.weight) in self.needs_grad:
            with weight_grad_stream.run(id(stem.weight), grad, x):
                self.grads[id(stem.weight)] = stem_weight_grad(grad, states[0], normalize, stem)
        return grad, stem_input_grad(grad, x, normalize, stem) if self.image else None

    def _block(self, block: Any, grad: Tensor, block_input: LayerState, hidden: LayerState) -> Tensor:
        self._weight(grad, block.conv2, hidden.act)
        hidden_grad = self._keep_bn_grads(block.bn2, conv_bn_relu_backward(grad, block.conv2, hidden, block.bn2, None))
        self._weight(hidden_grad, block.conv1, block_input.act)
        if not isinstance(block.shortcut, nn.Conv2d):
            return self._keep_bn_grads(
                block.bn1, conv_bn_relu_backward(hidden_grad, block.conv1, block_input, block.bn1, grad)
            )
        activated = self.network.activated_shortcut
        source = block_input.act if activated else block_input.pre_bn
        assert source is not None
        self._weight(grad, block.shortcut, source)
        args = hidden_grad, block.conv1, grad, block.shortcut
        return self._keep_bn_grads(block.bn1, downsample_backward(*args, block_input, block.bn1, activated))

    def _keep_bn_grads(self, bn: nn.BatchNorm2d, layer_grads: LayerGradients) -> Tensor:
        for parameter, gradient in ((bn.weight, layer_grads.weight), (bn.bias, layer_grads.bias)):
            if gradient is not None and id(parameter) in self.needs_grad:
                self.grads[id(parameter)] = gradient
        return layer_grads.pre_bn

    def _weight(self, gradient: Tensor, conv: nn.Conv2d, x: Tensor) -> None:
        """Compute the gradient by a weight on the side stream: the rest of the backward pass does not need it."""
        if id(conv.weight) in self.needs_grad:
            with weight_grad_stream.run(id(conv.weight), gradient, x):
                self.grads[id(conv.weight)] = conv_weight_grad(gradient, conv, x)


def _match_layout(gradient: Tensor, like: Tensor) -> Tensor:
    """Return a gradient in the layout and precision of the activations."""
    return gradient.to(like.dtype).contiguous(memory_format=torch.channels_last)
