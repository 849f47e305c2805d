"""`import atas` waits for nothing, and everything is there all the same: for programs, shells and type checkers."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import atas

PACKAGE = Path(atas.__file__).parent
HEAVY = ("torch", "numpy", "rich", "typer")

USER = """\
import atas
from atas import *
from atas import Linf as threat

reveal_type(atas.train)
reveal_type(atas.Linf)
reveal_type(threat(8 / 255).eps)
reveal_type(evaluate)
reveal_type(atas.methods.create)
atas.trian
"""


@pytest.fixture
def fresh(tmp_path):
    """Run a script in a process of its own, where every warning is an error; what it prints."""

    def run(script):
        command = [sys.executable, "-W", "error", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout.split()

    return run


def test_importing_waits_for_nothing(fresh):
    assert fresh(f"import sys, atas; dir(atas); print(*(set({HEAVY}) & set(sys.modules)), atas.__version__)") == [
        atas.__version__
    ]


def imported_for_type_checkers():
    """The modules that the package imports its names from, for type checkers alone."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {alias.asname or alias.name: node.module for node in block.body for alias in node.names}


def modules():
    """The modules that are attributes of the package: all but the command and the kernels."""
    return {module.name for module in pkgutil.iter_modules(atas.__path__) if module.name[0] != "_"} - {"cli", "ops"}


def test_every_name_is_what_type_checkers_are_told():
    for name, home in imported_for_type_checkers().items():
        expected = importlib.import_module(f"atas.{name}" if home == "atas" else home)
        assert getattr(atas, name) is (expected if home == "atas" else getattr(expected, name)), name
    assert atas.ATAS is atas.methods.get("atas")


def test_every_module_is_there_but_the_command_and_the_kernels():
    for name in modules():
        assert getattr(atas, name) is importlib.import_module(f"atas.{name}"), name
    assert not {"cli", "ops"} & set(dir(atas))


def test_type_checkers_are_told_of_every_name():
    assert {*imported_for_type_checkers(), "__version__"} == set(atas.__all__)
    assert len(atas.__all__) == len(set(atas.__all__))


def test_dir_lists_everything_and_all_of_it_is_there():
    assert {name for name in dir(atas) if not name.startswith("__")} == {*atas.__all__, *modules()} - {"__version__"}
    assert {"__version__", "__doc__", "__file__"} <= set(dir(atas))
    for name in dir(atas):
        getattr(atas, name)


def test_a_wrong_name_is_the_usual_error():
    with pytest.raises(AttributeError, match=r"^module 'atas' has no attribute 'trian'$"):
        atas.trian  # noqa: B018
    assert not hasattr(atas, "trian")
    with pytest.raises(ImportError, match="cannot import name 'trian' from 'atas'"):
        exec("from atas import trian")


@pytest.mark.slow
def test_a_module_needs_no_import_of_its_own(fresh):
    script = "import atas; print(len(atas.data.load('digits').test), atas.recipes.load('{}').method.name)"
    assert fresh(script.format("digits-small-cnn-atas")) == ["500", "atas"]


@pytest.mark.slow
def test_star_gives_all_of_it(fresh):
    script = "from atas import *; print(*(name for name in dir() if name == '__version__' or name[:2] != '__'))"
    assert set(fresh(script)) == set(atas.__all__)


@pytest.mark.slow
def test_reload_and_pickle(fresh):
    script = """
import importlib, pickle, sys, atas
first = atas.Linf
importlib.reload(atas.threat)
importlib.reload(atas)
assert atas.Linf is atas.threat.Linf is not first
for thing in (atas.Linf(0.5), atas.Linf, atas.train, atas.AtasError("why")):
    again = pickle.loads(pickle.dumps(thing))
    assert again == thing or str(again) == str(thing), thing
sys.stdout.write(pickle.dumps(atas.L2(0.5)).hex())
"""
    (written,) = fresh(script)
    assert fresh(f"import pickle; print(pickle.loads(bytes.fromhex('{written}')))") == ["L2(0.5)"]


def test_a_name_can_be_replaced_and_put_back(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("atas.train", print)
        assert atas.train is print
    assert atas.train is atas.training.train
    assert isinstance(atas.data, ModuleType)


@pytest.mark.slow
def test_mypy_knows_the_types_and_a_wrong_name(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(USER)
    others = ("torch", "numpy", "rich", "PIL", "safetensors")  # skipped, which is faster by a minute
    skipped = ",".join(f"mypy-{name}.*" for name in others)
    settings = f"[mypy]\nmypy_path = {PACKAGE.parent}\nfollow_imports = silent\n[{skipped}]\nfollow_imports = skip\n"
    (tmp_path / "mypy.ini").write_text(settings)
    command = [sys.executable, "-m", "mypy", "--cache-dir", "cache", "user.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    told = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    assert len(told) == 7, done
    assert told[0].startswith('note: Revealed type is "def (recipe: str | ')
    assert told[0].endswith(' -> atas.training.run.Run"')
    assert told[1] == 'note: Revealed type is "def (eps: float) -> atas.threat.Linf"'
    assert told[2] == 'note: Revealed type is "float"'
    assert told[3].endswith(' -> atas.evaluation.result.Evaluation"')
    assert told[4].endswith(' -> atas.methods.base.Method"')
    assert told[5].startswith('error: Module has no attribute "trian"')
