"""Models of the user's own, named as package.module:function."""

import sys

import pytest
import torch

from atas import models
from atas.errors import UsageError

SOURCE = """
from torch import nn

def linear(num_classes, channels):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * 64, num_classes))

def with_defaults(num_classes, *, channels=3, width=8):
    from users_helper import WIDTH
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * 64, WIDTH), nn.Linear(WIDTH, num_classes))

class Network(nn.Module):
    def __init__(self, num_classes, channels):
        super().__init__()
        self.fc = nn.Linear(channels * 64, num_classes)

    def forward(self, x):
        return self.fc(x.flatten(1))

def only_classes(num_classes):
    return linear(num_classes, 1)

def wants_width(num_classes, channels, width):
    return linear(num_classes, channels)

def returns_text(num_classes, channels):
    return "a model"

def broken(num_classes, channels):
    return num_classes + "1"

not_a_function = 3
"""


@pytest.fixture(autouse=True)
def users_folder(tmp_path, monkeypatch):
    (tmp_path / "users_models.py").write_text(SOURCE)
    (tmp_path / "users_helper.py").write_text("WIDTH = 5\n")
    (tmp_path / "users_needy.py").write_text("import users_missing_dependency\n")
    (tmp_path / "users_syntax.py").write_text("import torch\ndef f(:\n")
    (tmp_path / "users_toplevel.py").write_text("import torch\n\ntorch.nn, 1 / 0\n")
    (tmp_path / "users_script.py").write_text("import sys\n\nsys.exit(2)\n")
    package = tmp_path / "users_package" / "nets"
    package.mkdir(parents=True)
    (package / "tiny.py").write_text("from users_models import linear as build\n")
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("users_"):
            del sys.modules[name]


@pytest.mark.parametrize(
    "name",
    [
        "users_models:linear",
        "users_models:with_defaults",
        "users_models:Network",
        "users_package.nets.tiny:build",
    ],
)
def test_a_factory_in_the_current_directory_is_called(name):
    path = list(sys.path)
    model = models.create(name, num_classes=6, channels=2)
    assert model(torch.rand(3, 2, 8, 8)).shape == (3, 6)
    assert sys.path == path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "users_modells:linear",
            "cannot import 'users_modells' .*No module named.*; install what is missing",
        ),
        ("users_package.net:build", r"cannot import 'users_package\.net' .*No module named"),
        ("users_needy:build", "cannot import 'users_needy' .*users_missing_dependency"),
        ("users_models:lineal", "module 'users_models' has no function 'lineal'; define it"),
        ("users_models:not_a_function", "has no function 'not_a_function'"),
        ("users_models:only_classes", "cannot be called with .* num_classes and channels .*'channels'"),
        ("users_models:wants_width", "cannot be called with .* num_classes and channels .*'width'"),
        (
            "users_models:broken",
            r"'users_models:broken' failed .*TypeError: .*\(file .*users_models.py, line \d+\); fix it",
        ),
        (
            "users_syntax:f",
            r"'users_syntax' .* cannot be imported: SyntaxError: .*\(users_syntax.py, line 2\); fix it",
        ),
        (
            "users_toplevel:f",
            r"cannot be imported: ZeroDivisionError: .* \(file .*users_toplevel.py, line 3\); fix it there",
        ),
        ("users_script:f", r"cannot be imported: SystemExit: 2 \(file .*users_script.py, line 3\); fix it there"),
        ("users_models:returns_text", r"returned str; let it return a torch\.nn\.Module"),
        ("users_models:", "write your own one as package.module:function"),
        (":linear", "write your own one as package.module:function"),
        (".users_models:linear", "write your own one as package.module:function"),
        ("users_models.py:linear", "cannot import 'users_models.py'"),
        ("./users_models:linear", "write your own one as package.module:function"),
    ],
)
def test_wrong_factories_are_refused_in_one_sentence(name, message):
    path = list(sys.path)
    with pytest.raises(UsageError, match=message) as caught:
        models.create(name, num_classes=6, channels=2)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")
    assert sys.path == path


def test_a_sentence_of_ours_inside_the_factory_stays_as_it_is(tmp_path):
    (tmp_path / "users_nested.py").write_text(
        "from atas import models\n\ndef build(num_classes, channels):\n    models.create('resnet81', num_classes)\n"
    )
    with pytest.raises(UsageError, match=r"^unknown model 'resnet81'"):
        models.create("users_nested:build", num_classes=6, channels=2)


@pytest.mark.parametrize("arguments", [{"mean": 0.5}, {"std": (0.2, 0.2)}, {"mean": 0, "std": 1}])
def test_normalisation_belongs_inside_a_model_of_ones_own(arguments):
    with pytest.raises(UsageError, match="normalise inside that model"):
        models.create("users_models:linear", num_classes=6, channels=2, **arguments)


def test_the_number_of_classes_is_checked_for_factories_too():
    with pytest.raises(UsageError, match="num_classes is 1"):
        models.create("users_models:linear", num_classes=1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("builtins:dict", "'builtins:dict' returned dict; let it return a torch.nn.Module"),
        ("builtins:min", "'builtins:min' failed to make a model: TypeError"),
        ("operator:itemgetter", "operator:itemgetter"),
        ("torch:ones", "'torch:ones' failed to make a model: TypeError"),
        ("math:pi", "has no function 'pi'"),
    ],
)
def test_functions_without_python_code(name, message):
    with pytest.raises(UsageError, match=message) as caught:
        models.create(name, 10)
    assert "models/registry.py" not in str(caught.value)
