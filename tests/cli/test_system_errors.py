"""What the system refuses (memory, open files, permissions) is one sentence at the end of a command."""

import errno
import resource
import sys

import pytest
from PIL import Image

from atas import cli, data

TORCH = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "5188041500000 bytes. Error code 12 (Cannot allocate memory)\nC++ CapturedCallStack: ..."
)
CUDA = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139 GiB of which 1 GiB is free."


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (MemoryError(), ["out of memory on this machine; use a smaller batch size"]),
        (MemoryError("Unable to allocate 3.6 TiB for an array"), ["out of memory on this machine"]),
        (RuntimeError(TORCH), ["out of memory on this machine (it asked for 5188041500000 bytes)"]),
        (RuntimeError(CUDA), ["out of memory on the GPU (it asked for 20.00 GiB)"]),
        (RuntimeError("can't start new thread"), ["out of memory"]),
        (SystemError("<function f at 0x7f> returned NULL without setting an exception"), ["out of memory"]),
        (SystemError("error return without exception set"), ["out of memory"]),
        (ImportError("libtorch.so: failed to map segment from shared object"), ["out of memory"]),
        (OSError(errno.EMFILE, "Too many open files", "x"), ["Too many open files (x); allow more open files (ulimit"]),
        (OSError(errno.EROFS, "Read-only file system", "x"), ["Read-only file system (x); choose another folder and"]),
        (OSError(errno.EACCES, "Permission denied", "x"), ["Permission denied (x); check its permissions and"]),
        (OSError(errno.EISDIR, "Is a directory", "x"), ["Is a directory (x); check the path and"]),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), ["Cannot allocate memory; free memory and try again"]),
        (OSError(errno.ENOSPC, "No space left on device"), ["free disk space and try again"]),
    ],
)
def test_each_is_a_sentence(error, parts, command, monkeypatch):
    def fail(**_):
        raise error

    monkeypatch.setattr(cli, "app", fail)
    command("ls", "models").sentence(*parts, status=1)


def test_a_link_to_itself(command, tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    for arguments in (["compare"], ["report"], ["evaluate"], ["export", "--to", "onnx"]):
        command(*arguments, tmp_path / "circle").sentence("circle", status=1)


def test_faults_of_this_program_keep_their_traceback(command, monkeypatch):
    def fail(**_):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        command("ls", "models")


def limit(kind, value):
    return lambda: resource.setrlimit(kind, (value, value))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs limits of Linux")
def test_few_open_files(process, tmp_path):
    for half, count in (("train", 40), ("test", 1)):
        (tmp_path / "photos" / half / "a").mkdir(parents=True)
        for number in range(count):
            Image.new("L", (4, 4), number).save(tmp_path / "photos" / half / "a" / f"{number:02}.png")
    data.pack(tmp_path / "photos", tmp_path / "packed", size=4, images_per_shard=1)
    done = process(
        "data", "check", "packed", "--root", tmp_path / "packed", preexec_fn=limit(resource.RLIMIT_NOFILE, 24)
    )
    done.sentence("Too many open files", "allow more open files (ulimit -n)", status=1)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs limits of Linux")
def test_too_little_memory_for_torch(process, tmp_path):
    limited = limit(resource.RLIMIT_AS, 300 << 20)
    process("evaluate", tmp_path, preexec_fn=limited).sentence("out of memory on this machine", status=1)


OWN = """
import torch
from torch import nn

class Large(nn.Module):
    def __init__(self, num_classes, channels):
        super().__init__()
        self.fc = nn.Linear(channels * 64, num_classes)

    def forward(self, x):
        return self.fc(x.flatten(1)) + (torch.empty(len(x), 2**50).sum() if len(x) > 100 else 0)
"""


@pytest.mark.slow
def test_a_batch_that_no_machine_holds(command, tmp_path, tiny, monkeypatch):
    (tmp_path / "large_model.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    values = ("--set", "model.name=large_model:Large", "--set", "training.loggers=[]")
    done = command("train", tiny, *values, "--out", tmp_path / "run")
    assert "Traceback" not in done.err
    assert done.err.splitlines()[-1].startswith("atas: ")
    assert "memory" in done.err
