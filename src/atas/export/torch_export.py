"""PyTorch's exported program (.pt2): a graph that runs without the model's code."""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch

from atas._utils.files import write_atomically
from atas.export.base import ExportSource, FormatOutput, compare_outputs, dummy_input, quiet_exporter, tracing_error

_EXTRA = "atas.json"
_USAGE = """\
```python
import torch

model = torch.export.load("model.pt2").module()
logits = model(images)  # float32, (N, {channels}, {height}, {width}), pixels in [0, 1]
```

The batch size is dynamic, the image size is fixed. The graph is in eval mode. Load only files that you trust.
"""


def write(source: ExportSource, folder: Path) -> FormatOutput:
    """Write `model.pt2` after reading it back and comparing it."""
    model = source.traceable_model
    try:
        with quiet_exporter():
            program = torch.export.export(
                model, (dummy_input(source.shape),), dynamic_shapes=({0: torch.export.Dim("batch")},)
            )
    except Exception as error:  # the model's code may raise anything
        raise tracing_error("as a program", error) from error
    content = io.BytesIO()
    torch.export.save(program, content, extra_files={_EXTRA: json.dumps(source.metadata)})
    content.seek(0)
    with quiet_exporter():
        loaded = torch.export.load(content).module()
    comparison = compare_outputs(source, loaded, f"torch.export of {torch.__version__}")
    path = folder / "model.pt2"
    write_atomically(path, lambda temporary: temporary.write_bytes(content.getvalue()))
    return FormatOutput((path,), source.format_usage(_USAGE), comparison)
