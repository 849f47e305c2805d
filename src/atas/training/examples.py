"""Training examples by gradient norm, measured once at the end of a training, for its report.

Methods with adaptive step sizes keep a gradient norm of every example. The trained model is attacked on a sample of
each decile of the norms, and the images at both ends are kept as thumbnails.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor, nn

from atas import __version__, attacks
from atas._utils.documents import MalformedError, conform
from atas.core.autograd import set_mode
from atas.core.tensor_file import read_tensors, take_tensor, write_tensors
from atas.core.thumbnails import SIDE, thumbnails
from atas.data import Split
from atas.errors import DataError
from atas.ops.precision import no_cudnn_benchmark, strict_float32
from atas.threat import Threat

_KIND = "atas-training-examples-1"
_NUM_EXTREMES = 8
_DECILES = 10
_MIN_ATTACKED, _MAX_ATTACKED = 100, 2000
_VISITS = 180  # of training examples for each that is attacked: about 3% of the training's passes


class _Metadata(TypedDict):
    count: int
    classes: list[str]
    versions: dict[str, str]


@dataclass(frozen=True, eq=False)
class TrainingExamples:
    """Accuracy by decile of the gradient norm, and the images with the largest and the smallest norms.

    Attributes:
        count: the number of training images.
        classes: names of the classes.
        deciles: of a sample of each decile, smallest norms first, the number of images, of those that the model
            classifies correctly, and of those that are robust to PGD-10: int64 (10, 3), or fewer rows.
        index: positions in the training set (2k,): the k largest norms, largest first, then the k smallest.
        images: uint8 (2k, C, H, W), at most 64 pixels a side.
        labels: (2k,).
        norms: the method's averages (2k,).
        step_sizes: the last step sizes (2k,).
    """

    count: int
    classes: tuple[str, ...]
    deciles: Tensor
    index: Tensor
    images: Tensor
    labels: Tensor
    norms: Tensor
    step_sizes: Tensor


def measure_examples(
    model: nn.Module,
    train: Split,
    rows: Tensor | None,
    norms: Tensor,
    step_sizes: Tensor,
    threat: Threat,
    *,
    epochs: int,
    batch_size: int,
) -> TrainingExamples:
    """Attack a sample of the training examples, evenly spread over their gradient norms.

    `rows` are the positions of the training's examples in `train`, by default all; norms and step sizes are in their
    order. The sample grows with the length of the training, up to 2,000 images.
    """
    norms, step_sizes = norms.cpu(), step_sizes.cpu()
    index = torch.arange(len(norms)) if rows is None else rows
    order = norms.argsort(stable=True)
    count = min(max(len(order) * epochs // _VISITS, _MIN_ATTACKED), _MAX_ATTACKED, len(order))
    sample = order[torch.linspace(0, len(order) - 1, count, dtype=torch.float64).round().long()]
    correct = _verdicts(model, train, index[sample], threat, batch_size)
    parts = correct.tensor_split(min(_DECILES, count))
    extremes = torch.cat([order.flip(0)[:_NUM_EXTREMES], order[:_NUM_EXTREMES]])
    return TrainingExamples(
        len(order),
        tuple(train.classes),
        torch.stack([torch.cat([torch.tensor([len(part)]), part.sum(0)]) for part in parts]),
        index[extremes],
        torch.cat([thumbnails(train.images[index[row : row + 1]].float() / 255) for row in extremes.tolist()]),
        train.labels[index[extremes]],
        norms[extremes].float(),
        step_sizes[extremes].float(),
    )


def _verdicts(model: nn.Module, train: Split, index: Tensor, threat: Threat, batch_size: int) -> Tensor:
    """Return whether the model is correct on these images, clean and under PGD-10: int64 (N, 2)."""
    device = next(model.parameters()).device
    verdicts = []
    with strict_float32(device), no_cudnn_benchmark(), set_mode(model, training=False):
        for part in index.split(batch_size):
            x, y = train.images[part].to(device).float() / 255, train.labels[part].to(device)
            points = attacks.pgd(model, x, y, threat, steps=10, index=part.to(device))
            with torch.no_grad():
                verdicts.append(torch.stack([attacks.correct(model(point), y) for point in (x, points)], 1).cpu())
    return torch.cat(verdicts).long()


def write_examples(path: Path, examples: TrainingExamples) -> None:
    """Write the examples of a run."""
    metadata: _Metadata = {
        "count": examples.count,
        "classes": list(examples.classes),
        "versions": {"atas": __version__, "torch": torch.__version__},
    }
    names = ("deciles", "index", "images", "labels", "norms", "step_sizes")
    write_tensors(path, _KIND, {name: getattr(examples, name) for name in names}, metadata)


def read_examples(path: Path) -> TrainingExamples | None:
    """Return the examples of a run; None if the run has none, as of other methods and earlier versions."""
    if not path.exists():
        return None
    try:
        content = read_tensors(path, _KIND)
        if content is None:
            raise MalformedError("it is of another kind")
        metadata: _Metadata = conform(content[0], _Metadata)
        return _checked(metadata, content[1])
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except MalformedError as error:
        raise DataError(
            f"{path} is damaged ({error}); remove it, and write it again with: atas train --resume --out {path.parent}"
        ) from error


def _checked(metadata: _Metadata, tensors: dict[str, Tensor]) -> TrainingExamples:
    integers, floats = (torch.int64,), (torch.float32,)
    deciles = take_tensor(tensors, "deciles", integers, None, 3)
    index = take_tensor(tensors, "index", integers, None)
    labels = take_tensor(tensors, "labels", integers, len(index))
    images = take_tensor(tensors, "images", (torch.uint8,), len(index), None, None, None)
    if not 0 < len(deciles) <= _DECILES or bool((deciles < 0).any()) or bool((deciles[:, 1:] > deciles[:, :1]).any()):
        raise MalformedError("the deciles are not counts of images")
    if bool((deciles[:, 0] < 1).any()):
        raise MalformedError("a decile has no images")
    if len(index) % 2 or not len(index) or int(labels.min()) < 0 or int(labels.max()) >= len(metadata["classes"]):
        raise MalformedError("a label is not among the classes")
    if min(images.shape) < 1 or max(images.shape[2:]) > SIDE:
        raise MalformedError(f"the images are {list(images.shape)}")
    norms, sizes = (take_tensor(tensors, name, floats, len(index)) for name in ("norms", "step_sizes"))
    if not bool(torch.stack([norms, sizes]).isfinite().all()):
        raise MalformedError("a norm is not finite")
    return TrainingExamples(metadata["count"], tuple(metadata["classes"]), deciles, index, images, labels, norms, sizes)
