"""Weights with all that is needed to build the model again: read back by `atas.load`."""

from __future__ import annotations

from pathlib import Path

from atas.export._check import check
from atas.export._load import load
from atas.export._source import Source
from atas.export._written import Written
from atas.training.weights import save_weights

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


def write(source: Source, folder: Path) -> Written:
    """`model.safetensors`, read back and compared."""
    path = folder / "model.safetensors"
    save_weights(path, source.model, source.about)
    found = check(source, load(path) if source.built_in else source.model, "the file, read back,")
    channels, height, width = source.shape
    usage = (_BUILT_IN if source.built_in else _OWN).format(
        network=source.run.recipe.model.name.removeprefix("given:"),
        classes=source.about["num_classes"],
        channels=channels,
        height=height,
        width=width,
    )
    return Written((path,), usage, found if source.built_in else None)
