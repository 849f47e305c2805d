"""The model card: what a model is, what it was measured to do, and where not to trust it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from atas._version import __version__
from atas.export._source import Source
from atas.export._written import Written

_PAPER = "[Fast Adversarial Training with Adaptive Step Size](https://arxiv.org/abs/2206.02417)"


def card(source: Source, written: Written) -> str:
    """A page of Markdown with the front matter that model hubs read."""
    name = source.run.recipe.name
    sections = {
        "Intended use": _use(source),
        "Data": _data(source),
        "Threat model": _threat(source),
        "Results": _results(source),
        "Limits": _limits(source),
        "Training": _training(source),
        "How to load": f"{written.usage}\n{_checked(written)}",
    }
    body = "\n".join(f"## {title}\n\n{text.strip()}\n" for title, text in sections.items())
    return f"{_front_matter(source)}\n# {_plain(name)}\n\n{body}"


def _front_matter(source: Source) -> str:
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


def _use(source: Source) -> str:
    size = " x ".join(map(str, source.shape))
    return (
        f"Classifies images of {size} pixels in [0, 1] into {source.about['num_classes']} classes; normalisation is "
        "inside the model. It is meant for research on adversarial robustness, and as a starting point where inputs "
        "may be tampered with within the threat model below. It is no safeguard on its own: an adversary is not bound "
        "to that threat model."
    )


def _data(source: Source) -> str:
    data = source.run.recipe.data
    crops = f"random crops of images padded by {data.pad}" if data.pad else "no crops"
    flips = "random flips" if data.flip else "no flips"
    classes = ", ".join(f"`{_plain(str(name))}`" for name in source.about["classes"])
    return (
        f"Trained on the training split of `{_plain(data.name.removeprefix('given:'))}`, with {crops} and {flips}, and "
        f"on no other data. Classes: {classes}."
    )


def _threat(source: Source) -> str:
    ball = source.run.recipe.threat
    what = {
        "linf": f"every pixel may change by at most eps = {ball.eps:.4g} of the range [0, 1]",
        "l2": f"the change of all pixels together has a Euclidean norm of at most eps = {ball.eps:.4g}",
    }[ball.name]
    if source.run.recipe.method.name == "standard":
        return f"None: trained without any attack. The monitor attacked it with {ball!r}: {what}."
    return f"{ball!r}: {what}, and the result is an image in [0, 1]. The adversary knows the model."


def _results(source: Source) -> str:
    if not source.evaluations:
        return (
            "**Not evaluated.** Nothing is known of this model's accuracy on test images, with or without an attack. "
            "Evaluate it with `atas evaluate RUN --attacks pgd50,autoattack` and export it again."
        )
    return "\n".join(f"##{found.markdown()}" for found in source.evaluations)


def _limits(source: Source) -> str:
    ball, found = source.run.recipe.threat, source.best
    said = []
    if source.run.recipe.method.name == "standard":
        said.append("This model was trained without attacks. Expect no robustness at all.")
    else:
        said.append(
            f"Robust, as far as it is, to {ball!r} alone. Other norms, larger budgets, rotations, blur, patches or "
            "unusual images were not trained for, and are not measured here unless a result above says so."
        )
    if source.collapsed_in is not None:
        said.append(
            f"**Training collapsed** (catastrophic overfitting, found in epoch {source.collapsed_in}): the model "
            "withstands the attack that it was trained with and hardly any other."
        )
    if found is None:
        said.append(f"It was not evaluated against {ball!r}.")
    elif "autoattack" not in found.accuracy:
        said.append("It was not evaluated with AutoAttack: figures under PGD are upper bounds, and often too high.")
    if found is not None and found.warnings:
        said.append("The evaluation has warnings; read them before you quote a figure.")
    said.append("Figures are of test images from the distribution that it was trained on, of one training.")
    return "\n".join(f"- {sentence}" for sentence in said)


def _training(source: Source) -> str:
    run, about, environment = source.run, source.about, source.environment
    recipe = run.recipe
    of_paper = f" of {_PAPER}" if recipe.method.name.startswith("atas") else ""
    took = "an unknown time" if source.seconds is None else f"{source.seconds:,.0f} s"
    published = replace(recipe, data=replace(recipe.data, root=None))  # where things lay is nobody's business
    versions = ", ".join(f"{key} {environment[key]}" for key in ("atas", "torch", "python") if environment.get(key))
    return (
        f"{len(run.metrics)} of {recipe.training.epochs} epochs, method `{recipe.method.name}`{of_paper}, seed "
        f"{recipe.training.seed}; {took} in training steps on {_plain(str(environment.get('device', 'unknown')))} "
        f"({versions}; commit {environment.get('commit') or 'unknown'}).\n\n"
        f"Recipe `{_plain(recipe.name)}`, hash `{about['recipe_hash']}`; weights `{about['weights']}`. `atas train` "
        f"repeats the run from this recipe:\n\n```toml\n{published.to_toml().strip()}\n```"
    )


def _checked(written: Written) -> str:
    return f"Exported by atas {__version__}" + (f"; {written.check}." if written.check is not None else ".")


def _plain(text: str) -> str:
    """Text from files and folders, such that it is read as text: on one line, without Markdown, code or HTML."""
    return re.sub(r"[`<>\[\]|]", "", " ".join(text.split()))
