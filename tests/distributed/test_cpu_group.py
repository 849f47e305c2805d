"""World: the process group of objects and CPU tensors."""

import pytest
import torch.distributed as dist

from atas.distributed.world import World, init


@pytest.fixture
def process_group():
    """Make a default group of this process alone."""
    yield lambda backend: dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def test_a_group_with_a_cpu_backend_is_used_as_it_is(process_group):
    process_group("gloo")
    with init() as world:
        assert world == World(0, 1, in_group=True)
        assert world.is_distributed
        assert not world.can_capture, "gloo's collectives cannot be recorded"


def test_a_group_without_a_cpu_backend_gets_a_gloo_group(process_group):
    process_group("cuda:gloo")
    with init() as world:
        assert dist.get_backend(world.cpu_group) == "gloo"
        values = [None]
        dist.all_gather_object(values, "a", group=world.cpu_group)
        assert values == ["a"]
    with pytest.raises(ValueError, match="not initialized"):
        dist.get_backend(world.cpu_group)
    assert dist.is_initialized()
