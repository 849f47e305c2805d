"""Checkpoints that are damaged, foreign or cannot be written: one sentence, and what was saved before stays."""

import errno
import json
import os
import random
import resource
import struct
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import atas
from atas.errors import AtasError, CheckpointError
from atas.training import checkpoint
from atas.training.trainer import Interrupted


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of a few tensors of all kinds, as it was and where it is."""
    tensors = {
        "model.weight": torch.randn(3, 4),
        "model.count": torch.tensor(7),
        "model.flag": torch.tensor([True, False]),
        "model.none": torch.zeros(0, 3),
        "model.turned": torch.randn(4, 3).t(),
        "method.memory": torch.randint(-127, 128, (5, 2), dtype=torch.int8),
        "method.half": torch.randn(3).to(torch.float16),
        "totals.sums": torch.randn(4, dtype=torch.float64),
    }
    state = {"epoch": 3, "batch": 2, "seconds": 1.5, "monitor": {"best": None, "collapsed": False}}
    path = tmp_path / "checkpoints" / "last.safetensors"
    checkpoint.save(path, tensors, state)
    return tensors, state, path


@pytest.fixture
def stopped(tmp_path, train_toy, interrupt_after):
    """The folder of a run that was interrupted in its second epoch."""
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "run", live=interrupt_after(6))
    return tmp_path / "run"


def one_sentence(error, *parts):
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 500
    for part in parts:
        assert part in text, text


def test_names_in_a_checkpoint_never_change(tmp_path, train_toy):
    """Runs that were stopped by an earlier version are resumed by these names."""
    train_toy(tmp_path, values={"training.epochs": 1, "training.ema": 0.9})
    tensors, state = checkpoint.load(tmp_path / "checkpoints" / "last.safetensors")
    learnt = [f"{layer}.{kind}" for layer in ("bn1", "bn2", "conv1", "conv2", "fc") for kind in ("bias", "weight")]
    counted = [
        f"{layer}.{kind}" for layer in ("bn1", "bn2") for kind in ("num_batches_tracked", "running_mean", "running_var")
    ]
    names = [f"{group}.{name}" for group in ("model", "ema.model") for name in learnt + counted]
    names += [f"momentum.{name}" for name in learnt]
    names += [f"method.{name}" for name in ("epoch", "step_scale", "memory.delta", "norms.average", "norms.step_size")]
    assert sorted(tensors) == sorted([*names, "ema.updates", "totals.sums"])
    keys = ["batch", "data", "epoch", "metrics_bytes", "monitor", "recipe", "rollbacks", "seconds", "updates"]
    assert sorted(state) == keys
    keys = ["best", "collapsed", "gone", "lost", "said", "said_broken_down"]
    assert sorted(state["monitor"]) == keys


def test_checkpoint_load_returns_what_save_wrote_bit_for_bit(saved):
    tensors, state, path = saved
    found, found_state = checkpoint.load(path)
    assert found_state == state
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_weights_are_not_pickled(saved):
    _, _, path = saved
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert set(json.loads(content[8 : 8 + length])) >= {"model.weight", "__metadata__"}


def test_special_values_survive(tmp_path):
    tensors = {"x": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])}
    checkpoint.save(tmp_path / "a.safetensors", tensors, {})
    found, _ = checkpoint.load(tmp_path / "a.safetensors")
    assert torch.equal(found["x"].view(torch.int32), tensors["x"].view(torch.int32))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_truncated_checkpoint_is_refused(share, saved):
    _, _, path = saved
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(path)
    one_sentence(error, str(path), "is damaged", "restore it from a copy, or start again with --overwrite")


@pytest.mark.parametrize("content", [b"garbage", b"\x00" * 100, b"\xff" * 4096, b"\x02\0\0\0\0\0\0\0{}", b"PK\x03\x04"])
def test_file_that_is_no_checkpoint_is_refused(content, saved):
    _, _, path = saved
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(path)
    one_sentence(error, str(path))


def test_any_flipped_byte_of_tensor_data_is_noticed(saved):
    tensors, _, path = saved
    content = path.read_bytes()
    length = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    for position in range(len(content) - length, len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :])
        with pytest.raises(CheckpointError, match="checksum"):
            checkpoint.load(path)


def test_any_flipped_byte_of_the_header_is_noticed(saved):
    """The header holds the counters; a wrong one would train on in the wrong place. Blanks at its end say nothing."""
    _, _, path = saved
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    unnoticed = []
    for position in range(8, 8 + len(content[8 : 8 + length].rstrip())):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x01]) + content[position + 1 :])
        try:
            checkpoint.load(path)
        except CheckpointError:
            continue
        unnoticed.append(content[position - 12 : position + 4])
    assert not unnoticed, f"{len(unnoticed)} of {length} bytes, such as around {unnoticed[0]}"


def test_a_plain_safetensors_file_is_not_taken_for_a_checkpoint(saved):
    _, _, path = saved
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match="is not a training checkpoint") as error:
        checkpoint.load(path)
    one_sentence(error, str(path), "pass a run's folder")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "garbage", "weights"])
@pytest.mark.slow
def test_resume_from_a_damaged_checkpoint(damage, stopped, train_toy, assert_same_run, tmp_path):
    last = stopped / "checkpoints" / "last.safetensors"
    content = last.read_bytes()
    if damage == "weights":
        save_file({"weight": torch.zeros(3)}, last)
    else:
        middle = len(content) - 1000
        flipped = content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]
        last.write_bytes({"truncated": content[:middle], "flipped": flipped, "garbage": b"garbage"}[damage])
    kept = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError) as error:
        train_toy(stopped, resume=True)
    one_sentence(error, str(last))
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == kept
    # The remedy that the sentence names: a copy.
    last.write_bytes(content)
    train_toy(stopped, resume=True)
    train_toy(tmp_path / "whole")
    assert_same_run(stopped, tmp_path / "whole")


@pytest.mark.parametrize("change", ["model", "data", "method", "seed"])
def test_resume_from_the_checkpoint_of_another_run(change, stopped, train_toy, tiny_net, tmp_path, interrupt_after):
    other = tmp_path / "other"
    images, labels = torch.rand(40, 1, 8, 8), torch.arange(40) % 3
    options = {
        "model": {"model": tiny_net(width=5)},
        "data": {"data": atas.data.from_arrays("toy", images, labels, images, labels)},
        "method": {"method": "pgd"},
        "seed": {"values": {"training.seed": 1}},  # of the same shapes throughout, and yet of another run
    }[change]
    with pytest.raises(Interrupted):
        train_toy(other, live=interrupt_after(6), **options)
    last = stopped / "checkpoints" / "last.safetensors"
    last.write_bytes((other / "checkpoints" / "last.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"belongs to another run or model|other training images") as error:
        train_toy(stopped, resume=True)
    one_sentence(error, str(stopped))


@contextmanager
def file_size_limit(size):
    """No file of this process can grow beyond this size: the system refuses the write, as that on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full(*arguments, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
def test_a_full_disk(where, saved, monkeypatch):
    tensors, state, path = saved
    before = path.read_bytes()
    with monkeypatch.context() as patch, file_size_limit(len(before) // 2) if where == "write" else nullcontext():
        if where == "fsync":
            patch.setattr(os, "fsync", full)
        elif where == "replace":
            patch.setattr(type(path), "replace", full)
        with pytest.raises(CheckpointError, match="File too large" if where == "write" else "No space left") as error:
            checkpoint.save(path, tensors, state | {"epoch": 4})
        one_sentence(error, str(path), "the previous checkpoint is unchanged", "make room on the disk", "--resume")
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert checkpoint.load(path)[1] == state


def test_a_full_disk_at_the_first_checkpoint(tmp_path):
    with file_size_limit(100), pytest.raises(CheckpointError, match="there is no previous checkpoint"):
        checkpoint.save(tmp_path / "checkpoints" / "last.safetensors", {"x": torch.zeros(300)}, {})


def test_a_full_disk_in_training_and_then_room_again(stopped, train_toy, tmp_path, assert_same_run):
    before = (stopped / "checkpoints" / "last.safetensors").read_bytes()
    with file_size_limit(len(before) // 2), pytest.raises(CheckpointError, match="File too large"):
        train_toy(stopped, values={"training.checkpoint_every": 0.0}, resume=True)
    assert (stopped / "checkpoints" / "last.safetensors").read_bytes() == before
    train_toy(stopped, resume=True)
    train_toy(tmp_path / "whole")
    assert_same_run(stopped, tmp_path / "whole")


def test_a_full_disk_when_metrics_are_written(stopped, train_toy, tmp_path, monkeypatch, assert_same_run):
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(AtasError, match=r"metrics.jsonl \(No space left on device\); make room .* --resume"):
            train_toy(stopped, resume=True)
    train_toy(stopped, resume=True)
    train_toy(tmp_path / "whole")
    assert_same_run(stopped, tmp_path / "whole")


def test_a_full_disk_when_the_weights_are_written(stopped, train_toy, tmp_path, monkeypatch, assert_same_run):
    replace = Path.replace

    def full_for_weights(temporary, path):
        return full() if path.name == "model.safetensors" else replace(temporary, path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full_for_weights)
        with pytest.raises(CheckpointError, match=r"cannot write the weights .*make room and continue with --resume"):
            train_toy(stopped, resume=True)
    train_toy(stopped, resume=True)
    train_toy(tmp_path / "whole")
    assert_same_run(stopped, tmp_path / "whole")


@pytest.mark.slow
def test_a_real_limit_on_the_size_of_files(tmp_path):
    """The kernel itself refuses the write, in the middle of the file."""
    script = (
        "import torch, pathlib, sys\n"
        "from atas.training import checkpoint\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "for size in (1_000, 100_000):\n"
        "    try:\n"
        "        checkpoint.save(path, {'x': torch.arange(size)}, {'size': size})\n"
        "    except checkpoint.CheckpointError as error:\n"
        "        print(error)\n"
    )
    path = tmp_path / "checkpoints" / "last.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
    )
    assert done.returncode == 0, done.stderr
    assert "the previous checkpoint is unchanged: make room on the disk" in done.stdout
    assert len(done.stdout.splitlines()) == 1
    tensors, state = checkpoint.load(path)
    assert state == {"size": 1_000}
    assert torch.equal(tensors["x"], torch.arange(1_000))
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_leftovers_of_a_crash_do_not_disturb(stopped, train_toy, tmp_path, assert_same_run):
    for name in (f".last.safetensors.{os.getpid()}.tmp", ".last.safetensors.1.tmp", ".healthy.safetensors.2.tmp"):
        (stopped / "checkpoints" / name).write_bytes(random.Random(0).randbytes(500))
    (stopped / ".model.safetensors.3.tmp").write_bytes(b"half")
    (stopped / ".recipe.toml.4.tmp").write_bytes(b"[dat")
    own = [stopped / ".notes.tmp", stopped / "checkpoints" / ".mine.1234abcd.tmp", stopped / "work" / ".model.1.tmp"]
    own.append(stopped / "work" / ".model.safetensors.1234abcd.tmp")
    (stopped / "work").mkdir()
    for path in own:
        path.write_text("mine")
    train_toy(stopped, resume=True)
    assert sorted(stopped.rglob(".*.tmp")) == sorted(own), "what others wrote is left alone"
    train_toy(tmp_path / "whole")
    assert_same_run(stopped, tmp_path / "whole")
