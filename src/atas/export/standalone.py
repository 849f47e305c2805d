"""Standalone source code: classes and their dependencies, copied from the library's files.

The library's files are the only copy of a network, so an exported definition cannot become outdated.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Sequence
from functools import cache
from types import ModuleType

_PACKAGE = "atas"


def inline_source(*classes: type, imports: Sequence[str] = ()) -> str:
    """Return imports and definitions of these classes, dependencies first; `imports` are statements to add."""
    collector = _SourceCollector(imports)
    for cls in classes:
        collector.add(cls.__name__, importlib.import_module(cls.__module__))
    return collector.text()


class _SourceCollector:
    def __init__(self, imports: Sequence[str]) -> None:
        self._imports = set(imports)
        self._pieces: dict[str, str] = {}
        self._defined_in: dict[str, str] = {}

    def add(self, name: str, module: ModuleType) -> None:
        """Add a global name of a module and its dependencies; other names are ignored."""
        node = _globals(module).get(name)
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._add_import(name, node)
        elif node is not None and self._is_first_use(name, module):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and inner.id != name:
                    self.add(inner.id, module)
            self._pieces[name] = _text(node, module)

    def text(self) -> str:
        """Return the source of the module, without a docstring."""
        from_python = {text for text in self._imports if text.split()[1].partition(".")[0] in sys.stdlib_module_names}
        groups = [sorted(from_python, key=_order), sorted(self._imports - from_python, key=_order)]
        head = ["from __future__ import annotations", *("\n".join(group) for group in groups)]
        return "\n\n".join(head) + "\n\n\n" + "\n\n\n".join(self._pieces.values()) + "\n"

    def _add_import(self, name: str, node: ast.Import | ast.ImportFrom) -> None:
        alias = next(alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) == name)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == _PACKAGE:
            assert node.module is not None
            assert alias.asname is None, f"{alias.name} is imported under another name"
            self.add(alias.name, importlib.import_module(node.module))
        elif isinstance(node, ast.ImportFrom):
            self._imports.add(ast.unparse(ast.ImportFrom(node.module, [alias], node.level)))
        else:
            self._imports.add(ast.unparse(ast.Import([alias])))

    def _is_first_use(self, name: str, module: ModuleType) -> bool:
        """Return whether the name is new; definitions may refer to each other."""
        seen = name in self._defined_in
        defined_in = self._defined_in.setdefault(name, module.__name__)
        assert defined_in == module.__name__, f"{name} is defined in {defined_in} and in {module.__name__}"
        return not seen


def _order(statement: str) -> tuple[bool, str]:
    """Sort `import x` before `from x import y`."""
    return statement.startswith("from"), statement


@cache
def _globals(module: ModuleType) -> dict[str, ast.stmt]:
    """Return the statement that binds each global name."""
    statements: dict[str, ast.stmt] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            continue
        statements |= dict.fromkeys(names, node)
    return statements


def _text(node: ast.stmt, module: ModuleType) -> str:
    """Return the source of a statement, with decorators."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    lines = inspect.getsource(module).splitlines()[first - 1 : node.end_lineno]
    return "\n".join(lines)
