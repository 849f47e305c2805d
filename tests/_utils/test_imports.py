"""Who may run code by name: every call is listed here, so that a new one is decided on."""

import ast
from pathlib import Path

import pytest

import atas
from atas._utils.imports import import_object
from atas.errors import UsageError

PACKAGE = Path(atas.__file__).parent

# What can turn a text or a file into code, and where the package uses it.
RUNS_CODE = {
    "import_object": {"data/registry.py", "methods/registry.py", "models/registry.py"},
    "import_module": {
        "__init__.py",  # names of this package
        "_utils/imports.py",
        "export/standalone.py",  # modules of this package, to read their source
        "ops/__init__.py",
        "paper/studies/__init__.py",  # names in the package's catalogue
        "recipes/__init__.py",
    },
    "exec": {"export/robustbench.py"},  # source of this package; its numbers are checked
    "eval": set(),
    "compile": None,  # re.compile, torch.compile
    "__import__": set(),
    "run_path": set(),
    "run_module": set(),
    "spec_from_file_location": set(),
    "Unpickler": set(),
    "load_module": set(),
}
# Functions that import a name with a colon. A call inside the package says whether the name is trusted.
BY_NAME = {
    "methods": {"get", "settings", "setting_types", "takes_classes", "create"},
    "models": {"create"},
    "data": {"load"},
    "datasets": {"load"},
}


def calls():
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield file, node


def name_of(node):
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)


def test_code_by_name_runs_in_listed_places_only():
    found = {name: set() for name in RUNS_CODE}
    for file, node in calls():
        # `model.eval()` and the like are methods of objects, not Python's functions.
        python_function = isinstance(node.func, ast.Name) or name_of(node) not in ("eval", "exec", "compile")
        if name_of(node) in found and python_function:
            found[name_of(node)].add(file)
    assert {name: files for name, files in found.items() if RUNS_CODE[name] is not None} == {
        name: files for name, files in RUNS_CODE.items() if files is not None
    }


def test_every_call_by_name_says_whether_the_name_is_trusted():
    silent = []
    for file, node in calls():
        function = node.func
        module = getattr(function.value, "id", None) if isinstance(function, ast.Attribute) else None
        by_name = function.attr in BY_NAME.get(module, ()) if module else False
        imports = name_of(node) == "import_object"
        if (by_name or imports) and not any(keyword.arg == "trusted" for keyword in node.keywords):
            silent.append(f"{file}:{node.lineno}")
    assert not silent, "pass trusted=..., which is False for a name that a file may hold"


@pytest.mark.slow
def test_only_an_unpickler_without_code_is_used():
    uses = {file for file, node in calls() if ast.unparse(node.func) in ("pickle.load", "pickle.loads", "torch.load")}
    assert uses == {"models/weights.py"}
    for file, node in calls():
        if ast.unparse(node.func) == "torch.load":
            assert any(k.arg == "weights_only" and k.value.value is True for k in node.keywords), file


def test_a_name_that_is_not_trusted_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "evil_object.py").write_text("import pathlib; pathlib.Path('ran').touch()\ndef f(): pass\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"the model evil_object:f is not loaded: it is code.*pass --trust"):
        import_object("evil_object:f", "model", "function", trusted=False)
    assert not (tmp_path / "ran").exists()
    assert callable(import_object("evil_object:f", "model", "function", trusted=True))
