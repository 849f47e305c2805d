"""Logits at the ends of their range: ties, zeros, and margins that a float32 exponential cannot hold."""

import torch
from hypothesis import strategies as st

LOW = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
VALUES = [0.0, 1.0, -1.0, 0.5, 1e-6, 87.0, 88.8, 103.0, 105.0, -105.0, 1e3, -1e3, 1e4, -1e4, 6e4, -6e4]


@st.composite
def extreme_logits(draw, rows=3, classes=None):
    """A batch of logits in a type that networks compute in, and labels."""
    classes = classes or draw(st.integers(2, 6))
    value = st.one_of(st.sampled_from(VALUES), st.floats(-20, 20, width=32), st.floats(-6e4, 6e4, width=32))
    values = draw(st.lists(st.lists(value, min_size=classes, max_size=classes), min_size=rows, max_size=rows))
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=rows, max_size=rows))
    return torch.tensor(values).to(draw(st.sampled_from(list(LOW)))), torch.tensor(labels)


def value_and_gradient(function, logits):
    """The value of a function of logits, added up, and its gradient."""
    logits = logits.detach().requires_grad_(True)
    value = function(logits)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    return value.detach(), gradient


def assert_like_float64(function, logits, exact=None, others=None):
    """The function is finite, with a finite gradient, and both are what float64 gives, by `exact` or itself.

    `others` are logits that the function subtracts as well."""
    value, gradient = value_and_gradient(function, logits)
    right, slope = value_and_gradient(exact or function, logits.double())
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    largest = max(float(each.abs().max()) for each in (logits, others) if each is not None)
    rounding = 1e-4 + 1e-6 * largest  # of a difference of such logits
    torch.testing.assert_close(value.double(), right, rtol=1e-4, atol=rounding)
    torch.testing.assert_close(gradient.double(), slope, rtol=LOW[logits.dtype], atol=rounding)
