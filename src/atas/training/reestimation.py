"""BatchNorm statistics of averaged weights, re-estimated at the end of a training.

`EMA` averages the running statistics too. They belong to the weights of their steps, and need not fit averaged weights
if those moved far. Here they are measured: a pass over training images as the method shows them, in which only the
BatchNorm layers are in train mode and count every batch equally.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from atas.distributed.batchnorm import running_statistics
from atas.distributed.world import all_reduce_tensors
from atas.methods import InputPerturbation
from atas.training.engine import Engine

IMAGES = 10_000  # whole batches of at least this many, or of all


def reestimate_batchnorm(engine: Engine) -> None:
    """Replace the running statistics of all averaged weights of an engine, at the end of its last epoch."""
    engine.enter_train_mode()  # no step may have done so since a resume
    models = [average.model for average in engine.averages.values()]
    layers = [[*_training_layers(model, engine.compute_model)] for model in models]
    momenta = [(layer, layer.momentum) for own in layers for layer in own]
    counts = [(tensor, tensor.clone()) for layer, _ in momenta if (tensor := layer.num_batches_tracked) is not None]
    for layer, _ in momenta:
        layer.train()
    with torch.no_grad(), engine.precision():
        for number, inputs in enumerate(_inputs(engine)):
            for layer, _ in momenta:
                layer.momentum = 1 / (number + 1)  # the mean over batches; None would read its count on the host
            for model in models:
                model(inputs)
    if engine.world.size > 1:
        statistics = [statistic for model in models for statistic in running_statistics(model)]
        share = engine.loader.batch_fraction(0)
        summed = all_reduce_tensors([share * statistic for statistic in statistics], engine.world) if statistics else []
        for statistic, total in zip(statistics, summed, strict=True):
            statistic.copy_(total)
    for layer, momentum in momenta:
        layer.eval()
        layer.momentum = momentum
    for tensor, count in counts:
        tensor.copy_(count)


def _training_layers(model: nn.Module, trained: nn.Module) -> Iterator[_BatchNorm]:
    """Yield the BatchNorm layers whose counterparts in the trained model are not kept in eval mode."""
    for layer, counterpart in zip(model.modules(), trained.modules(), strict=True):
        if isinstance(layer, _BatchNorm) and layer.track_running_stats and counterpart.training:
            yield layer


def _inputs(engine: Engine) -> Iterator[Tensor]:
    """Yield batches of training images as the method shows them; a short last batch only if there is no other."""
    loader, method, batch_size = engine.loader, engine.method, engine.recipe.training.batch_size
    assert isinstance(method, InputPerturbation)  # recipes with other methods are refused
    order = loader.order(int(method.epoch))
    loader.start_epoch(order, 0)
    batches = order.split([loader.size(number) for number in range(len(loader))])
    count = min(-(-IMAGES // batch_size), loader.shard.examples // batch_size)  # equal on all ranks
    for number, index in enumerate(batches[: max(1, count)]):
        loader.prefetch(number)
        method.before_step(index)
        batch = loader.take(index.to(engine.device), method.epoch)
        yield method.batchnorm_inputs(engine.compute_model, batch)
        method.after_step(index)
