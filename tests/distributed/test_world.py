"""World: agreement between ranks, and each rank's device."""

import multiprocessing
import socket
import traceback

import pytest
import torch
import torch.distributed as dist

from atas.distributed.world import SINGLE, World, select_device
from atas.errors import UsageError


def run_rank(rank, size, folder, function, answers):
    try:
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        answers.put((rank, function(World(rank, size, in_group=True))))
        dist.barrier()
    except Exception:
        answers.put((rank, traceback.format_exc()))


@pytest.fixture
def on_ranks(tmp_path, monkeypatch):
    """Run a function of World on ranks of a gloo group, and return what it returned, by rank."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def run(size, function):
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        processes = [
            context.Process(target=run_rank, args=(rank, size, tmp_path, function, answers)) for rank in range(size)
        ]
        for process in processes:
            process.start()
        answered = dict(answers.get(timeout=60) for _ in processes)
        for process in processes:
            process.join(60)
        return [answered[rank] for rank in range(size)]

    return run


def fail_on_rank_1(world):
    def function():
        if world.rank == 1:
            raise ValueError("no memory\nand more")
        return "done"

    try:
        return world.on_all_ranks(function)
    except Exception as error:
        return type(error).__name__, str(error)


def test_on_all_ranks_raises_everywhere_if_one_rank_fails(on_ranks):
    mine, failed, other = on_ranks(3, fail_on_rank_1)
    assert failed == ("ValueError", "no memory\nand more")
    assert mine == other == ("FailedRankError", "no memory, on process 1 of 3")


def test_on_all_ranks_returns_each_ranks_own_result(on_ranks):
    assert on_ranks(2, lambda world: world.on_all_ranks(lambda: world.rank)) == [0, 1]
    assert SINGLE.on_all_ranks(lambda: "alone") == "alone"


def same_number(world):
    try:
        return str(world.device(torch.device("cuda:1")))
    except UsageError as error:
        return str(error)


def test_a_gpu_named_for_all_ranks_is_refused(on_ranks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    answers = on_ranks(2, same_number)
    assert all("several processes would share 'cuda:1': set the device to cuda" in answer for answer in answers)


def test_a_gpu_named_for_each_rank_is_obeyed(on_ranks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    answers = on_ranks(2, lambda world: str(world.device(torch.device("cuda", 3 - world.rank))))
    assert answers == ["cuda:3", "cuda:2"]


def test_without_a_number_each_rank_has_the_gpu_of_its_rank(on_ranks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert on_ranks(2, lambda world: str(world.device(torch.device("cuda")))) == ["cuda:0", "cuda:1"]


def test_ranks_on_two_machines_may_name_the_same_gpu(on_ranks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    def on_another_machine(world):
        monkeypatch.setattr(socket, "gethostname", lambda: f"machine{world.rank}")
        return str(world.device(torch.device("cuda:1")))

    assert on_ranks(2, on_another_machine) == ["cuda:1", "cuda:1"]


def test_one_process_takes_the_device_it_is_given():
    assert select_device("cpu") == torch.device("cpu")
    with pytest.raises(UsageError, match="there is no device 'gpu'"):
        select_device("gpu")
    assert SINGLE.can_capture
