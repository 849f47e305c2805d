"""Rows that live on the host: no step misses what an earlier one wrote, however late a copy is made.

There is no GPU here, so copies are put off instead: `Lazy` makes each at the last moment, when somebody waits for it,
from what its source holds then. What would be a race on a GPU is a wrong number here, every time.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atas.core.host_offload import HostOffload, SyncCopier
from atas.core.perturbations import FullResolution, LowResolution
from atas.methods import create
from atas.threat import Linf

CPU = torch.device("cpu")


class LazyCopy:
    def __init__(self, source, target, log):
        self._source, self._target, self._log, self.done = source, target, log, False

    def wait(self):
        self._log.append("wait")
        self.stream_wait()

    def stream_wait(self):
        if not self.done:
            self._target.copy_(self._source)
            self.done = True


class Lazy:
    """Makes a copy when it is waited for, and notes when the host was held up."""

    def __init__(self):
        self.log = []
        self.copies = []

    def record_event(self):
        return None

    def start(self, source, target, after):
        self.copies.append(LazyCopy(source, target, self.log))
        return self.copies[-1]


class Numbered(Lazy):
    """Numbers the moments in the work of the device, and notes after which each copy may begin."""

    def __init__(self):
        super().__init__()
        self.moment, self.after = 0, []

    def record_event(self):
        self.moment += 1
        return self.moment

    def start(self, source, target, after):
        self.after.append(after)
        return super().start(source, target, after)


def offload(examples=12, copies=None):
    home = torch.arange(examples).float()[:, None].repeat(1, 2)
    return home, HostOffload(home, CPU, copies or Lazy())


def step(rows, index):
    """Double what is there, and add one."""
    rows.fetch(index)
    rows.rows[: len(index)].mul_(2).add_(1)
    rows.write_back(index)


def expected(batches, examples=12):
    home = torch.arange(examples).float()[:, None].repeat(1, 2)
    for index in batches:
        home[index] = home[index] * 2 + 1
    return home


def test_a_prefetch_waits_for_rows_that_are_on_their_way_home():
    """The last batch of an epoch and the first of the next share example 3."""
    home, rows = offload()
    last, first = torch.tensor([1, 3, 5]), torch.tensor([3, 7, 8])
    step(rows, last)
    rows.prefetch(first)
    step(rows, first)
    rows.sync()
    assert torch.equal(home, expected([last, first]))


def test_a_prefetch_of_other_rows_waits_for_nothing():
    """Within an epoch no two batches share an example, and the host must not wait for the step that runs."""
    copies = Lazy()
    _, rows = offload(copies=copies)
    step(rows, torch.tensor([0, 1, 2]))
    leaving = copies.copies[-1]
    copies.log.clear()
    rows.prefetch(torch.tensor([3, 4, 5]))
    assert not leaving.done
    assert copies.log == ["wait"]  # for the buffer of the first batch's rows, which arrived long ago


def test_the_host_runs_one_step_ahead():
    """When a step has been asked of the device, the host waits for the one before it and no more."""
    copies = Lazy()
    _, rows = offload(copies=copies)
    for first in (0, 3, 6):
        step(rows, torch.arange(first, first + 3))
    going = [copy for copy in copies.copies if copy._source.data_ptr() == rows._outgoing.data_ptr()]
    assert [copy.done for copy in going] == [True, True, False]


def test_a_copy_begins_after_what_the_device_does_in_its_place():
    """Rows that come must not overwrite those of the step before, and rows that go must be what the step left."""
    copies = Numbered()
    _, rows = offload(copies=copies)
    rows.prefetch(torch.tensor([0, 1, 2]))
    announced = copies.moment
    rows.fetch(torch.tensor([0, 1, 2]))
    rows.prefetch(torch.tensor([3, 4, 5]))
    assert copies.after[-1] > announced
    worked = copies.moment
    rows.write_back(torch.tensor([0, 1, 2]))
    assert copies.after[-1] > worked


def test_rows_prefetched_before_a_write_are_fetched_again():
    home, rows = offload()
    now, next_ = torch.tensor([0, 1]), torch.tensor([1, 2])
    rows.prefetch(now)
    rows.fetch(now)
    rows.prefetch(next_)  # before the step on example 1 has left
    rows.rows[:2].mul_(2).add_(1)
    rows.write_back(now)
    step(rows, next_)
    rows.sync()
    assert torch.equal(home, expected([now, next_]))


def test_another_batch_than_the_announced_one_is_brought_at_once():
    home, rows = offload()
    rows.prefetch(torch.tensor([0, 1, 2]))
    index = torch.tensor([4, 5, 6])
    step(rows, index)
    rows.sync()
    assert torch.equal(home, expected([index]))


def test_steps_find_their_rows_in_one_place():
    _, rows = offload()
    rows.fetch(torch.arange(5))
    place = rows.rows.data_ptr()
    for size in (5, 2, 5, 1):
        step(rows, torch.arange(size))
        assert rows.rows.data_ptr() == place


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 11), min_size=1, max_size=5, unique=True),
            st.booleans(),
            st.booleans(),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_any_order_of_steps_is_as_if_rows_never_moved(plan):
    """Announced or not, with a halt or a change of mind in between."""
    home, rows = offload()
    for chosen, announced, settled, forgotten in plan:
        index = torch.tensor(chosen)
        if announced:
            rows.prefetch(index)
        if forgotten:
            rows.drop_prefetch()
        if settled:
            rows.sync()
        step(rows, index)
    rows.sync()
    assert torch.equal(home, expected([torch.tensor(chosen) for chosen, *_ in plan]))


def test_plain_copies_are_made_at_once():
    source, target = torch.rand(3), torch.zeros(3)
    copy = SyncCopier().start(source, target, None)
    assert torch.equal(source, target)
    copy.wait()
    copy.stream_wait()


# As part of a memory


def lazy_memory(kind=LowResolution, **options):
    own = {"grid": 4} if kind is LowResolution else {"pad": 1}
    memory = kind(Linf(0.1), 8, (1, 6, 6), dtype=torch.float32, store="host", **own, **options)
    memory.offload = HostOffload(memory.delta, CPU, Lazy())
    return memory


def change(memory, index):
    """A step that leaves a mark on every row."""
    memory.before_step(index)
    rows, places = memory.rows(index)
    rows[places] += 1
    memory.after_step(index)


@pytest.mark.parametrize("kind", [LowResolution, FullResolution])
def test_a_checkpoint_holds_what_the_last_step_wrote(kind):
    memory = lazy_memory(kind)
    change(memory, torch.tensor([2, 5]))
    state = memory.state_dict()["delta"]
    assert state[[2, 5]].eq(1).all()
    assert int(state.count_nonzero()) == 2 * state[0].numel()


def test_late_write_does_not_overwrite_a_reset():
    memory, other = lazy_memory(), LowResolution(Linf(0.1), 8, (1, 6, 6), grid=4, dtype=torch.float32)
    change(memory, torch.tensor([2, 5]))
    memory.prefetch(torch.tensor([0, 1]))
    memory.reset(3, 4)
    other.reset(3, 4)
    memory.sync()
    assert torch.equal(memory.delta, other.delta)
    memory.before_step(torch.tensor([0, 1]))
    assert torch.equal(memory.offload.rows[:2], other.delta[:2])


def test_late_write_does_not_overwrite_a_loaded_state():
    memory = lazy_memory()
    wanted = torch.randn(memory.delta.shape)
    change(memory, torch.tensor([2, 5]))
    memory.prefetch(torch.tensor([0, 1]))
    memory.load_state_dict({"delta": wanted})
    memory.before_step(torch.tensor([0, 1]))
    assert torch.equal(memory.offload.rows[:2], wanted[:2])
    memory.sync()
    assert torch.equal(memory.delta, wanted)


def test_the_rows_stay_on_the_host_when_a_method_is_moved():
    method = create("atas", Linf(0.1), 8, (1, 6, 6), grid=4, store="host")
    rows = method.memory.delta
    method.to("meta")
    assert method.memory.delta is rows
    assert method.memory.offload.device.type == "meta"
    assert method.norms.squared_norm.is_meta
