"""Functions with a faster form: by hand where it covers the arguments, compiled otherwise."""

from __future__ import annotations

import warnings

import pytest
import torch

from atas.core.dispatch import compile_function, fast_op, use_fast_ops


@fast_op
def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


@fast_op
def fourfold(x: torch.Tensor) -> torch.Tensor:
    return double(double(x))


def hundredfold(x: torch.Tensor) -> torch.Tensor:
    return x * 100 if x.dtype == torch.float32 else NotImplemented


@pytest.fixture
def compilations(monkeypatch):
    """Which functions are compiled; they run as they are."""
    seen = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: seen.append(function.__name__) or function)
    return seen


def test_a_function_runs_as_written_outside_and_without_a_backend():
    assert double(torch.ones(())) == 2
    with use_fast_ops(None):
        assert double(torch.ones(())) == 2


def test_the_form_by_hand_runs_inside_alone():
    with use_fast_ops(None, kernels={double: hundredfold}):
        assert double(torch.ones(())) == 100
        assert fourfold(torch.ones(())) == 10000
        with use_fast_ops(None):
            assert double(torch.ones(())) == 2
        assert double(torch.ones(())) == 100
    assert double(torch.ones(())) == 2


def test_what_is_not_covered_runs_as_before(compilations):
    other = torch.ones((), dtype=torch.float64)
    with use_fast_ops(None, kernels={double: hundredfold}):
        assert double(other) == 2
    assert compilations == []
    with use_fast_ops("any", kernels={double: hundredfold}):
        assert double(torch.ones(())) == 100
        assert compilations == []
        assert double(other) == double(other) == 2
    assert compilations == ["double"]


def test_a_function_that_returns_nothing_counts_as_done():
    seen = []
    nothing = fast_op(lambda x: seen.append("written"))
    with use_fast_ops(None, kernels={nothing: lambda x: seen.append("by hand")}):
        assert nothing(1) is None
    assert seen == ["by hand"]


def test_a_compiled_function_compiles_those_that_it_calls_as_they_are_written():
    torch._dynamo.reset()
    with use_fast_ops("aot_eager", kernels={double: hundredfold}):
        assert fourfold(torch.ones(())) == 4


def test_the_compilers_advice_to_be_less_exact_is_not_passed_on(monkeypatch, recwarn):
    def advised(x):
        warnings.warn("TensorFloat32 tensor cores for float32 matrix multiplication available", stacklevel=2)
        warnings.warn("something else", stacklevel=2)
        return x

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    compile_function(advised, "inductor")(torch.ones(()))
    assert [str(warning.message) for warning in recwarn] == ["something else"]
