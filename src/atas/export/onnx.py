"""ONNX, compared with PyTorch in onnxruntime."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from atas._utils.files import write_atomically
from atas.errors import AtasError
from atas.export.base import (
    ExportSource,
    FormatOutput,
    OutputComparison,
    compare_outputs,
    dummy_input,
    fixed_batch_error,
    quiet_exporter,
    tracing_error,
)

_USAGE = """\
```python
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
(logits,) = session.run(None, {{"pixels": images}})  # float32, (N, {channels}, {height}, {width}), pixels in [0, 1]
```

The batch size is dynamic, the image size is fixed. Metadata of the model is in the file under the key `atas`.
"""


def write(source: ExportSource, folder: Path) -> FormatOutput:
    """Write `model.onnx` as one file; it is kept only if onnxruntime agrees with PyTorch."""
    try:
        import onnx
        import onnxruntime
        import onnxscript
    except ImportError as error:
        raise AtasError(f"ONNX export needs more packages ({error}); pip install 'atas[onnx]'") from error
    del onnx, onnxscript  # PyTorch's exporter uses them
    path, comparisons = folder / "model.onnx", list[OutputComparison | None]()

    def fill(temporary: Path) -> None:
        _save(source, temporary)
        session = onnxruntime.InferenceSession(str(temporary), providers=["CPUExecutionProvider"])
        if isinstance(session.get_inputs()[0].shape[0], int):  # the exporter may fix it without a word
            raise fixed_batch_error("to ONNX")

        def run(images: Tensor) -> Tensor:
            return torch.from_numpy(session.run(None, {"pixels": images.numpy()})[0])

        comparisons.append(compare_outputs(source, run, f"onnxruntime {onnxruntime.__version__}"))

    write_atomically(path, fill)
    return FormatOutput((path,), source.format_usage(_USAGE), comparisons[0])


def _save(source: ExportSource, path: Path) -> None:
    model = source.traceable_model
    with quiet_exporter():
        try:
            program = torch.onnx.export(
                model,
                (dummy_input(source.shape),),
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                input_names=["pixels"],
                output_names=["logits"],
                verbose=False,
            )
        except Exception as error:  # the model's code may raise anything
            raise tracing_error("to ONNX", error) from error
    assert program is not None
    program.model.metadata_props["atas"] = json.dumps(source.metadata)
    program.save(str(path), external_data=False)
