"""Example images: before and after each attack, at both ends of the gradient norm, and the loss around a few."""

from __future__ import annotations

import torch

from atas.attacks.registry import display_name
from atas.report.attack_examples import AttackedExamples, AttackResult, attack_examples, sample_by_outcome
from atas.report.charts import Chart, Line
from atas.report.formatting import describe_outcome, join_names
from atas.report.html import Content, Markup, Section, or_unavailable, tag
from atas.report.images import heat_map, image, perturbation
from atas.report.measurements import POINTS, LossLandscape, gradient_norms, loss_landscape
from atas.report.run_view import RunView, evenly_spaced

_NUM_EXTREMES = 8
_MAX_BYTES = 2_500_000  # of pictures
_NUM_SURFACES = 3
_MIN_COLOUR_LIMIT = 1.0  # what the colours reach to at least, so that nothing small looks large
_OFFSETS = ((0, "r0"), (POINTS // 4, "r2"), (POINTS // 2, "c7"), (POINTS - 1 - POINTS // 4, "r7"), (POINTS - 1, "r9"))


def gallery_section(view: RunView) -> Section:
    """The gallery of attacks, then of training examples."""
    return Section(
        "gallery",
        "What the attacks do",
        [
            or_unavailable(lambda: _gallery(attack_examples(view))),
            tag("h3", "Training examples by gradient norm"),
            or_unavailable(lambda: _norm_extremes(view)),
        ],
    )


def _gallery(examples: AttackedExamples) -> Content:
    cards: list[Markup] = []
    room = _MAX_BYTES
    for row in range(len(examples.index)):
        card = _attack_card(examples, row)
        room -= len(card)
        if room < 0:
            break
        cards.append(card)
    names = [result.name for result in examples.results]
    return [
        tag(
            "p",
            f"{len(cards)} test images, of every kind that the evaluation found, each with its perturbation (magnified "
            f"until its largest change is black or white; grey is no change) and the adversarial image that the model "
            f"sees. An attack may change what it likes within {examples.threat}.",
        ),
        tag("p", f"{join_names(examples.skipped)}: not run again, as it would take too long here.", class_="absent")
        if examples.skipped
        else None,
        tag(
            "div",
            _choice("attack", "Attack", [(name, display_name(name)) for name in names], names[-1]) if names else None,
            _choice(
                "sort",
                "Sort by",
                [
                    ("broken", "what broke it"),
                    ("confidence", "confidence after"),
                    ("class", "class"),
                    ("index", "number"),
                ],
                "broken",
            ),
            class_="controls",
        ),
        tag("p", "", class_="visually-hidden", role="status"),
        tag("ol", cards, class_="cards"),
    ]


def _choice(name: str, label: str, options: list[tuple[str, str]], chosen: str) -> Markup:
    buttons = [
        tag("button", text, type="button", value=value, aria_pressed="true" if value == chosen else "false")
        for value, text in options
    ]
    return tag(
        "div",
        tag("span", label, class_="label"),
        buttons,
        class_="choice",
        role="group",
        aria_label=label,
        data_choice=name,
    )


def _attack_card(examples: AttackedExamples, row: int) -> Markup:
    name = _class_name(examples, examples.labels[row])
    reason = describe_outcome(examples.broken_by[row])
    clean = examples.images[row]
    said = _prediction_text(examples, examples.clean.label[row], examples.clean.confidence[row])
    return tag(
        "li",
        tag("p", tag("b", name), f" no. {examples.index[row]}", tag("span", reason, class_="reason"), class_="title"),
        tag(
            "div",
            tag(
                "figure",
                image(clean, f"test image {examples.index[row]}, class {name}"),
                _clean_caption(examples, row, said),
            ),
            [
                _variant(examples, row, result, last=place == len(examples.results) - 1)
                for place, result in enumerate(examples.results)
            ],
            class_="triple",
        ),
        data_broken=examples.outcome_order(row),
        data_class=examples.labels[row],
        data_index=examples.index[row],
        class_="holds" if examples.broken_by[row] is None else None,
    )


def _variant(examples: AttackedExamples, row: int, result: AttackResult, *, last: bool) -> list[Markup]:
    """The perturbation and the adversarial image of one attack; the last attack's are shown first."""
    delta = result.adversarial[row] - examples.images[row]
    said = _prediction_text(examples, result.prediction.label[row], result.prediction.confidence[row])
    attack = display_name(result.name)
    common = {"data_attack": result.name, "hidden": not last}
    if not bool(delta.any()):
        what = "nothing found" if result.robust[row] else "no attack needed"
        return [
            tag(
                "figure",
                tag("span", what, class_="nothing"),
                data_confidence=result.prediction.confidence[row],
                **common,
            )
        ]
    return [
        tag("figure", perturbation(delta, f"perturbation by {attack}"), tag("figcaption", "change"), **common),
        tag(
            "figure",
            image(result.adversarial[row], f"the image after {attack}: the model says {said}"),
            tag("figcaption", said, class_=None if result.robust[row] else "wrong"),
            data_confidence=f"{result.prediction.confidence[row]:.4f}",
            **common,
        ),
    ]


def _clean_caption(examples: AttackedExamples, row: int, said: str) -> Markup:
    right = examples.clean.label[row] == examples.labels[row]
    return tag("figcaption", said, class_=None if right else "wrong")


def _prediction_text(examples: AttackedExamples, label: int, confidence: float) -> str:
    return f"{_class_name(examples, label)} {100 * confidence:.0f}%"


def _class_name(examples: AttackedExamples, label: int) -> str:
    return examples.classes[label] if label < len(examples.classes) else f"class {label}"


def _norm_extremes(view: RunView) -> Content:
    norms, train = gradient_norms(view), view.data.train
    order = norms.norm.argsort(stable=True)
    parts: list[Content] = [tag("p", f"Of {len(order):,} training images; {norms.source}.")]
    for title, rows in (("Largest", order.flip(0)[:_NUM_EXTREMES]), ("Smallest", order[:_NUM_EXTREMES])):
        pictures = []
        for row in rows.tolist():
            place, norm = int(norms.index[row]), float(norms.norm[row])
            name = train.classes[int(train.labels[place])]
            step = "" if norms.step_size is None else f", step {float(norms.step_size[row]):.3g}"
            picture = image(train.images[place].float() / 255, f"training image {place}, class {name}, norm {norm:.3g}")
            pictures.append(tag("li", tag("figure", picture, tag("figcaption", tag("b", name), f" {norm:.3g}{step}"))))
        parts += [tag("h4", f"{title} gradient norms"), tag("ol", pictures, class_="strip")]
    return parts


def surface_section(view: RunView) -> Section:
    """A map and its slices for each image."""
    return Section("surface", "The loss around an image", or_unavailable(lambda: _surfaces(view)))


def _surfaces(view: RunView) -> Content:
    test, device = view.data.test, view.device
    chosen = _correct_examples(view)
    threat = view.evaluation.threat if view.evaluation is not None else view.recipe.threat
    x, y = test.images[torch.tensor(chosen)].to(device).float() / 255, test.labels[chosen].to(device).long()
    landscapes = [
        loss_landscape(view.model, x[row : row + 1], y[row : row + 1], threat, index=place)
        for row, place in enumerate(chosen)
    ]
    most = max(_MIN_COLOUR_LIMIT, *(float(landscape.loss.max()) for landscape in landscapes))
    bent = sum(landscape.peaks_inside for landscape in landscapes)
    cards = [
        _surface_card(place, test.classes[int(y[row])], image(x[row], f"test image {place}"), landscapes[row], most)
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


def _correct_examples(view: RunView) -> list[int]:
    """Images that are right without an attack, of different fates where an evaluation tells."""
    test = view.data.test
    if view.evaluation is not None:
        reasons = view.test_split[0].broken_by.get("worst")
        if reasons is not None:
            right = [place for place, reason in enumerate(reasons) if reason != "clean"]
            return [right[place] for place in sample_by_outcome([reasons[place] for place in right], _NUM_SURFACES)]
    places = evenly_spaced(len(test), 10 * _NUM_SURFACES)
    with torch.no_grad():
        said = view.model(test.images[places].to(view.device).float() / 255).argmax(1).cpu()
    good = places[said == test.labels[places]]
    return good[evenly_spaced(len(good), _NUM_SURFACES)].tolist() if len(good) else [0]


def _surface_card(place: int, name: str, picture: Markup, landscape: LossLandscape, most: float) -> Markup:
    steps, loss = landscape.steps, landscape.loss
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
