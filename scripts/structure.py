"""Measure how hard the code is to enter.

    python scripts/structure.py [COMMIT] [--files] [--json]

Without COMMIT the working tree is measured; a commit is unpacked into a temporary folder. Takes about a minute.

Read from the files (imports inside functions and under TYPE_CHECKING count):

- one importer: modules, not packages, that exactly one other module imports.
- private imports: pairs (importer, module) where a part of the module's path begins with `_` and the importer lies
  outside the package that holds this part. Private parts at the top level (`atas._utils`) are open to all of atas.
- repeated class names: public names. A training method and an attack may share one (`PGD`): marked as allowed.

Traced with `sys.setprofile`, each in a child process on the CPU with one thread:

- A jump is a distinct pair of a caller function and a callee function in another file of src/atas. Frames of other
  libraries in between are skipped, and calls by module and class bodies are left out. Files are those of both ends.
- training step: `atas train` runs the digits recipe for one epoch of exactly 65 steps. The step is found without its
  name: of all functions that a single frame calls exactly 65 times, it is the one with the most calls below it. The
  call in the middle of the epoch is counted, and the jump into it. `loop pass` is everything up to the next such call.
- evaluate, report: the whole commands, AutoAttack on 16 images with the run that was trained, then its report.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from importlib.util import resolve_name
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
TRACE = "trace.json"  # where a child process leaves its result
STEPS = 65  # of the one epoch below: 1,297 images in batches of 20
COMMANDS = {
    "train": "train digits-small-cnn-atas --out run --set training.epochs=1 --set training.batch_size=20 "
    "--set method.eps=0.02 --set method.max_step=0.04",  # so small that AutoAttack's last attack has images left
    "evaluate": "evaluate run --attacks autoattack --examples 16",
    "report": "report run",
}
Call = tuple[int, CodeType]  # the index of the call that made it (-1: none), and its function


def find_modules(src: Path) -> dict[str, Path]:
    """Return every module of atas by its dotted name."""
    modules = {}
    for path in sorted((src / "atas").rglob("*.py")):
        parts = path.relative_to(src).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def targets(node: ast.AST, package: str) -> list[str]:
    """Return what an import statement may import: modules, or names in modules."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = resolve_name("." * node.level + (node.module or ""), package)
        return [f"{module}.{alias.name}" for alias in node.names]
    return []


def find_imports(modules: dict[str, Path], trees: dict[str, ast.Module]) -> set[tuple[str, str]]:
    """Return the distinct pairs (importer, imported module) inside atas."""
    pairs: set[tuple[str, str]] = set()
    for importer, tree in trees.items():
        package = importer if modules[importer].name == "__init__.py" else importer.rpartition(".")[0]
        found = [target for node in ast.walk(tree) for target in targets(node, package)]
        pairs |= {(importer, target if target in modules else target.rpartition(".")[0]) for target in found}
    return {(importer, module) for importer, module in pairs if module in modules and module != importer}


def is_private_import(importer: str, module: str) -> bool:
    """Say whether an importer reaches into a private module of another package."""
    parts = module.split(".")
    packages = (".".join(parts[:depth]) for depth in range(2, len(parts)) if parts[depth].startswith("_"))
    return any(not f"{importer}.".startswith(f"{package}.") for package in packages)


def repeated_classes(trees: dict[str, ast.Module]) -> dict[str, dict[str, Any]]:
    """Return the public class names that are defined more than once, with their modules."""
    where = defaultdict(list)
    for module, tree in trees.items():
        for name in (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            where[name].append(module)
    return {
        name: {"modules": homes, "allowed": sorted(home.split(".")[1] for home in homes) == ["attacks", "methods"]}
        for name, homes in sorted(where.items())
        if len(homes) > 1 and not name.startswith("_")
    }


def read_code(src: Path) -> dict[str, Any]:
    """Measure what can be read from the files."""
    modules = find_modules(src)
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    imports = find_imports(modules, trees)
    importers = Counter(module for _, module in imports if modules[module].name != "__init__.py")
    return {
        "modules": len(modules),
        "mean_lines": round(sum(len(text.splitlines()) for text in texts.values()) / len(modules), 1),
        "one_importer": sorted(name for name, count in importers.items() if count == 1),
        "private_imports": sorted(pair for pair in imports if is_private_import(*pair)),
        "repeated_classes": repeated_classes(trees),
    }


def record_calls(action: Callable[[], object], package: Path) -> list[Call]:
    """Run an action and return all calls of functions of the package, in order."""
    calls: list[Call] = []
    stack: list[tuple[FrameType, int]] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{package}{os.sep}"):
            calls.append((stack[-1][1] if stack else -1, frame.f_code))
            stack.append((frame, len(calls) - 1))
        elif event == "return" and stack and stack[-1][0] is frame:  # not so for a generator that is closed
            stack.pop()

    sys.setprofile(profile)
    action()
    sys.setprofile(None)
    return calls


def end_of(calls: list[Call], index: int) -> int:
    """Return the index after the last call that was made below the given one."""
    return next((later for later in range(index + 1, len(calls)) if calls[later][0] < index), len(calls))


def find_steps(calls: list[Call]) -> list[int]:
    """Return the indices of the calls that are the training steps (see the module's docstring)."""
    groups = defaultdict(list)
    for index, call in enumerate(calls):
        groups[call].append(index)
    candidates = [group for group in groups.values() if len(group) == STEPS]
    sizes = [sum(end_of(calls, index) - index for index in group) for group in candidates]
    if max(sizes, default=0) < len(calls) / 3:
        sys.exit(f"cannot find the training step: no function called {STEPS} times makes most of the calls")
    return candidates[sizes.index(max(sizes))]


def summarize(calls: list[Call], start: int, end: int, package: Path) -> dict[str, Any]:
    """Count files and jumps of the calls from `start` to `end`."""
    files, jumps = set(), set()
    for parent, callee in calls[start:end]:
        caller = calls[parent][1] if parent >= 0 else None
        if caller and callee.co_flags & caller.co_flags & inspect.CO_OPTIMIZED:  # both are functions
            names = [str(Path(code.co_filename).relative_to(package)) for code in (caller, callee)]
            files.update(names)
            if names[0] != names[1]:
                jumps.add((names[0], caller.co_qualname, names[1], callee.co_qualname))
    return {"files": len(files), "jumps": len(jumps), "file_names": sorted(files)}


def command(arguments: str) -> None:
    """Run the command `atas` in this process."""
    sys.argv = ["atas", *arguments.split()]
    try:
        runpy.run_module("atas", run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise


def trace(what: str, package: Path) -> dict[str, Any]:
    """Run one of the commands in the current folder and return its rows of the table."""
    calls = record_calls(lambda: command(COMMANDS[what]), package)
    if what != "train":
        return {what: summarize(calls, 0, len(calls), package)}
    step, following = find_steps(calls)[STEPS // 2 :][:2]
    ends = {"training step": end_of(calls, step), "loop pass": following}
    return {row: summarize(calls, step, end, package) for row, end in ends.items()}


def run_traces(src: Path, folder: Path) -> dict[str, Any]:
    """Train, evaluate and report a small run in a folder, each in a child process of its own."""
    rows: dict[str, Any] = {}
    environment = os.environ | {"PYTHONPATH": str(src), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for what in COMMANDS:
        child = [sys.executable, str(Path(__file__).resolve()), "--trace", what, str(src / "atas")]
        done = subprocess.run(child, env=environment, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"cannot trace {what}: the child process failed:\n{done.stdout}{done.stderr}")
        rows |= json.loads((folder / TRACE).read_text())
    return rows


def unpack(commit: str, folder: Path) -> Path:
    """Unpack the code of a commit into a folder and return its `src`."""
    archive = subprocess.run(["git", "-C", REPOSITORY, "archive", commit, "src"], stdout=subprocess.PIPE)
    if archive.returncode:
        sys.exit(f"cannot read commit {commit!r}; git says why above")
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder / "src"


def measure(commit: str | None) -> dict[str, Any]:
    """Measure the working tree or a commit."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        src = unpack(commit, folder) if commit else REPOSITORY / "src"
        return read_code(src) | {"traces": run_traces(src, folder)}


def table(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table."""
    classes = found["repeated_classes"]
    yield f"{'modules':<26}{found['modules']:>4}  mean {found['mean_lines']} lines"
    yield f"{'modules with one importer':<26}{len(found['one_importer']):>4}"
    yield f"{'private imports':<26}{len(found['private_imports']):>4}"
    yield f"{'repeated class names':<26}{len(classes):>4}"
    for name, entry in classes.items():
        yield f"  {name}{' (allowed)' if entry['allowed'] else ''}: {', '.join(entry['modules'])}"
    for name, row in found["traces"].items():
        yield f"{name:<26}{row['files']:>4}  files, {row['jumps']} jumps"


def main() -> None:
    """Print the measurements."""
    parser = argparse.ArgumentParser(description="Measure how hard the code of atas is to enter.")
    parser.add_argument("commit", nargs="?", help="any name of a commit; the working tree by default")
    parser.add_argument("--files", action="store_true", help="list the files of a training step")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, with all lists")
    parser.add_argument("--trace", nargs=2, help=argparse.SUPPRESS)  # for the child processes
    options = parser.parse_args()
    if options.trace:
        Path(TRACE).write_text(json.dumps(trace(options.trace[0], Path(options.trace[1]))))
        return
    found = measure(options.commit)
    print(json.dumps(found, indent=2) if options.json else "\n".join(table(found)))
    if options.files and not options.json:
        print("files of a training step:", *found["traces"]["training step"]["file_names"], sep="\n  ")


if __name__ == "__main__":
    main()
