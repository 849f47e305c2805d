"""`--set section.key=value`."""

import pytest

from atas import recipes
from atas.cli import options
from atas.errors import UsageError


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("training.epochs=10", "training.epochs", 10),
        (" training.epochs = 10 ", "training.epochs", 10),
        ("method.eps=8/255", "method.eps", "8/255"),
        ("method.eps=0.3", "method.eps", 0.3),
        ("data.flip=false", "data.flip", False),
        ("data.root=/some/where", "data.root", "/some/where"),
        ('data.root="8"', "data.root", "8"),
        ("model.name=small-cnn", "model.name", "small-cnn"),
        ("data.root=a=b", "data.root", "a=b"),
        ('evaluation.attacks=["fgsm", "pgd10"]', "evaluation.attacks", ["fgsm", "pgd10"]),
        ('schedule.milestones=["24/30", 0.9]', "schedule.milestones", ["24/30", 0.9]),
    ],
)
def test_assignments(text, key, value):
    assert options.parse_assignments([text]) == {key: value}
    recipes.load("cifar10-preact-resnet18-atas").with_values({key: value})


def test_the_last_of_several_counts():
    assert options.parse_assignments(["training.seed=1", "training.epochs=2", "training.seed=3"]) == {
        "training.seed": 3,
        "training.epochs": 2,
    }


@pytest.mark.parametrize("text", ["", "epochs", "epochs=3", "training.epochs", "=3"])
def test_text_that_is_no_assignment_is_refused(text):
    with pytest.raises(UsageError, match=r"is not an assignment; write section\.key=value"):
        options.parse_assignments(["training.seed=1", text])
