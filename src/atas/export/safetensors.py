"""Safetensors: weights with the metadata to build the model again, and `load`, which reads them back."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from atas.errors import DataError, UsageError
from atas.export.base import ExportSource, FormatOutput, compare_outputs
from atas.models.weights import GIVEN, load_weights, read_weights, save_weights
from atas.training import Run

_BUILT_IN = """\
```python
import atas

model = atas.load("model.safetensors")  # in eval mode
logits = model(images)  # float, (N, {channels}, {height}, {width}), pixels in [0, 1]
```
"""

_OWN = """\
The network is code of its own, `{network}`, which does not travel with the weights. Build it for {classes} classes and
{channels} channels, and pass it:

```python
import atas

model = atas.load("model.safetensors", model=network)  # in eval mode
logits = model(images)  # float, (N, {channels}, {height}, {width}), pixels in [0, 1]
```
"""


def write(source: ExportSource, folder: Path) -> FormatOutput:
    """`model.safetensors`, read back and compared."""
    path = folder / "model.safetensors"
    save_weights(path, source.model, source.metadata)
    if not source.is_built_in:  # only the user's code can build the network that the file is for
        network = source.run.recipe.model.name.removeprefix(GIVEN)
        return FormatOutput((path,), source.format_usage(_OWN, network=network, classes=source.metadata["num_classes"]))
    comparison = compare_outputs(source, load(path), "the file, read back,")
    return FormatOutput((path,), source.format_usage(_BUILT_IN), comparison)


def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """A trained model on the CPU, in eval mode; it takes pixels in [0, 1] and normalises them inside.

    `path` is a file that `atas export --to safetensors` or a training wrote, or the folder of a run. Where the network
    is code of your own, build it and pass it as `model`: a file is never a reason to import or run anything.

    >>> model = load("runs/mine/export/safetensors/model.safetensors")  # doctest: +SKIP
    """
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"the path of a model is text or a Path; got {type(path).__name__}")
    path = Path(path)
    if path.is_dir():
        return Run.load(path, model=model).model
    if not path.exists():
        raise DataError(f"there is no file or run {path}; give a .safetensors file or the folder of a run")
    if model is None:
        _refuse_custom_network(path)
    return load_weights(path, model)


def _refuse_custom_network(path: Path) -> None:
    metadata, _ = read_weights(path)
    name = metadata.get("name")
    if name is None:
        raise UsageError(
            f"{path} does not say which model its weights are of, so another program wrote it; pass the model too: "
            f"atas.load(path, model=...)"
        )
    if ":" in str(name):
        network = str(name).removeprefix(GIVEN)
        raise UsageError(
            f"the network of {path} is code of its own ({network}, {metadata.get('num_classes')} classes, images of "
            f"shape {metadata.get('shape')}), which does not travel with the weights; build it and pass it: "
            f"atas.load(path, model=...)"
        )
