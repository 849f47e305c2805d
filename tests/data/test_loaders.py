"""The streaming loader: the same batches as the resident one, and workers that never outlive their use."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from atas import data
from atas._utils.system import host_memory
from atas.data import worker_pool
from atas.data.loader import DeviceLoader
from atas.data.streaming import PREFETCH, StreamingLoader
from atas.errors import AtasError, DataError
from atas.training.build import RESIDENT_MEMORY_SHARE, open_loader

CPU = torch.device("cpu")
HOW = {"batch_size": 4, "pad": 2, "flip": True, "seed": 3, "device": CPU}


@pytest.fixture
def images(generator):
    return torch.randint(256, (30, 3, 8, 8), dtype=torch.uint8, generator=generator)


@pytest.fixture
def stream():
    """Make streaming loaders that are closed when the test ends."""
    made = []

    def make(images, labels=None, **how):
        labels = torch.arange(len(images)) % 2 if labels is None else labels
        made.append(StreamingLoader(images, labels, **{**HOW, "workers": 2, **how}))
        return made[-1]

    yield make
    for batches in made:
        batches.close()
    assert not multiprocessing.active_children()


def batches_of(loader, epoch, first=0):
    """What an engine sees of an epoch."""
    order = loader.order(epoch)
    loader.start_epoch(order, first)
    found = []
    for number in range(first, len(loader)):
        loader.prefetch(number)
        start = number * loader.batch_size
        batch = loader.take(order[start : start + loader.size(number)], torch.tensor(epoch))
        found.append((batch.x.clone(), batch.y, batch.index, batch.view.top, batch.view.left, batch.view.flip))
    return found


def assert_same(one, other):
    assert len(one) == len(other)
    for batch, batch_2 in zip(one, other, strict=True):
        for tensor, tensor_2 in zip(batch, batch_2, strict=True):
            assert torch.equal(tensor, tensor_2)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 7])
@pytest.mark.parametrize("batch_size", [1, 4, 7, 100])
def test_the_same_batches_as_resident(images, stream, workers, batch_size):
    labels = torch.arange(30) % 3
    resident = DeviceLoader(images, labels, **{**HOW, "batch_size": batch_size})
    streaming = stream(images, labels, workers=workers, batch_size=batch_size)
    for epoch in (0, 5):
        assert_same(batches_of(streaming, epoch), batches_of(resident, epoch))


def test_an_epoch_can_begin_anywhere_and_be_given_up(images, stream):
    streaming = stream(images)
    whole = batches_of(streaming, 2)
    for first in (0, 1, PREFETCH, len(streaming) - 1):
        assert_same(batches_of(streaming, 2, first), whole[first:])
    streaming.start_epoch(streaming.order(1), 0)
    streaming.prefetch(0)
    assert_same(batches_of(streaming, 2), whole)


def test_workers_are_never_sent_to_a_place_that_is_being_copied(images, stream, monkeypatch):
    """A copy to a GPU goes on until somebody waits for it; what is read meanwhile must lie elsewhere."""
    streaming = stream(images)
    batches_of(streaming, 0)
    under_way, copier, pool = set(), streaming._copier, streaming._pool

    def copy(place, size, copy=copier.copy):
        copy(place, size)
        under_way.add(place)

    def submit(worker, task, submit=pool.submit):
        assert task[0] not in under_way
        submit(worker, task)

    monkeypatch.setattr(copier, "copy", copy)
    monkeypatch.setattr(copier, "wait", under_way.discard)
    monkeypatch.setattr(pool, "submit", submit)
    for epoch in (1, 2):
        batches_of(streaming, epoch)
        assert under_way == {(len(streaming) - 1) % PREFETCH}  # the host does not wait for the last


def test_images_stay_at_one_address(images, stream):
    streaming = stream(images)
    address = streaming.images.data_ptr()
    batches_of(streaming, 0)
    assert streaming.images.data_ptr() == address
    assert len(streaming.images) == 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raw", "jpeg", "files"])
def test_from_the_disk(photos, tmp_path, stream, kind):
    if kind == "files":
        split = data.load("imagefolder", photos, size=16, lazy=True).train
        assert torch.equal(split.images[:], data.load("imagefolder", photos, size=16).train.images)
    else:
        data.pack(photos, tmp_path / "packed", size=16, format=kind, images_per_shard=4)
        split = data.load("packed", tmp_path / "packed").train
    part = split.subset(torch.tensor([20, 3, 4, 5, 11]))
    for some in (split, part):
        resident = DeviceLoader(some.images, some.labels, **HOW)
        assert_same(batches_of(stream(some.images, some.labels), 1), batches_of(resident, 1))


@pytest.mark.slow
def test_fingerprints_tell_sets_apart(photos, tmp_path):
    split = data.load("imagefolder", photos, size=16, lazy=True).train
    data.pack(photos, tmp_path / "a", size=16)
    data.pack(photos, tmp_path / "b", size=16)
    data.pack(photos, tmp_path / "c", size=15)
    packed = [data.load("packed", tmp_path / name).train.fingerprint() for name in "aabc"]
    assert packed[0] == packed[1] == packed[2] != packed[3]
    found = [
        split.fingerprint(),
        split.subset(slice(1, None)).fingerprint(),
        data.load("imagefolder", photos, size=15, lazy=True).train.fingerprint(),
        data.Split(split.images, 1 - split.labels, split.classes).fingerprint(),
    ]
    assert len(set(found)) == 4
    assert data.load("imagefolder", photos, size=16, lazy=True).train.fingerprint() == found[0]


# When something goes wrong


def test_a_damaged_file_ends_it_with_its_name(photos, stream):
    (photos / "train" / "dog" / "009.png").write_text("no image")
    split = data.load("imagefolder", photos, size=16, lazy=True).train
    streaming = stream(split.images, split.labels)
    with pytest.raises(DataError, match=r"cannot decode .*train/dog/009.png \(cannot identify image file\)"):
        batches_of(streaming, 0)


def test_a_file_that_is_gone_is_not_called_damaged(photos, stream):
    split = data.load("imagefolder", photos, size=16, lazy=True).train
    (photos / "train" / "dog" / "009.png").unlink()
    with pytest.raises(
        DataError, match=r"cannot read .*train/dog/009.png \(No such file or directory\); check the disk"
    ):
        batches_of(stream(split.images, split.labels), 0)


def test_a_killed_worker(images, stream):
    streaming = stream(images)
    streaming.start_epoch(streaming.order(0), 0)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    with pytest.raises(AtasError, match=r"a process that reads training images was killed by SIGKILL; probably memory"):
        _ = [streaming.prefetch(number) for number in range(len(streaming))]


def test_workers_leave_it_to_their_parent_when_to_stop(images, stream):
    streaming = stream(images)
    order = streaming.order(0)
    streaming.start_epoch(order, 0)
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, signal.SIGINT)
        os.kill(worker.pid, signal.SIGTERM)
    for number in range(len(streaming)):
        streaming.prefetch(number)
    streaming.close()
    streaming.close()
    assert not multiprocessing.active_children()
    assert len(batches_of(streaming, 0)) == len(streaming)  # and can be used again


CHILD = """
import sys, time, multiprocessing, torch
from atas.data.streaming import StreamingLoader
images = torch.zeros(40, 3, 8, 8, dtype=torch.uint8)
loader = StreamingLoader(images, torch.zeros(40, dtype=torch.int64), batch_size=4, pad=0, flip=False, seed=0,
                   device=torch.device("cpu"), workers=3)
loader.start_epoch(loader.order(0), 0)
loader.prefetch(0)
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", [True, False])
def test_workers_end_with_their_parent(killed):
    """Killed, or at its end without a word to the loader."""
    parent = subprocess.Popen(
        [sys.executable, "-c", CHILD, "60" if killed else "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 3
    if killed:
        parent.kill()
    _, said = parent.communicate(timeout=20)
    assert said == ""
    end = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") and not _is_zombie(pid) for pid in workers):
        assert time.monotonic() < end
        time.sleep(0.01)


def _is_zombie(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# Which loader


def test_memory_is_that_of_the_container_shared_by_the_local_processes(tmp_path, monkeypatch):
    files = tmp_path / "none", tmp_path / "limit"

    def memory(limit, processes="1"):
        files[1].write_text(limit)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        return host_memory(files)

    assert memory("max\n") == host_memory(()) > 10**8
    assert memory("41472\n") == 41472
    assert memory("82944\n", processes="2") == 41472


def test_files_are_decoded_at_the_start_where_memory_holds_them(photos, monkeypatch):
    """27 images of 16 x 16 take 20,736 bytes, and may take half of the memory of a process."""

    def in_memory(limit):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(host_memory() // limit))
        return isinstance(data.load("imagefolder", photos, size=16).train.images, torch.Tensor)

    assert in_memory(41472)
    assert not in_memory(41400)


def test_the_choice_of_a_loader(images, photos, monkeypatch):
    said = []
    split = data.Split(images, torch.zeros(30, dtype=torch.int64), ("one",))
    lazy = data.load("imagefolder", photos, size=16, lazy=True).train

    def kind(split, loading):
        said.clear()
        return open_loader(split, loading, **HOW, workers=1, log=said.append).kind

    assert kind(split, "auto") == "resident"
    assert not said
    assert kind(lazy, "auto") == "resident"
    assert said == [f"21 training images, 16 kB as pixels, are read from {photos} into the memory of cpu"]
    assert kind(lazy, "streaming") == "streaming"
    assert said == [f"21 training images, 16 kB as pixels, are streamed from {photos} by 1 process"]
    too_small = int(0.99 * images.numel() / RESIDENT_MEMORY_SHARE)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(host_memory() // too_small))
    assert kind(split, "auto") == "streaming"
    assert "(data.loading = auto)" in said[0]
    assert kind(split, "resident") == "resident"


def test_shared_arrays_are_shared():
    array = worker_pool.shared_array((3, 2), "int64")

    def work(task):
        array[task] = task + 1
        return task

    assert sorted(worker_pool.imap_unordered(work, range(3), 2, "counts")) == [0, 1, 2]
    assert array.tolist() == [[1, 1], [2, 2], [3, 3]]


def test_an_unexpected_error_in_a_worker_is_raised_with_its_traceback():
    with pytest.raises(RuntimeError, match=r"in a worker process:\n(.*\n)*ZeroDivisionError"):
        list(worker_pool.imap_unordered(lambda task: 1 // task, range(2), 2, "divides"))


@pytest.mark.gpu
def test_streaming_loader_gives_the_same_batches_on_a_gpu(images, stream):
    """Copies run beside the steps; images are as they should be all the same."""
    device = torch.device("cuda")
    labels = torch.arange(30) % 2
    streaming = stream(images, labels, device=device)
    resident = DeviceLoader(images, labels, **{**HOW, "device": device})
    for epoch in range(20):
        orders = [loader.order(epoch).to(device) for loader in (streaming, resident)]
        streaming.start_epoch(orders[0].cpu(), 0)
        for number in range(len(streaming)):
            streaming.prefetch(number)
            rows = slice(number * 4, number * 4 + streaming.size(number))
            one, other = (
                loader.take(order[rows], torch.tensor(epoch, device=device))
                for loader, order in zip((streaming, resident), orders, strict=True)
            )
            assert torch.equal(one.x, other.x)
            assert torch.equal(one.y, other.y)
