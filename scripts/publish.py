"""Publish the model of a recipe: weights in float16 with a card, and their checksum in the package.

    python scripts/publish.py cifar10-preact-resnet18-plus-300s     # seed 0 in results/record

The training must be finished there, and judged by AutoAttack on all test images (benchmarks/record.py with
record-test.toml does both). The files go to weights/<recipe>/, the entry to src/atas/models/published.json. In this
clone, `atas.load("<recipe>")` then gives the model, and refuses any other file of that name.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

from atas._utils.files import write_text
from atas.errors import AtasError, UsageError
from atas.evaluation import Evaluation
from atas.export import hub
from atas.export.base import ExportSource
from atas.export.model_card import render_card
from atas.models.published import FILE
from atas.sweeps import Store, Trial
from atas.sweeps.store import EVALUATIONS

ROOT = Path(__file__).resolve().parents[1]
INDEX = ROOT / "src" / "atas" / "models" / "published.json"
ATTACK = "autoattack"
WORDS = {"clean": "clean", ATTACK: "under AutoAttack"}
USAGE = """\
```python
import atas

model = atas.load("{name}")  # from a clone of atas; in float32, in eval mode
logits = model(images)  # float, (N, {{channels}}, {{height}}, {{width}}), pixels in [0, 1]
```

Without a clone, set ATAS_WEIGHTS to the folder that holds the folder of this model, or to its URL. Weight matrices and
kernels are stored in float16. The results above are of the weights before they were rounded.
"""


def publish(trial: Trial, store: Store, weights: Path, index: Path) -> Path:
    """Write the files and the entry of the model that a trial trained; return the folder."""
    source = load(trial, store)
    name = source.run.recipe.name
    folder = weights / name
    folder.mkdir(parents=True, exist_ok=True)
    output = hub.write(source, folder)
    usage = source.format_usage(USAGE.format(name=name))
    write_text(folder / "README.md", render_card(source, replace(output, usage=usage)))
    content = (folder / FILE).read_bytes()
    entry = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content), "what": describe(source)}
    entries = json.loads(index.read_text(encoding="utf-8")) | {name: entry}
    write_text(index, json.dumps(entries, indent=2) + "\n")
    return folder


def load(trial: Trial, store: Store) -> ExportSource:
    """Return the finished training of a trial with the evaluations of its weights, which AutoAttack must be among."""
    run_folder = store.training_folder(trial)
    if not run_folder.model.exists():
        raise UsageError(f"{store.folder} has no trained model of {trial.recipe}, seed {trial.seed}; train it first")
    source = ExportSource.load(run_folder.path)
    paths = sorted((store.folder / EVALUATIONS).glob(f"{trial.slug}-{trial.key}-*.json"))
    found = [Evaluation.load(path, details=False) for path in paths]
    source = replace(source, evaluations=tuple(one for one in found if one.weights == source.metadata["weights"]))
    if source.result is None or ATTACK not in source.result.accuracy:
        raise UsageError(f"{run_folder.path} has not been judged by {ATTACK}; evaluate it first")
    return source


def describe(source: ExportSource) -> str:
    """Return what the model is, in the words of `atas ls weights`."""
    recipe, result = source.run.recipe, source.result
    assert result is not None
    shares = ", ".join(f"{100 * result.accuracy[name]:.1f}% {words}" for name, words in WORDS.items())
    return f"{recipe.model.name} on {recipe.data.label} by {recipe.method.name}, {recipe.threat!r}: {shares}"


def main() -> int:
    """Publish the model of a recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="name of the recipe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", type=Path, default=ROOT / "results" / "record", help="folder of the trial")
    parser.add_argument("--weights", type=Path, default=ROOT / "weights", help="folder of the published models")
    parser.add_argument("--index", type=Path, default=INDEX, help="JSON file of checksums")
    chosen = parser.parse_args()
    try:
        folder = publish(Trial(chosen.recipe, {}, chosen.seed), Store(chosen.store), chosen.weights, chosen.index)
    except AtasError as error:
        print(f"publish.py: {error}", file=sys.stderr)
        return 1
    print(f"written: {folder} and {chosen.index}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
