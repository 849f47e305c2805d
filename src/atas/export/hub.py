"""A folder to upload as a Hugging Face repository: weights in float16, a model card, and the metadata as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from atas._utils.files import write_text
from atas._utils.formatting import shell_quote
from atas.errors import UsageError
from atas.export.base import ExportSource, FormatOutput, compare_outputs
from atas.models.published import FILE
from atas.models.weights import load_weights, save_weights

_TOLERANCE = 1e-2  # of the largest logit: float16 has 11 significant bits
_USAGE = """\
```python
import atas  # pip install 'atas[hub]'

model = atas.load("hf:OWNER/NAME")  # this repository; in float32, in eval mode
logits = model(images)  # float, (N, {channels}, {height}, {width}), pixels in [0, 1]
```

Weight matrices and kernels are stored in float16. The results above are of the weights before they were rounded.
"""


def write(source: ExportSource, folder: Path) -> FormatOutput:
    """Write the files of a repository, read the weights back and compare the model."""
    if not source.is_built_in:
        raise UsageError(
            f"the network {source.run.recipe.model.name} is user code, which a repository of weights cannot hold; "
            f"export it to safetensors and publish the code with it"
        )
    weights, config = folder / FILE, folder / "config.json"
    save_weights(weights, source.model, source.metadata, half=True)
    write_text(config, json.dumps({"library_name": "atas", **source.metadata}, indent=2) + "\n")
    comparison = compare_outputs(source, load_weights(weights), "the file, read back,", tolerance=_TOLERANCE)
    note = f"to publish it, fill in OWNER/NAME in README.md and run: hf upload OWNER/NAME {shell_quote(folder)}"
    return FormatOutput((weights, config), source.format_usage(_USAGE), comparison, (note,))
