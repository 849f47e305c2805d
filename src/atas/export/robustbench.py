"""RobustBench: an entry for its leaderboard, and the network in plain PyTorch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from atas import __version__, models
from atas._utils.files import write_text
from atas._utils.imports import GIVEN, is_timm
from atas.errors import UsageError
from atas.evaluation import Evaluation
from atas.export.base import ExportSource, FormatOutput, compare_outputs
from atas.export.standalone import inline_source
from atas.models.registry import class_and_settings
from atas.models.weights import save_weights
from atas.threat import format_pixels

_ARCHITECTURES = {
    "preact-resnet18": "PreActResNet-18",
    "preact-resnet18-ssat": "PreActResNet-18",
    "preact-resnet18-yopo": "PreActResNet-18",
    "preact-resnet18-gradalign": "PreActResNet-18",
    "wrn-28-10": "WideResNet-28-10",
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
}
_USAGE = """\
`{stem}.py` is the network in plain PyTorch; it needs only `torch` and `safetensors`.

```python
from {stem} import load

model = load()  # loads the weights next to the file; in eval mode
logits = model(images)  # float, (N, {channels}, {height}, {width}), pixels in [0, 1]
```

`{stem}.json` is the entry for RobustBench. Fill in `link`, `authors` and `venue` before you submit it.
"""
_IMPORTS = ("from pathlib import Path", "from safetensors.torch import load_file", "from torch import nn")
_LOAD = '''

def load(weights: str | Path = Path(__file__).with_name("{stem}.safetensors")) -> nn.Module:
    """The trained network in eval mode; it takes pixels in [0, 1] and normalises them inside."""
    model = {call}
    model.load_state_dict(load_file(weights))
    return model.eval()
'''


def write(source: ExportSource, folder: Path) -> FormatOutput:
    """Write entry, definition and weights; the definition is executed and compared."""
    name = source.run.recipe.model.name
    if not source.is_built_in:
        raise UsageError(
            f"the network of this run is {'not built in' if is_timm(name) else 'user code'} "
            f"({name.removeprefix(GIVEN)}); a standalone definition can be made of built-in networks only "
            f"({', '.join(models.names())}); use --to safetensors{'' if is_timm(name) else ' and add your code'}"
        )
    stem = module_name(source.run.recipe.name)
    weights, code, entry = (folder / f"{stem}.{kind}" for kind in ("safetensors", "py", "json"))
    text = standalone_definition(source, stem)
    save_weights(weights, source.model, source.metadata)
    space: dict[str, Any] = {"__name__": stem, "__file__": str(code)}
    exec(compile(text, str(code), "exec"), space)  # text made above, from this package
    comparison = compare_outputs(source, space["load"](), "the standalone definition")
    write_text(code, text)
    write_text(entry, json.dumps(model_info(source), indent=2, ensure_ascii=False) + "\n")
    note = "fill in link, authors and venue before you submit the entry"
    return FormatOutput((entry, code, weights), source.format_usage(_USAGE, stem=stem), comparison, (note,))


def standalone_definition(source: ExportSource, stem: str) -> str:
    """Return the source of a Python file that builds the network and loads the weights next to it."""
    metadata = source.metadata
    network, settings = class_and_settings(source.run.recipe.model.name)
    classes = [value for value in settings.values() if isinstance(value, type)]
    code = inline_source(models.Normalize, *classes, network, imports=_IMPORTS)
    rest = [f"{key}={value.__name__ if isinstance(value, type) else repr(value)}" for key, value in settings.items()]
    normalize = f"Normalize({metadata['channels']}, {metadata['mean']}, {metadata['std']})"
    call = f"{network.__name__}({', '.join([str(metadata['num_classes']), normalize, *rest])})"
    head = (
        f'"""{_ARCHITECTURES.get(source.run.recipe.model.name, network.__name__)} in plain PyTorch, for the weights in '
        f"{stem}.safetensors.\n\nMade from the sources of atas {__version__} (MIT licence) by `atas export`; "
        f'weights {metadata["weights"]}.\n"""\n\n'
    )
    return head + code + _LOAD.format(stem=stem, call=call)


def model_info(source: ExportSource) -> dict[str, Any]:
    """Return the entry with RobustBench's fields; unknown values are null."""
    recipe, result = source.run.recipe, source.result
    threat = recipe.threat
    return {
        "link": None,
        "name": recipe.name,
        "authors": None,
        "additional_data": False,
        "number_forward_passes": 1,
        "dataset": recipe.data.label,
        "venue": "Unpublished",
        "architecture": _ARCHITECTURES.get(recipe.model.name, recipe.model.name),
        "eps": format_pixels(threat.eps) if threat.name == "linf" else f"{threat.eps:g}",
        "clean_acc": _percent(result, "clean"),
        "reported": _percent(result, "worst"),
        "autoattack_acc": _percent(result, "autoattack"),
        "footnote": _footnote(source),
    }


def _footnote(source: ExportSource) -> str:
    """Describe how the numbers were measured, with warnings."""
    recipe, result = source.run.recipe, source.result
    sentences = [f"Trained with atas {source.metadata['atas']}, method {recipe.method.name}, threat {recipe.threat!r}."]
    if result is None:
        sentences.append("Not evaluated.")
    else:
        attacks = ", ".join(name for name in result.accuracy if name not in ("clean", "worst"))
        sentences.append(f"Measured on {result.n:,} test images; reported is the worst case of: {attacks}.")
        sentences += [f"Warning: {warning}." for warning in result.warnings]
        if not result.has_autoattack:
            sentences.append("AutoAttack was not run.")
    return " ".join(sentences)


def _percent(result: Evaluation | None, name: str) -> str | None:
    return None if result is None or name not in result.accuracy else f"{100 * result.accuracy[name]:.2f}"


def module_name(name: str) -> str:
    """Turn a recipe's name into the name of a Python module.

    >>> module_name("cifar10-wrn")
    'cifar10_wrn'
    """
    word = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or "model"
    return word if not word[0].isdigit() else f"model_{word}"
