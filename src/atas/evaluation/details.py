"""What an evaluation stores beside its verdicts: predictions, examples with their perturbed images, loss landscapes.

The file lies beside the result, with the ending `.safetensors`. It is bound to its result: a file that belongs to
another one, as a stopped process may leave it, is not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from atas import __version__
from atas._utils.documents import MalformedError, conform
from atas.core.tensor_file import is_of_other_kind, read_tensors, take_tensor, write_tensors
from atas.core.thumbnails import SIDE
from atas.errors import UsageError

GRID = 21  # points of a landscape along each direction
NO_CLASS = -1  # the prediction of a model whose output is NaN

_KIND = "atas-evaluation-1"
_INTEGERS = (torch.int16, torch.int32)
_PREDICTED, _ADVERSARIAL, _PERTURBATION = "predicted.", "examples.adversarial.", "examples.perturbation."
_LABEL, _CONFIDENCE = "examples.label.", "examples.confidence."
_CLEAN = "clean"


class _Metadata(TypedDict):
    weights: str
    data: str
    result: str
    classes: list[str]
    versions: dict[str, str]


@dataclass(frozen=True, eq=False)
class AttackedImages:
    """K examples under one attack; without a success, the last point of PGD and FGSM, or the image of a search."""

    adversarial: Tensor
    """Images (K, C, H, W), uint8, of at most 64 pixels a side."""
    perturbation: Tensor
    """Likewise, each scaled so that its largest entry is black or white; 128 is no change."""
    label: Tensor
    """Predicted classes (K,); -1 where the output was NaN."""
    confidence: Tensor
    """Probabilities of these classes (K,), float32."""


@dataclass(frozen=True, eq=False)
class ExampleImages:
    """Examples of every outcome of an evaluation, and every attack on them."""

    index: Tensor
    """Positions in the data (K,), rising."""
    attacks: dict[str, AttackedImages]
    """The images as the model got them (`clean`), and under each attack."""


@dataclass(frozen=True, eq=False)
class LossLandscapes:
    """The loss around K images: rows along a random direction, columns along that of FGSM, from -1 to 1 budgets."""

    index: Tensor
    """Positions in the data (K,)."""
    loss: Tensor
    """Cross-entropy (K, 21, 21), float32."""


@dataclass(frozen=True, eq=False)
class EvaluationDetails:
    """Labels and predictions of all examples, and pictures of a few.

    Attributes:
        labels: the labels (n,).
        predicted: for `clean` and each attack the predicted class of every example (n,): at the image, or at the point
            that the attack found. -1 stands for an output that is NaN.
        classes: names of the classes, if the data has names.
        examples: at most 24 examples, chosen so that every outcome is among them.
        landscapes: the loss around at most three of them.
    """

    labels: Tensor
    predicted: dict[str, Tensor]
    classes: tuple[str, ...] = ()
    examples: ExampleImages | None = None
    landscapes: LossLandscapes | None = None

    def class_name(self, label: int) -> str:
        """Return the name of a class, or its number."""
        if label == NO_CLASS:
            return "no class (NaN)"
        return self.classes[label] if label < len(self.classes) else f"class {label}"


def details_path(path: Path) -> Path:
    """Return the file of the details of a result; raise UsageError if the result has that name itself."""
    beside = path.with_name(f"{path.stem}.safetensors")
    if beside == path:
        raise UsageError(f"a result is a JSON file; got {path}: give it another name, such as {path.stem}.json")
    return beside


def check_replaceable(path: Path) -> None:
    """Raise UsageError if the file of details for the result `path` would replace a file of another kind."""
    beside = details_path(path)
    if is_of_other_kind(beside, _KIND):
        raise UsageError(
            f"the images of the result {path} would replace {beside}, which holds something else: give the result "
            "another name"
        )


def write_details(path: Path, details: EvaluationDetails, weights: str, data: str, result: str) -> None:
    """Write the details of the result `path`, which has the fingerprint `result`."""
    check_replaceable(path)
    metadata: _Metadata = {
        "weights": weights,
        "data": data,
        "result": result,
        "classes": list(details.classes),
        "versions": {"atas": __version__, "torch": torch.__version__},
    }
    write_tensors(details_path(path), _KIND, _to_tensors(details), metadata)


def read_details(
    path: Path, correct: dict[str, Tensor], weights: str, data: str, result: str
) -> EvaluationDetails | None:
    """Return the details of the result `path`; None if there are none, or if they belong to another result.

    Raises MalformedError if they are damaged, and OSError if they cannot be read.
    """
    if path.suffix == ".safetensors" or not (beside := details_path(path)).exists():
        return None
    content = read_tensors(beside, _KIND)
    if content is None:
        return None
    metadata: _Metadata = conform(content[0], _Metadata)
    if (metadata["weights"], metadata["data"], metadata["result"]) != (weights, data, result):
        return None
    details = _from_tensors(content[1], tuple(metadata["classes"]), len(correct[_CLEAN]))
    _check(details, correct)
    return details


def _to_tensors(details: EvaluationDetails) -> dict[str, Tensor]:
    labels = torch.cat([details.labels, *details.predicted.values()])
    kind = torch.int16 if int(labels.max()) <= torch.iinfo(torch.int16).max else torch.int32
    tensors = {"labels": details.labels.to(kind)}
    tensors |= {f"{_PREDICTED}{name}": values.to(kind) for name, values in details.predicted.items()}
    if details.examples is not None:
        tensors["examples.index"] = details.examples.index
        for name, images in details.examples.attacks.items():
            tensors[f"{_ADVERSARIAL}{name}"] = images.adversarial
            tensors[f"{_PERTURBATION}{name}"] = images.perturbation
            tensors[f"{_LABEL}{name}"] = images.label.to(torch.int32)
            tensors[f"{_CONFIDENCE}{name}"] = images.confidence
    if details.landscapes is not None:
        tensors |= {"landscape.index": details.landscapes.index, "landscape.loss": details.landscapes.loss}
    return tensors


def _from_tensors(tensors: dict[str, Tensor], classes: tuple[str, ...], n: int) -> EvaluationDetails:
    labels = take_tensor(tensors, "labels", _INTEGERS, n).long()
    names = [name for name in tensors if name.startswith(_PREDICTED)]
    predicted = {name.removeprefix(_PREDICTED): take_tensor(tensors, name, _INTEGERS, n).long() for name in names}
    examples = _examples(tensors) if "examples.index" in tensors else None
    landscapes = None
    if "landscape.index" in tensors:
        index = take_tensor(tensors, "landscape.index", (torch.int64,), None)
        loss = take_tensor(tensors, "landscape.loss", (torch.float32,), len(index), GRID, GRID)
        landscapes = LossLandscapes(index, loss)
    return EvaluationDetails(labels, predicted, classes, examples, landscapes)


def _examples(tensors: dict[str, Tensor]) -> ExampleImages:
    index = take_tensor(tensors, "examples.index", (torch.int64,), None)
    count, attacks = len(index), {}
    shape: tuple[int | None, ...] = (None, None, None)
    for name in [name.removeprefix(_ADVERSARIAL) for name in tensors if name.startswith(_ADVERSARIAL)]:
        adversarial = take_tensor(tensors, f"{_ADVERSARIAL}{name}", (torch.uint8,), count, *shape)
        shape = tuple(adversarial.shape[1:])
        attacks[name] = AttackedImages(
            adversarial,
            take_tensor(tensors, f"{_PERTURBATION}{name}", (torch.uint8,), count, *shape),
            take_tensor(tensors, f"{_LABEL}{name}", (torch.int32,), count).long(),
            take_tensor(tensors, f"{_CONFIDENCE}{name}", (torch.float32,), count),
        )
    return ExampleImages(index, attacks)


def _check(details: EvaluationDetails, correct: dict[str, Tensor]) -> None:
    """Raise MalformedError unless the details agree with the verdicts, and with each other."""
    n, labels = len(details.labels), details.labels
    attacks = {name: verdicts for name, verdicts in correct.items() if name != "worst"}
    if int(labels.min()) < 0 or (details.classes and int(labels.max()) >= len(details.classes)):
        raise MalformedError("a label is not among the classes")
    for name, predicted in details.predicted.items():
        if name not in attacks or not torch.equal(predicted == labels, attacks[name]):
            raise MalformedError(f"the predictions under {name} and the verdicts do not agree")
        if int(predicted.min()) < NO_CLASS:
            raise MalformedError(f"a prediction under {name} is not a class")
    examples, landscapes = details.examples, details.landscapes
    if examples is not None:
        _check_index("examples.index", examples.index, n)
        if _CLEAN not in examples.attacks or not examples.attacks.keys() <= attacks.keys():
            raise MalformedError("the examples are not of these attacks")
        for name, images in examples.attacks.items():
            if min(images.adversarial.shape[1:]) < 1 or max(images.adversarial.shape[2:]) > SIDE:
                raise MalformedError(f"the images are {list(images.adversarial.shape)}")
            if not torch.equal(images.label == labels[examples.index], attacks[name][examples.index]):
                raise MalformedError(f"the examples under {name} and the verdicts do not agree")
            if not bool(((images.confidence >= 0) & (images.confidence <= 1)).all()):
                raise MalformedError(f"a confidence under {name} is not a share")
    if landscapes is not None:
        known = examples is not None and bool(torch.isin(landscapes.index, examples.index).all())
        if not len(landscapes.index) or not known or not bool(landscapes.loss.isfinite().all()):
            raise MalformedError("the landscapes are not of the examples, or not finite")


def _check_index(name: str, index: Tensor, n: int) -> None:
    if not len(index) or int(index[0]) < 0 or int(index[-1]) >= n or not bool((index.diff() > 0).all()):
        raise MalformedError(f"{name} is not a list of positions")
