"""An entry as RobustBench's lists have them, and the network in plain PyTorch, to propose a model there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from atas import models
from atas._files import write_text
from atas._version import __version__
from atas.errors import UsageError
from atas.evaluation import Evaluation
from atas.export._check import check
from atas.export._source import Source
from atas.export._standalone import source_of
from atas.export._written import Written
from atas.models._create import parts
from atas.threat import in_255
from atas.training.weights import save_weights

_ARCHITECTURES = {
    "preact-resnet18": "PreActResNet-18",
    "wrn-28-10": "WideResNet-28-10",
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
}
_USAGE = """\
`{stem}.py` is the network in plain PyTorch; it needs `torch` and `safetensors` and nothing of this library.

```python
from {stem} import load

model = load()  # with the weights beside the file, in eval mode
logits = model(images)  # float, (N, {channels}, {height}, {width}), pixels in [0, 1]
```

`{stem}.json` is the entry for RobustBench's list. Fill in its `link`, `authors` and `venue` before you propose it.
"""
_IMPORTS = ("from pathlib import Path", "from safetensors.torch import load_file", "from torch import nn")
_LOAD = '''

def load(weights: str | Path = Path(__file__).with_name("{stem}.safetensors")) -> nn.Module:
    """The trained network in eval mode; it takes pixels in [0, 1] and normalises them inside."""
    model = {call}
    model.load_state_dict(load_file(weights))
    return model.eval()
'''


def write(source: Source, folder: Path) -> Written:
    """The entry, the definition and the weights; the definition is run and compared."""
    name = source.run.recipe.model.name
    if not source.built_in:
        raise UsageError(
            f"the network of this run is code of its own ({name.removeprefix('given:')}), and a definition that stands "
            f"alone can only be made of a built-in one ({', '.join(models.names())}); use --to safetensors and add "
            f"your code"
        )
    stem = _identifier(source.run.recipe.name)
    weights, code, entry = (folder / f"{stem}.{kind}" for kind in ("safetensors", "py", "json"))
    text = definition(source, stem)
    save_weights(weights, source.model, source.about)
    space: dict[str, Any] = {"__name__": stem, "__file__": str(code)}
    exec(compile(text, str(code), "exec"), space)  # the text that was made here
    found = check(source, space["load"](), "the definition that stands alone")
    write_text(code, text)
    write_text(entry, json.dumps(model_info(source), indent=2, ensure_ascii=False) + "\n")
    channels, height, width = source.shape
    usage = _USAGE.format(stem=stem, channels=channels, height=height, width=width)
    return Written((entry, code, weights), usage, found, ("fill in link, authors and venue before you propose it",))


def definition(source: Source, stem: str) -> str:
    """The text of a Python file that builds the network and loads the weights beside it."""
    about = source.about
    network, settings = parts(source.run.recipe.model.name)
    classes = [value for value in settings.values() if isinstance(value, type)]
    code = source_of(models.Normalize, *classes, network, imports=_IMPORTS)
    rest = [f"{key}={value.__name__ if isinstance(value, type) else repr(value)}" for key, value in settings.items()]
    normalize = f"Normalize({about['channels']}, {about['mean']}, {about['std']})"
    call = f"{network.__name__}({', '.join([str(about['num_classes']), normalize, *rest])})"
    head = (
        f'"""{_ARCHITECTURES.get(source.run.recipe.model.name, network.__name__)} in plain PyTorch, for the weights in '
        f"{stem}.safetensors.\n\nMade from the sources of atas {__version__} (MIT licence) by `atas export`; "
        f'weights {about["weights"]}.\n"""\n\n'
    )
    return head + code + _LOAD.format(stem=stem, call=call)


def model_info(source: Source) -> dict[str, Any]:
    """The entry, with the fields and the spelling of RobustBench's own; null is what is not known."""
    recipe, found = source.run.recipe, source.best
    ball = recipe.threat
    return {
        "link": None,
        "name": recipe.name,
        "authors": None,
        "additional_data": False,
        "number_forward_passes": 1,
        "dataset": recipe.data.name.removeprefix("given:"),
        "venue": "Unpublished",
        "architecture": _ARCHITECTURES.get(recipe.model.name, recipe.model.name),
        "eps": in_255(ball.eps) if ball.name == "linf" else f"{ball.eps:g}",
        "clean_acc": _percent(found, "clean"),
        "reported": _percent(found, "worst"),
        "autoattack_acc": _percent(found, "autoattack"),
        "footnote": _footnote(source),
    }


def _footnote(source: Source) -> str:
    """How the figures came about, and what speaks against them."""
    recipe, found = source.run.recipe, source.best
    said = [f"Trained with atas {source.about['atas']}, method {recipe.method.name}, threat {recipe.threat!r}."]
    if found is None:
        said.append("Not evaluated.")
    else:
        attacks = ", ".join(name for name in found.accuracy if name not in ("clean", "worst"))
        said.append(f"Figures of {found.n:,} test images, the reported one the worst case of: {attacks}.")
        said += [f"Warning: {caution}." for caution in found.warnings]
        if "autoattack" not in found.accuracy:
            said.append("AutoAttack was not run.")
    return " ".join(said)


def _percent(found: Evaluation | None, name: str) -> str | None:
    return None if found is None or name not in found.accuracy else f"{100 * found.accuracy[name]:.2f}"


def _identifier(name: str) -> str:
    """A recipe's name as the name of a Python module."""
    word = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or "model"
    return word if not word[0].isdigit() else f"model_{word}"
