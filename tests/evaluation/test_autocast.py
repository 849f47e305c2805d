"""A caller's autocast does not change an evaluation."""

from __future__ import annotations

import torch

from atas import evaluate


def test_the_caller_s_autocast_is_ignored(problem, ball):
    model, x, y = problem
    expected = evaluate(model, x, y, ball, attacks=["pgd10"])
    seen = []
    model.fc.register_forward_hook(lambda _, __, logits: seen.append((logits.dtype, torch.is_autocast_enabled("cpu"))))
    with torch.autocast("cpu", torch.bfloat16):
        found = evaluate(model, x, y, ball, attacks=["pgd10"])
        assert torch.is_autocast_enabled("cpu")
        assert model(x).dtype == torch.bfloat16
    assert set(seen[:-1]) == {(torch.float32, False)}
    assert torch.equal(found.correct["pgd10"], expected.correct["pgd10"])
