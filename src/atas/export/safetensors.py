"""Safetensors: weights with the metadata to rebuild the model, and `load`, which reads them."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from atas._utils.formatting import markdown_code
from atas._utils.imports import GIVEN, is_code, is_timm
from atas.errors import UsageError
from atas.export.base import ExportSource, FormatOutput, compare_outputs
from atas.models import published
from atas.models.weights import load_weights, read_weights, save_weights
from atas.training import Run

_BUILT_IN = """\
```python
import atas

model = atas.load("model.safetensors")  # in eval mode
logits = model(images)  # float, (N, {channels}, {height}, {width}), pixels in [0, 1]
```
"""

_TIMM = (
    _BUILT_IN
    + """
The network is one of timm: `pip install 'atas[timm]'`.
"""
)

_OWN = """\
The network {network} is user code, which is not part of this file. Build it for {classes} classes and {channels}
channels, and pass it:

```python
import atas

model = atas.load("model.safetensors", model=network)  # in eval mode
logits = model(images)  # float, (N, {channels}, {height}, {width}), pixels in [0, 1]
```
"""


def write(source: ExportSource, folder: Path) -> FormatOutput:
    """Write `model.safetensors`, read it back and compare it."""
    path = folder / "model.safetensors"
    save_weights(path, source.model, source.metadata)
    name = source.run.recipe.model.name
    if is_code(name):  # only the user's code can build the network that the file is for
        network = markdown_code(name.removeprefix(GIVEN))
        return FormatOutput((path,), source.format_usage(_OWN, network=network, classes=source.metadata["num_classes"]))
    comparison = compare_outputs(source, load(path), "the file, read back,")
    return FormatOutput((path,), source.format_usage(_TIMM if is_timm(name) else _BUILT_IN), comparison)


def load(path: str | os.PathLike[str], model: nn.Module | None = None, *, trust: bool = False) -> nn.Module:
    """Load a trained model on the CPU, in eval mode; it takes pixels in [0, 1] and normalises them itself.

    `path` is a file written by `atas export --to safetensors` or by training, the folder of a run, a folder that
    `atas export --to hub` has prepared, the name of a published model, or a Hugging Face repository as `hf:owner/name`.
    If the network is your own code, build it and pass it as `model`. Code that a file or a folder names is imported and
    run only with `trust`.

    >>> model = load("runs/mine/export/safetensors/model.safetensors")  # doctest: +SKIP
    """
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"path must be a string or a Path; got {type(path).__name__}")
    path = published.locate(path) if isinstance(path, str) and published.is_name(path) else Path(path)
    if path.is_dir() and not published.is_repository(path):
        return Run.load(path, model=model, trust=trust).model
    if path.is_dir():
        path = path / published.FILE
    if not path.exists():
        raise published.not_found(path)
    if model is None:
        _refuse_custom_network(path, trust)
    return load_weights(path, model, trust=trust)


def _refuse_custom_network(path: Path, trust: bool) -> None:
    metadata, _ = read_weights(path)
    name = metadata.get("name")
    if name is None:
        raise UsageError(
            f"{path} does not name its network, so another program wrote it; pass the network: "
            f"atas.load(path, model=...)"
        )
    if is_code(str(name)) and not (trust and not str(name).startswith(GIVEN)):
        network = str(name).removeprefix(GIVEN)
        raise UsageError(
            f"the network of {path} is user code ({network}, {metadata.get('num_classes')} classes, images of shape "
            f"{metadata.get('shape')}), which is not part of the file; build it and pass it: atas.load(path, model=...)"
            f"{'' if str(name).startswith(GIVEN) else ', or pass trust=True to import and run it'}"
        )
