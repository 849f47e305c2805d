"""The loss around a few images, along the adversarial and a random direction."""

from __future__ import annotations

import torch

from atas.report._attempts import choose
from atas.report._chart import Chart, Line
from atas.report._html import Content, Markup, tag
from atas.report._landscape import POINTS, Landscape, landscape
from atas.report._picture import heat_map, image
from atas.report._section import Section, or_say_why
from atas.report._subject import Subject, evenly

_EXAMPLES = 3
_LEAST = 1.0  # what the colours reach to at least, so that nothing small looks large
_OFFSETS = ((0, "r0"), (POINTS // 4, "r2"), (POINTS // 2, "c7"), (POINTS - 1 - POINTS // 4, "r7"), (POINTS - 1, "r9"))


def section(subject: Subject) -> Section:
    """A map and its slices for each image."""
    return Section("surface", "The loss around an image", or_say_why(lambda: _surfaces(subject)))


def _surfaces(subject: Subject) -> Content:
    test, device = subject.data.test, subject.device
    chosen = _chosen(subject)
    threat = subject.evaluation.threat if subject.evaluation is not None else subject.recipe.threat
    x, y = test.images[torch.tensor(chosen)].to(device).float() / 255, test.labels[chosen].to(device).long()
    found = [
        landscape(subject.model, x[row : row + 1], y[row : row + 1], threat, index=place)
        for row, place in enumerate(chosen)
    ]
    most = max(_LEAST, *(float(one.loss.max()) for one in found))
    bent = sum(one.bends for one in found)
    cards = [
        _card(place, test.classes[int(y[row])], image(x[row], f"test image {place}"), found[row], most)
        for row, place in enumerate(chosen)
    ]
    lead = (
        f"How the loss changes around {len(chosen)} test images that the model gets right, up to the whole budget "
        f"({threat}) along the direction of FGSM (across) and along a random one (up). Around a robust model it "
        "rises slowly, and is highest at the edge of the ball. "
    )
    lead += (
        f"Here it is highest inside of the ball for {bent} of {len(chosen)}: the surface is bent, as it is when "
        "training has collapsed, and a single step jumps over the worst point."
        if bent
        else "So it is here for all of them."
    )
    return [tag("p", lead), tag("div", cards, class_="surfaces")]


def _chosen(subject: Subject) -> list[int]:
    """Images that are right without an attack, of different fates where an evaluation tells."""
    test = subject.data.test
    if subject.evaluation is not None:
        reasons = subject.tested[0].broken_by.get("worst")
        if reasons is not None:
            right = [place for place, reason in enumerate(reasons) if reason != "clean"]
            return [right[place] for place in choose([reasons[place] for place in right], _EXAMPLES)]
    places = evenly(len(test), 10 * _EXAMPLES)
    with torch.no_grad():
        said = subject.model(test.images[places].to(subject.device).float() / 255).argmax(1).cpu()
    good = places[said == test.labels[places]]
    return good[evenly(len(good), _EXAMPLES)].tolist() if len(good) else [0]


def _card(place: int, name: str, picture: Markup, found: Landscape, most: float) -> Markup:
    steps, loss = found.steps, found.loss
    low, high = float(loss.min()), float(loss.max())
    words = f"Loss around test image {place}, class {name}: from {low:.2f} to {high:.2f}"
    slices = Chart(
        f"Slices through no. {place}",
        "adversarial direction, of the budget",
        "loss",
        steps,
        [
            Line(f"{steps[row]:+.1f}" if row != POINTS // 2 else "0", loss[row].tolist(), colour)
            for row, colour in _OFFSETS
        ],
        limits=(0, 1.05 * most),
        digits=2,
        note="A line for each place along the random direction.",
    )
    return tag(
        "article",
        tag("h3", tag("span", picture, class_="thumb"), f"{name}, no. {place}"),
        tag(
            "figure",
            tag(
                "div",
                tag("span", "random", class_="up"),
                heat_map(loss, most, words),
                tag("span", "adversarial", class_="across"),
                class_="map",
            ),
            tag("figcaption", f"Loss {low:.2f} to {high:.2f}; colours from 0 (dark) to {most:.2f} (light)"),
        ),
        slices.html(),
    )
