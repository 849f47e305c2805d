"""Attacks by name."""

import pytest

from atas import attacks
from atas.errors import UsageError
from atas.threat import Linf

SEARCHES = ["apgd-ce", "apgd-t", "apgd-dlr", "fab-t", "square"]


def test_names_end_with_the_pattern():
    usual = ["clean", "fgsm", "pgd10", "pgd50", "autoattack", "autoattack-rand"]
    assert attacks.names() == [*usual, *SEARCHES, "pgd<steps>[x<restarts>]"]


@pytest.mark.parametrize("name", [*attacks.names()[:-1], "pgd1", "pgd50x10", "pgd7x2"])
def test_a_name_makes_the_attack_of_that_name(name):
    assert attacks.create(name).name == name


def test_steps_restarts_and_step_size_are_read():
    assert attacks.create("pgd50x10", step_size=0.01) == attacks.PGD(steps=50, restarts=10, step_size=0.01)
    assert attacks.create("pgd20x1") == attacks.PGD(steps=20)


def test_autoattack_is_its_searches_and_each_has_a_name_of_its_own():
    def stages(name):
        return [search.name for search in attacks.create(name).stages]

    assert stages("autoattack") == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert stages("autoattack-rand") == ["apgd-ce", "apgd-dlr"]
    assert {name: stages(name) for name in SEARCHES} == {name: [name] for name in SEARCHES}
    settings = attacks.create("autoattack").settings(Linf(8 / 255))
    assert {name: value.get("iterations", value.get("queries")) for name, value in settings.items()} == {
        "apgd-ce": 100,
        "apgd-t": 100,
        "fab-t": 100,
        "square": 5000,
    }
    assert attacks.create("square").settings(Linf(8 / 255)) == settings["square"]


@pytest.mark.parametrize(
    "name", ["", "pgd", "pgd0", "pgd10x0", "pgd10x", "pgd-10", "pgd1.5", "PGD10", "pgd10 ", "pgd١", "cleen", "pgd05"]
)
def test_other_names_are_unknown(name):
    with pytest.raises(UsageError, match="unknown attack") as caught:
        attacks.create(name)
    assert "pgd<steps>[x<restarts>]" in str(caught.value)


@pytest.mark.parametrize(("name", "what"), [("pgd" + 23 * "9", "steps"), ("pgd10x" + 10 * "9", "restarts")])
def test_an_attack_that_would_never_end_is_refused(name, what):
    with pytest.raises(UsageError, match=f"{what} of PGD must be at most 100,000; got 9"):
        attacks.create(name)


def test_a_near_name_is_suggested():
    for name, meant in {"fgms": "fgsm", "auto-attack": "autoattack", "apgd_t": "apgd-t", "fab": "fab-t"}.items():
        with pytest.raises(UsageError, match=f"did you mean '{meant}'"):
            attacks.create(name)


def test_settings_say_how_to_repeat_an_attack():
    ball = Linf(8 / 255)
    assert attacks.create("clean").settings(ball) == {}
    assert attacks.create("fgsm").settings(ball)["step_size"] == "8/255"
    assert attacks.create("pgd50x10").settings(ball) == {
        "steps": 50,
        "step_size": "1.6/255",
        "step_size_value": 8 / 255 / 5,
        "restarts": 10,
        "start": "uniform in the ball",
    }
    assert attacks.create("pgd10", step_size=2 / 255).settings(ball)["step_size"] == "2/255"
