"""The model card: intended use, data, threat model, results, limits, training, and how to load the model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from atas import __version__
from atas._utils.formatting import markdown_code, markdown_text
from atas.export.base import ExportSource, FormatOutput
from atas.training.metrics import missing_epochs

_PAPER = "[Fast Adversarial Training with Adaptive Step Size](https://arxiv.org/abs/2206.02417)"

_LIBRARY = 'library_name: "atas"'
_FRONT_MATTER = 2000  # bytes at the beginning of a card in which its library is named


def render_card(source: ExportSource, output: FormatOutput) -> str:
    """Return the card as Markdown with front matter for model hubs."""
    name = source.run.recipe.name
    sections = {
        "Intended use": _use(source),
        "Data": _data(source),
        "Threat model": _threat(source),
        "Results": _results(source),
        "Limits": _limits(source),
        "Training": _training(source),
        "How to load": f"{output.usage}\n{_checked(output)}",
    }
    body = "\n".join(f"## {title}\n\n{text.strip()}\n" for title, text in sections.items())
    return f"{_front_matter(source)}\n# {markdown_text(name)}\n\n{body}"


def is_card(page: Path) -> bool:
    """Return whether a file begins as a model card of `render_card`, possibly edited since."""
    with page.open("rb") as file:
        return _LIBRARY.encode() in file.read(_FRONT_MATTER)


def _front_matter(source: ExportSource) -> str:
    """Return YAML front matter. Values are JSON, which YAML reads, so that no name can break out of its line."""
    data = source.run.recipe.data.name
    lines = {
        "library_name": "atas",
        "pipeline_tag": "image-classification",
        "tags": ["adversarial-robustness", "adversarial-training", source.run.recipe.method.name],
        "datasets": [data] if data in ("cifar10", "cifar100") else None,
        "metrics": ["accuracy"],
        "model-index": _model_index(source),
    }
    entries = [f"{key}: {json.dumps(value)}" for key, value in lines.items() if value is not None]
    return "\n".join(["---", *entries, "---", ""])


def _model_index(source: ExportSource) -> list[dict[str, Any]] | None:
    """Return the accuracies of the strongest result in the form that model hubs show."""
    result = source.result
    if result is None:
        return None
    data = markdown_text(source.run.recipe.data.label)
    metrics = [
        {"type": "accuracy", "name": f"{name}, {result.threat!r}, {result.n} images", "value": round(100 * value, 2)}
        for name, value in result.accuracy.items()
    ]
    task, dataset = {"type": "image-classification"}, {"name": data, "type": data, "split": "test"}
    return [
        {
            "name": markdown_text(source.run.recipe.name),
            "results": [{"task": task, "dataset": dataset, "metrics": metrics}],
        }
    ]


def _use(source: ExportSource) -> str:
    size = " x ".join(map(str, source.shape))
    return (
        f"Classifies images of {size} pixels in [0, 1] into {source.metadata['num_classes']} classes; the model "
        "normalises them itself. It is meant for research on adversarial robustness, and as a starting point for "
        "applications whose inputs may be manipulated within the threat model below. It is not a safeguard on its own: "
        "real adversaries need not respect that threat model."
    )


def _data(source: ExportSource) -> str:
    data = source.run.recipe.data
    crops = f"random crops of images padded by {data.pad}" if data.pad else "no crops"
    if data.view == "cropshift":
        crops = "random boxes at random positions (CropShift)"
    flips = ("random flips" if data.flip else "no flips") + (", with random erasing" if data.erase else "")
    classes = ", ".join(markdown_code(name) for name in source.metadata["classes"])
    return (
        f"Trained only on the training split of {markdown_code(data.label)}, with {crops} and "
        f"{flips}. Classes: {classes}."
    )


def _threat(source: ExportSource) -> str:
    threat = source.run.recipe.threat
    what = {
        "linf": f"every pixel may change by at most eps = {threat.eps:.4g} of the range [0, 1]",
        "l2": f"the perturbation may have a Euclidean norm of at most eps = {threat.eps:.4g}",
    }[threat.name]
    if source.run.recipe.method.name == "standard":
        return f"None: trained without attacks. The monitor attacked it with {threat!r}: {what}."
    return f"{threat!r}: {what}, and the result is an image in [0, 1]. The adversary knows the model."


def _results(source: ExportSource) -> str:
    if not source.evaluations:
        return (
            "**Not evaluated.** The accuracy of this model on test images is unknown, with and without attacks. "
            "Evaluate it with `atas evaluate RUN --attacks pgd50,autoattack` and export it again."
        )
    pages = "\n".join(f"##{result.markdown()}" for result in source.evaluations)
    return f"**{source.verdict.sentence()}**\n\n{pages}" if source.result is not None else pages


def _limits(source: ExportSource) -> str:
    threat, result = source.run.recipe.threat, source.result
    limits = []
    if source.run.recipe.method.name == "standard":
        limits.append("This model was trained without attacks. Expect no robustness at all.")
    else:
        limits.append(
            f"Trained to be robust to {threat!r} alone. Other norms, larger budgets, rotations, blur, patches and "
            "unusual images were not part of the training, and are measured only where a result above says so."
        )
    if source.collapse_epoch is not None:
        limits.append(
            f"**Training collapsed** (catastrophic overfitting, detected in epoch {source.collapse_epoch}): the model "
            "resists the attack that it was trained with and hardly any other."
        )
    elif lost := missing_epochs(source.run.metrics):
        limits.append(
            f"**Whether the training collapsed is not known**: the metrics of {len(lost)} epochs are lost, among them "
            f"epoch {lost[0]}."
        )
    if result is None:
        limits.append(f"It was not evaluated against {threat!r}.")
    elif not result.has_autoattack:
        limits.append("It was not evaluated with AutoAttack: accuracy under PGD is an upper bound, often too high.")
    if result is not None and result.warnings:
        limits.append("The evaluation has warnings; read them before you quote a result.")
    limits.append("Results are of one training run, on test images from the training distribution.")
    return "\n".join(f"- {sentence}" for sentence in limits)


def _training(source: ExportSource) -> str:
    run, metadata, environment = source.run, source.metadata, source.environment
    recipe = run.recipe
    of_paper = f" of {_PAPER}" if recipe.method.name.startswith("atas") else ""
    device, commit = (markdown_text(environment.get(key) or "unknown") for key in ("device", "commit"))
    took = "an unknown time" if source.seconds is None else f"{source.seconds:,.0f} s"
    weights = recipe.model.weights  # local paths are private
    if weights is not None and Path(weights).is_absolute():
        weights = Path(weights).name
    published = replace(recipe, data=replace(recipe.data, root=None), model=replace(recipe.model, weights=weights))
    versions = ", ".join(
        f"{key} {markdown_text(environment[key])}" for key in ("atas", "torch", "python") if environment.get(key)
    )
    return (
        f"{len(run.metrics)} of {recipe.training.epochs} epochs, method {markdown_code(recipe.method.name)}{of_paper}, "
        f"seed {recipe.training.seed}; {took} in training steps on {device} "
        f"({versions}; commit {commit}).\n\n"
        f"Recipe {markdown_code(recipe.name)}, hash `{metadata['recipe_hash']}`; weights `{metadata['weights']}`. "
        f"`atas train` repeats the run from this recipe:\n\n```toml\n{published.to_toml().strip()}\n```"
    )


def _checked(output: FormatOutput) -> str:
    return f"Exported by atas {__version__}" + (f"; {output.comparison}." if output.comparison is not None else ".")
