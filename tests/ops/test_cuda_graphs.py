"""What is put aside, and what waits for it; with streams that only write down what they are asked."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

from atas.ops.cuda_graphs import SideStream


@pytest.fixture
def log(monkeypatch):
    """What the streams were asked, in order."""
    lines: list[str] = []

    def stream(name):
        return types.SimpleNamespace(
            name=name, wait_stream=lambda other: lines.append(f"{name} waits for {other.name}")
        )

    @contextlib.contextmanager
    def on(chosen):
        lines.append(f"on {chosen.name}")
        yield
        lines.append("back")

    def name_of(device):
        return {"cpu": "", "meta": " of the other device"}[device.type]

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream("second" + name_of(device)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream("main" + name_of(device)))
    monkeypatch.setattr(torch.cuda, "stream", on)
    return lines


ASIDE = ["second waits for main", "on second", "back"]


def test_each_name_goes_aside_and_the_main_stream_waits_once(log):
    work = SideStream()
    for name in (1, 2):
        with work.run(name, torch.zeros(1)):
            pass
    work.wait()
    work.wait()
    assert log == [*ASIDE, *ASIDE, "main waits for second"]


def test_the_second_gradient_of_a_weight_stays_on_the_main_stream(log):
    """Autograd adds it to the first there, before anybody joins: all of a second pass, not only its first weight."""
    work = SideStream()
    for name in (1, 2, 1, 2):
        with work.run(name, torch.zeros(1)):
            log.append(f"gradient {name}")
    work.wait()
    with work.run(1, torch.zeros(1)):
        log.append("gradient 1 of the next step")
    assert log == [
        *ASIDE[:2], "gradient 1", "back", *ASIDE[:2], "gradient 2", "back",
        "main waits for second", "gradient 1", "gradient 2",
        *ASIDE[:2], "gradient 1 of the next step", "back",
    ]  # fmt: skip


def test_every_device_has_a_stream(log):
    work = SideStream()
    for key, device in ((1, "cpu"), (2, "meta")):
        with work.run(key, torch.zeros(1, device=device)):
            pass
    assert log[3:] == ["second of the other device waits for main of the other device",
                       "on second of the other device", "back"]  # fmt: skip
    log.clear()
    work.wait()
    assert sorted(log) == ["main of the other device waits for second of the other device", "main waits for second"]
