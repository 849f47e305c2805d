"""The model card: what the model is, how it was trained and evaluated, its limits, and how to load it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from atas import __version__
from atas.export.base import ExportSource, FormatOutput
from atas.models.weights import GIVEN

_PAPER = "[Fast Adversarial Training with Adaptive Step Size](https://arxiv.org/abs/2206.02417)"


def render_card(source: ExportSource, output: FormatOutput) -> str:
    """A page of Markdown with the front matter that model hubs read."""
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
    return f"{_front_matter(source)}\n# {_escape(name)}\n\n{body}"


def _front_matter(source: ExportSource) -> str:
    """Values are written as JSON, which YAML reads too: no name can break out of its line."""
    data = source.run.recipe.data.name
    lines = {
        "library_name": "atas",
        "pipeline_tag": "image-classification",
        "tags": ["adversarial-robustness", "adversarial-training", source.run.recipe.method.name],
        "datasets": [data] if data in ("cifar10", "cifar100") else None,
        "metrics": ["accuracy"],
    }
    entries = [f"{key}: {json.dumps(value)}" for key, value in lines.items() if value is not None]
    return "\n".join(["---", *entries, "---", ""])


def _use(source: ExportSource) -> str:
    size = " x ".join(map(str, source.shape))
    return (
        f"Classifies images of {size} pixels in [0, 1] into {source.metadata['num_classes']} classes; normalisation is "
        "inside the model. It is meant for research on adversarial robustness, and as a starting point where inputs "
        "may be tampered with within the threat model below. It is no safeguard on its own: an adversary is not bound "
        "to that threat model."
    )


def _data(source: ExportSource) -> str:
    data = source.run.recipe.data
    crops = f"random crops of images padded by {data.pad}" if data.pad else "no crops"
    flips = "random flips" if data.flip else "no flips"
    classes = ", ".join(f"`{_escape(str(name))}`" for name in source.metadata["classes"])
    return (
        f"Trained on the training split of `{_escape(data.name.removeprefix(GIVEN))}`, with {crops} and {flips}, "
        f"and on no other data. Classes: {classes}."
    )


def _threat(source: ExportSource) -> str:
    threat = source.run.recipe.threat
    what = {
        "linf": f"every pixel may change by at most eps = {threat.eps:.4g} of the range [0, 1]",
        "l2": f"the change of all pixels together has a Euclidean norm of at most eps = {threat.eps:.4g}",
    }[threat.name]
    if source.run.recipe.method.name == "standard":
        return f"None: trained without any attack. The monitor attacked it with {threat!r}: {what}."
    return f"{threat!r}: {what}, and the result is an image in [0, 1]. The adversary knows the model."


def _results(source: ExportSource) -> str:
    if not source.evaluations:
        return (
            "**Not evaluated.** Nothing is known of this model's accuracy on test images, with or without an attack. "
            "Evaluate it with `atas evaluate RUN --attacks pgd50,autoattack` and export it again."
        )
    return "\n".join(f"##{result.markdown()}" for result in source.evaluations)


def _limits(source: ExportSource) -> str:
    threat, result = source.run.recipe.threat, source.result
    said = []
    if source.run.recipe.method.name == "standard":
        said.append("This model was trained without attacks. Expect no robustness at all.")
    else:
        said.append(
            f"Robust, as far as it is, to {threat!r} alone. Other norms, larger budgets, rotations, blur, patches or "
            "unusual images were not trained for, and are not measured here unless a result above says so."
        )
    if source.collapse_epoch is not None:
        said.append(
            f"**Training collapsed** (catastrophic overfitting, found in epoch {source.collapse_epoch}): the model "
            "withstands the attack that it was trained with and hardly any other."
        )
    if result is None:
        said.append(f"It was not evaluated against {threat!r}.")
    elif not result.has_autoattack:
        said.append("It was not evaluated with AutoAttack: figures under PGD are upper bounds, and often too high.")
    if result is not None and result.warnings:
        said.append("The evaluation has warnings; read them before you quote a figure.")
    said.append("Figures are of test images from the distribution that it was trained on, of one training.")
    return "\n".join(f"- {sentence}" for sentence in said)


def _training(source: ExportSource) -> str:
    run, metadata, environment = source.run, source.metadata, source.environment
    recipe = run.recipe
    of_paper = f" of {_PAPER}" if recipe.method.name.startswith("atas") else ""
    took = "an unknown time" if source.seconds is None else f"{source.seconds:,.0f} s"
    published = replace(recipe, data=replace(recipe.data, root=None))  # where things lay is nobody's business
    versions = ", ".join(f"{key} {environment[key]}" for key in ("atas", "torch", "python") if environment.get(key))
    return (
        f"{len(run.metrics)} of {recipe.training.epochs} epochs, method `{recipe.method.name}`{of_paper}, seed "
        f"{recipe.training.seed}; {took} in training steps on {_escape(str(environment.get('device', 'unknown')))} "
        f"({versions}; commit {environment.get('commit') or 'unknown'}).\n\n"
        f"Recipe `{_escape(recipe.name)}`, hash `{metadata['recipe_hash']}`; weights `{metadata['weights']}`. "
        f"`atas train` repeats the run from this recipe:\n\n```toml\n{published.to_toml().strip()}\n```"
    )


def _checked(output: FormatOutput) -> str:
    return f"Exported by atas {__version__}" + (f"; {output.comparison}." if output.comparison is not None else ".")


def _escape(text: str) -> str:
    """Text from files and folders, such that it is read as text: on one line, without Markdown, code or HTML."""
    return re.sub(r"[`<>\[\]|]", "", " ".join(text.split()))
