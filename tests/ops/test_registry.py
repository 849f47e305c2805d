"""The contract of all functions that have a fast implementation."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import atas
from atas.core import dispatch

# These have no kernel: they are compiled, or run as they are written.
COMPILE_ONLY = {
    "atas.attacks.square.l2_proposal",
    "atas.core.perturbations.store_grids",
    "atas.methods.aaer.abnormal_term",
    "atas.methods.aaer.compare_with_start",
    "atas.methods.consistency.mean_distance",
    "atas.methods.elle.squared_errors",
    "atas.methods.fgsm_ga.misalignment",
    "atas.methods.fgsm_pco.gaps_of_distances",
    "atas.methods.fgsm_pco.mixed_inputs",
    "atas.methods.liet.hidden_start",
    "atas.methods.prior.smoothed_cross_entropy_sum",
    "atas.methods.sora.agreement_of_gradients",
    "atas.methods.sora.random_part_of_step",
    "atas.ops.jvp.loss_jvp",
}
TRITON = Path(atas.__file__).parent / "ops" / "triton"


def marked() -> dict[str, object]:
    """All functions of the package that are marked `@fast_op`, by name."""
    for package in ("core", "data", "methods", "attacks", "ops", "training"):
        for module in pkgutil.iter_modules([str(Path(atas.__file__).parent / package)], f"atas.{package}."):
            if module.name != "atas.ops.triton":
                importlib.import_module(module.name)
    rows = (row.function for row in dispatch.table() if row.function.__module__.startswith("atas."))
    return {f"{function.__module__}.{function.__qualname__}": function for function in rows}


def kernels() -> dict[str, tuple[str, ast.FunctionDef]]:
    """The kernels in ops/triton by the function that they implement, read without Triton."""
    found = {}
    for path in sorted(TRITON.glob("*.py")):
        tree = ast.parse(path.read_text())
        names = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        for node in ast.walk(tree):
            for decorator in getattr(node, "decorator_list", ()):
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "implements":
                    first, _, rest = ast.unparse(decorator.args[0]).partition(".")
                    found[names[first] + (f".{rest}" if rest else "")] = path.stem, node
    found["atas.training.metrics.accumulate_metrics"] = (
        "cross_entropy",
        next(
            node
            for node in ast.walk(ast.parse((TRITON / "cross_entropy.py").read_text()))
            if isinstance(node, ast.FunctionDef) and node.name == "accumulate"
        ),
    )
    return found


@pytest.mark.slow
def test_every_fast_op_has_a_kernel_or_is_compiled():
    assert set(marked()) == set(kernels()) | COMPILE_ONLY
    assert not set(kernels()) & COMPILE_ONLY


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(kernels()))
def test_a_kernel_takes_the_arguments_of_its_function_and_says_which_it_supports(name):
    module, node = kernels()[name]
    parameters = inspect.signature(marked()[name]).parameters
    assert [argument.arg for argument in node.args.args] == list(parameters), f"{module}.{node.name}"
    assert ast.get_docstring(node).partition("\n")[0].endswith(".")
