"""Test images before and after each attack, and the training images at both ends of the gradient norm."""

from __future__ import annotations

from atas.evaluation._names import written
from atas.report._attempts import Attempt, Attempts, attempt
from atas.report._html import Content, Markup, tag
from atas.report._picture import image, perturbation
from atas.report._section import Section, or_say_why
from atas.report._subject import Subject
from atas.report._tenths import norms_of
from atas.report._words import broken_by, listed

_ENDS = 8
_BYTES = 2_500_000  # of pictures


def section(subject: Subject) -> Section:
    """The gallery of attacks, then of training examples."""
    return Section(
        "gallery",
        "What the attacks do",
        [
            or_say_why(lambda: _gallery(attempt(subject))),
            tag("h3", "Training examples by gradient norm"),
            or_say_why(lambda: _ends(subject)),
        ],
    )


def _gallery(found: Attempts) -> Content:
    cards: list[Markup] = []
    room = _BYTES
    for row in range(len(found.index)):
        card = _card(found, row)
        room -= len(card)
        if room < 0:
            break
        cards.append(card)
    names = [entry.name for entry in found.attempts]
    return [
        tag(
            "p",
            f"{len(cards)} test images, of every kind that the evaluation found, each with its perturbation (magnified "
            f"until its largest change is black or white; grey is no change) and the adversarial image that the model "
            f"sees. An attack may change what it likes within {found.threat}.",
        ),
        tag("p", f"{listed(found.left_out)}: not run again, as it would take too long here.", class_="absent")
        if found.left_out
        else None,
        tag(
            "div",
            _choice("attack", "Attack", [(name, written(name)) for name in names], names[-1]) if names else None,
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


def _card(found: Attempts, row: int) -> Markup:
    name = _named(found, found.labels[row])
    reason = broken_by(found.broken_by[row])
    clean = found.images[row]
    said = _said(found, found.clean.label[row], found.clean.confidence[row])
    return tag(
        "li",
        tag("p", tag("b", name), f" no. {found.index[row]}", tag("span", reason, class_="reason"), class_="title"),
        tag(
            "div",
            tag("figure", image(clean, f"test image {found.index[row]}, class {name}"), _answer(found, row, said)),
            [
                _variant(found, row, entry, last=place == len(found.attempts) - 1)
                for place, entry in enumerate(found.attempts)
            ],
            class_="triple",
        ),
        data_broken=found.order(row),
        data_class=found.labels[row],
        data_index=found.index[row],
        class_="holds" if found.broken_by[row] is None else None,
    )


def _variant(found: Attempts, row: int, entry: Attempt, *, last: bool) -> list[Markup]:
    """The perturbation and the adversarial image of one attack; the last attack's are shown first."""
    delta = entry.points[row] - found.images[row]
    said = _said(found, entry.answer.label[row], entry.answer.confidence[row])
    attack = written(entry.name)
    common = {"data_attack": entry.name, "hidden": not last}
    if not bool(delta.any()):
        what = "nothing found" if entry.holds[row] else "no attack needed"
        return [
            tag("figure", tag("span", what, class_="nothing"), data_confidence=entry.answer.confidence[row], **common)
        ]
    return [
        tag("figure", perturbation(delta, f"perturbation by {attack}"), tag("figcaption", "change"), **common),
        tag(
            "figure",
            image(entry.points[row], f"the image after {attack}: the model says {said}"),
            tag("figcaption", said, class_=None if entry.holds[row] else "wrong"),
            data_confidence=f"{entry.answer.confidence[row]:.4f}",
            **common,
        ),
    ]


def _answer(found: Attempts, row: int, said: str) -> Markup:
    right = found.clean.label[row] == found.labels[row]
    return tag("figcaption", said, class_=None if right else "wrong")


def _said(found: Attempts, label: int, confidence: float) -> str:
    return f"{_named(found, label)} {100 * confidence:.0f}%"


def _named(found: Attempts, label: int) -> str:
    return found.classes[label] if label < len(found.classes) else f"class {label}"


def _ends(subject: Subject) -> Content:
    norms, train = norms_of(subject), subject.data.train
    order = norms.norm.argsort(stable=True)
    parts: list[Content] = [tag("p", f"Of {len(order):,} training images; {norms.by}.")]
    for title, rows in (("Largest", order.flip(0)[:_ENDS]), ("Smallest", order[:_ENDS])):
        pictures = []
        for row in rows.tolist():
            place, norm = int(norms.index[row]), float(norms.norm[row])
            name = train.classes[int(train.labels[place])]
            step = "" if norms.step_size is None else f", step {float(norms.step_size[row]):.3g}"
            picture = image(train.images[place].float() / 255, f"training image {place}, class {name}, norm {norm:.3g}")
            pictures.append(tag("li", tag("figure", picture, tag("figcaption", tag("b", name), f" {norm:.3g}{step}"))))
        parts += [tag("h4", f"{title} gradient norms"), tag("ol", pictures, class_="strip")]
    return parts
