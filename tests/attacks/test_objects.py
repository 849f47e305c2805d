"""Attacks as objects: created with a threat model and settings, called with a model, images and labels."""

import inspect

import pytest
import torch

import atas
from atas import attacks
from atas.attacks import APGD, FAB, FGSM, PGD, AttackEnsemble, AutoAttack, Square
from atas.errors import DataError, UsageError
from atas.threat import L2, Linf

OBJECTS = {
    "fgsm": (FGSM, {}),
    "pgd": (PGD, {"steps": 3, "restarts": 2}),
    "apgd-ce": (APGD, {"iterations": 5}),
    "apgd-t": (APGD, {"loss": "t", "iterations": 5}),
    "fab": (FAB, {"iterations": 4}),
    "square": (Square, {"queries": 15}),
    "autoattack": (AutoAttack, {}),
}


@pytest.fixture(params=list(OBJECTS))
def make(request, monkeypatch):
    short = (APGD(iterations=4), APGD(loss="t", iterations=4), FAB(iterations=3), Square(queries=10))
    monkeypatch.setitem(attacks.auto_attack.VERSIONS, "standard", short)
    kind, settings = OBJECTS[request.param]
    return lambda *threat: kind(*threat, **settings)


@pytest.fixture
def problem(small_net, make_images):
    model, x = small_net(sharpness=5.0).eval(), make_images(4)
    with torch.no_grad():
        return model, x, model(x).argmax(1)


def test_a_plain_eps_is_that_of_linf(make, problem):
    expected = make(Linf(8 / 255))(*problem)
    assert make(8 / 255).threat == Linf(8 / 255)
    assert torch.equal(make(8 / 255)(*problem), expected)
    assert torch.equal(make()(*problem, Linf(8 / 255)), expected)


def test_points_lie_in_the_ball_and_the_mode_is_restored(make, problem):
    model, x, y = problem
    model.train()
    for ball in (Linf(0.05), L2(0.3)):
        points = make(ball)(model, x, y)
        assert (points.shape, points.dtype, points.device) == (x.shape, x.dtype, x.device)
        assert ball.distance(points, x).max() <= ball.eps * (1 + 1e-5) + 1e-6
        assert points.min() >= 0
        assert points.max() <= 1
    assert model.training
    assert not points.requires_grad


def test_an_evaluation_takes_objects_and_finds_the_same(make, problem):
    model, x, y = problem
    attack = make(Linf(0.1))
    found = atas.evaluate(model, x, y, Linf(0.1), attacks=[attack])
    with torch.no_grad():
        assert torch.equal(found.correct[attack.name], model(attack(model, x, y)).argmax(1) == y)


def test_two_threat_models_are_refused(make, problem):
    with pytest.raises(UsageError, match=r"was created for Linf\(0.1\), not for Linf\(0.3\)"):
        make(Linf(0.1))(*problem, Linf(0.3))
    with pytest.raises(UsageError, match=r"was created for Linf\(0.1\), not for L2\(0.1\)"):
        atas.evaluate(*problem, L2(0.1), attacks=[make(0.1)])


def test_no_threat_model_is_refused(make, problem):
    with pytest.raises(UsageError, match=r"has no threat model: create it with one"):
        make()(*problem)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("ce", "the first argument of an attack is its threat model.* got 'ce': pass settings by name"),
        (8, r"eps is in pixel units of \[0, 1\]: write 8/255 rather than 8"),
        (-0.1, "eps must be a number that is not negative"),
        (True, "the first argument of an attack is its threat model"),
    ],
)
def test_wrong_threat_models_are_refused(make, wrong, message):
    with pytest.raises(UsageError, match=message):
        make(wrong)


def test_wrong_inputs_are_refused(make, problem):
    model, x, y = problem
    for bad_x, bad_y, message in ((x * 255, y, "leave"), (x, y + 4, "outside of"), (x, y[:-1], "one number an image")):
        with pytest.raises(DataError, match=message):
            make(8 / 255)(model, bad_x, bad_y)


def test_settings_are_passed_by_name():
    for kind, settings in OBJECTS.values():
        named = list(inspect.signature(kind).parameters.values())[1:]
        assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in named)
        assert set(settings) <= {parameter.name for parameter in named}


def test_an_ensemble_has_a_threat_model_too(problem):
    quick = AttackEnsemble("quick", (APGD(iterations=3),), threat=8 / 255)
    assert torch.equal(quick(*problem), AttackEnsemble("quick", (APGD(iterations=3),))(*problem, Linf(8 / 255)))


def test_an_unknown_version_of_autoattack_is_refused():
    with pytest.raises(UsageError, match="unknown version of AutoAttack 'fast'"):
        AutoAttack(8 / 255, version="fast")
