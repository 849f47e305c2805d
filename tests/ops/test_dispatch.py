"""Fast implementations: a kernel if it supports the arguments, otherwise the compiled function."""

from __future__ import annotations

import warnings

import pytest
import torch

from atas.core.dispatch import compile_function, fast_op, implements, table, use_fast_ops
from atas.ops.networks import CompiledNetwork


@fast_op
def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


@fast_op
def fourfold(x: torch.Tensor) -> torch.Tensor:
    return double(double(x))


@implements(double)
def hundredfold(x: torch.Tensor) -> torch.Tensor:
    """float32.

    More is told below.
    """
    return x * 100 if x.dtype == torch.float32 else NotImplemented


@pytest.fixture
def compilations(monkeypatch):
    """Which functions are compiled; they run as they are."""
    seen = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: seen.append(function.__name__) or function)
    return seen


def test_a_kernel_runs_inside_only():
    assert double(torch.ones(())) == 2
    with use_fast_ops():
        assert double(torch.ones(())) == 100
        assert fourfold(torch.ones(())) == 10000
    assert double(torch.ones(())) == 2


def test_arguments_that_no_kernel_supports(compilations):
    other = torch.ones((), dtype=torch.float64)
    with use_fast_ops():
        assert double(other) == 2
    assert compilations == []
    with use_fast_ops("any"):
        assert double(torch.ones(())) == 100
        assert compilations == []
        assert double(other) == double(other) == 2
    assert compilations == ["double"]


def test_a_function_that_returns_nothing_counts_as_done():
    seen = []
    nothing = fast_op(lambda x: seen.append("function"))
    implements(nothing)(lambda x: seen.append("kernel"))
    with use_fast_ops():
        assert nothing(1) is None
    assert seen == ["kernel"]


def test_the_table_names_functions_kernels_and_what_they_support():
    rows = {row.function: row for row in table()}
    assert rows[double].kernel is hundredfold
    assert rows[double].supports == "float32."
    assert "hundredfold in " in str(rows[double])
    assert rows[fourfold].kernel is None
    assert str(rows[fourfold]).endswith(".fourfold: compiled")


def test_a_kernel_needs_a_marked_function_that_has_none_yet():
    with pytest.raises(ValueError, match="is not marked @fast_op"):
        implements(hundredfold)
    with pytest.raises(ValueError, match="already has a kernel"):
        implements(double)(lambda x: x)
    implements(double)(hundredfold)  # the same one again


@pytest.mark.slow
def test_a_compiled_function_compiles_those_that_it_calls_as_they_are_written():
    torch._dynamo.reset()
    with use_fast_ops("aot_eager"):
        assert fourfold(torch.ones(())) == 4


def test_the_compilers_advice_to_be_less_exact_is_not_passed_on(monkeypatch, recwarn):
    def advised(x):
        warnings.warn("TensorFloat32 tensor cores for float32 matrix multiplication available", stacklevel=2)
        warnings.warn("something else", stacklevel=2)
        return x

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    compile_function(advised, "inductor")(torch.ones(()))
    assert [str(warning.message) for warning in recwarn] == ["something else"]


class Printing(torch.nn.Module):
    """A network with a line that no graph can hold."""

    def forward(self, x):
        x = x.exp()
        torch._dynamo.graph_break()
        return x.sin()


@pytest.mark.slow
def test_a_network_with_a_graph_break_is_compiled_in_parts():
    said, graphs = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    network = CompiledNetwork(Printing(), backend, log=said.append)
    x = torch.linspace(0, 1, 5, requires_grad=True)
    for _ in range(2):
        torch.testing.assert_close(network(x), x.exp().sin())
    torch.autograd.grad(network(x).sum(), x)
    assert len(graphs) == 2
    assert len(said) == 1
    assert said[0].startswith("the network cannot be compiled as one graph (")
    assert said[0].endswith("); compiling it in parts")
    assert "\n" not in said[0]
