"""Writing beside the loop. Gates in the storage decide the order of events, so nothing here depends on how fast anything is."""

from __future__ import annotations

import threading

import pytest
import torch
from checkpoint_bytes import all_names, same, save_parts, step_dir

from holdfast.checkpoint import CheckpointStore, load, newest_intact, steps, take
from holdfast.checkpoint.snapshot import SnapshotBuffer
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.writer import CheckpointWriter
from holdfast.errors import CheckpointError

PATIENCE_S = 60.0
TOKEN = {"token": "shared"}


class Gated(LocalStorage):
    """A directory that takes nothing while its gate is shut, and says what it is asked for."""

    def __init__(self, root):
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()
        self.asked = threading.Event()
        self.error = None
        self.log = []

    def prepare(self, folder):
        self._pass("prepare")
        return super().prepare(folder)

    def store(self, folder, names):
        super().store(folder, names)
        self._pass("store")

    def put(self, path, data):
        self._pass("put")
        super().put(path, data)

    def _pass(self, what):
        self.asked.set()
        assert self.gate.wait(PATIENCE_S), "the test forgot to open the gate"
        self.log.append(what)
        if self.error is not None:
            raise self.error


class Gates(CheckpointStore):
    """Checkpoints in a gated directory."""

    def __init__(self, root):
        super().__init__(root)
        self.storage = Gated(root)


@pytest.fixture
def places(tmp_path):
    return Gates(tmp_path)


@pytest.fixture
def storage(places):
    yield places.storage
    places.storage.gate.set()


@pytest.fixture(params=[True, False], ids=["beside", "in the loop"])
def either(request, places):
    return CheckpointWriter(places, background=request.param)


@pytest.fixture
def writer(places, storage):
    return CheckpointWriter(places, background=True)


def state_of(value, size=1000):
    return {"w": torch.full((size,), float(value)), "n": torch.tensor(value), "steps": [value], "e": torch.ones(0, 3)}


def outcome(writer):
    """Wait for the end of what was decided on; return what became of it."""
    writer.wait()
    (found,) = writer.poll()
    return found


# --------------------------------------------------------------------------------------------- the loop


def test_begin_commit_and_poll_return_before_the_storage_has_taken_anything(writer, storage, tmp_path):
    storage.gate.clear()

    writer.begin(5, take(state_of(1)), {})
    writer.commit(3)
    early = list(storage.log), writer.poll(), writer.step, steps(tmp_path)
    storage.gate.set()

    assert early == ([], [], 5, [])
    assert outcome(writer).saved.step == 5
    assert load(tmp_path, 5).generation == 3
    assert storage.log == ["prepare", "store", "put"]


def test_in_the_loop_it_is_written_when_begin_returns_and_complete_when_commit_does(places, storage, tmp_path):
    writer = CheckpointWriter(places, background=False)
    threads = set(threading.enumerate())

    writer.begin(5, take(state_of(1)), {})
    begun = list(storage.log), steps(tmp_path)
    writer.commit(0)

    assert begun == (["prepare", "store"], [])
    assert steps(tmp_path) == [5]
    assert set(threading.enumerate()) == threads


def test_without_a_thread_it_is_written_in_the_loop_and_the_next_one_beside_it(writer, storage, tmp_path):
    before = threading.stack_size(1 << 46)  # no process has so much: every thread is refused, as beyond a limit
    try:
        writer.begin(5, take(state_of(1)), {})
        written = list(storage.log)
        writer.commit(0)
    finally:
        threading.stack_size(before)

    assert (written, outcome(writer).saved.step) == (["prepare", "store"], 5)
    storage.gate.clear()
    writer.begin(6, take(state_of(2)), {})
    writer.commit(0)
    assert steps(tmp_path) == [5]
    storage.gate.set()
    assert outcome(writer).saved.step == 6


@pytest.mark.parametrize("background", [True, False])
def test_what_is_saved_is_the_state_at_begin_whatever_happens_to_it_then(places, storage, tmp_path, background):
    writer = CheckpointWriter(places, background=background)
    state = state_of(1) | {"base": torch.arange(12.0).reshape(3, 4), "numbers": torch.tensor([1 + 2j]).conj()}
    state["view"] = state["base"].t()
    state["tied"] = state["base"]
    info = {"seed": 1}
    wanted = {key: value.clone() if isinstance(value, torch.Tensor) else list(value) for key, value in state.items()}
    if background:
        storage.gate.clear()

    writer.begin(5, take(state), info)
    for value in state.values():
        value.zero_() if isinstance(value, torch.Tensor) else value.clear()
    storage.gate.set()
    writer.commit(0)
    writer.wait()

    assert same(load(tmp_path, 5).state, wanted)


def test_negative_control_without_the_copy_what_happens_later_is_saved(writer, storage, tmp_path, monkeypatch):
    monkeypatch.setattr(SnapshotBuffer, "copy", lambda self, content: content)
    state = state_of(1)
    storage.gate.clear()

    writer.begin(5, take(state), {})
    state["w"].zero_()
    storage.gate.set()
    writer.commit(0)
    writer.wait()

    assert not load(tmp_path, 5).state["w"].any()


def test_how_long_the_loop_was_held_counts_what_it_waited_for(places, storage):
    slow = CheckpointWriter(places, background=False)
    slow.begin(5, take(state_of(1)), {})
    slow.commit(0)

    found = outcome(slow)

    assert found.held_s >= found.written_s > 0


# --------------------------------------------------------------------------------------------- one after another


def test_a_slow_storage_holds_the_next_begin_and_not_the_memory(writer, storage, tmp_path):
    log = []
    storage.gate.clear()
    writer.begin(1, take(state_of(1)), {})
    copy = writer._snapshot._memory.data_ptr()
    writer.commit(0)

    def open_the_gate():
        log.append("gate")
        storage.gate.set()

    assert storage.asked.wait(PATIENCE_S)
    timer = threading.Timer(0.3, open_the_gate)
    timer.start()
    writer.begin(2, take(state_of(2)), {})  # would not return before the gate opens
    log.append("begun")
    timer.join()
    writer.commit(0)
    writer.wait()

    assert log == ["gate", "begun"]
    assert writer._snapshot._memory.data_ptr() == copy
    assert same(load(tmp_path, 1).state, state_of(1))
    assert same(load(tmp_path, 2).state, state_of(2))
    assert [found.saved.step for found in writer.poll()] == [1, 2]


def test_there_is_one_copy_and_it_is_used_again():
    snapshot = SnapshotBuffer()
    big, small = take(state_of(1, size=5000)), take(state_of(2, size=10))

    first = snapshot.copy(big)
    memory = snapshot._memory
    own = first.boxes[0].tensor.data_ptr()
    snapshot.copy(small)
    again = snapshot.copy(big)

    assert snapshot._memory is memory
    assert again.boxes[0].tensor.data_ptr() == own
    assert memory.numel() <= big.size_bytes + 64 * len(big.boxes)
    assert own != big.boxes[0].tensor.data_ptr()


def test_a_copy_is_the_same_to_the_bit_whatever_is_in_it(tmp_path):
    state = state_of(3) | {
        "odd": [torch.arange(9, dtype=torch.uint8)[i : i + 1] for i in range(3)],
        "s": torch.tensor(True),
    }

    copied = SnapshotBuffer().copy(take(state, 1, 2))

    for box, own in zip(take(state, 1, 2).boxes, copied.boxes, strict=True):
        assert same(box.tensor, own.tensor)
        assert box.tensor.data_ptr() != own.tensor.data_ptr() or not box.tensor.numel()
        assert own.tensor.data_ptr() % 64 == 0


def test_what_was_not_decided_on_is_abandoned_by_the_next_begin(either, tmp_path):
    either.begin(1, take(state_of(1)), {})
    either.begin(2, take(state_of(2)), {})
    either.commit(0)
    either.wait()

    assert [(found.step, found.saved is not None, found.error) for found in either.poll()] == [
        (1, False, None),
        (2, True, None),
    ]
    assert {name.split("/")[0] for name in all_names(tmp_path)} == {"step-00000002"}


# --------------------------------------------------------------------------------------------- deciding


def test_a_checkpoint_that_is_abandoned_before_or_after_it_is_written_leaves_nothing(either, places, tmp_path):
    either.begin(5, take(state_of(1)), {})
    either.abandon()
    either.wait()
    either.poll()

    beside = CheckpointWriter(places, background=True)
    places.storage.gate.clear()
    beside.begin(6, take(state_of(1)), {})
    beside.abandon()
    places.storage.gate.set()
    beside.wait()

    assert all_names(tmp_path) == []


def test_the_first_decision_is_the_one_that_counts(either, tmp_path):
    either.begin(5, take(state_of(1)), {})
    either.commit(1)
    either.abandon()
    either.commit(2)
    either.leave()
    either.wait()
    either.abandon()

    assert load(tmp_path, 5).generation == 1


def test_who_leaves_completes_nothing_and_removes_nothing(either, tmp_path):
    either.begin(5, take(state_of(1)), {}, **TOKEN)
    either.leave()

    assert outcome(either).saved is None
    assert steps(tmp_path) == []
    assert (step_dir(tmp_path, 5) / "data-shared").is_dir()


def test_without_a_checkpoint_there_is_nothing_to_decide(either):
    either.commit(0)
    either.leave()
    either.abandon()
    either.wait()

    assert either.poll() == []
    assert either.step is None


def test_nobody_waits_for_what_was_not_decided_on(writer):
    writer.begin(5, take(state_of(1)), {})

    writer.wait()

    assert writer.step == 5
    writer.abandon()
    writer.wait()


# --------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("error", [CheckpointError("the disk is full"), RuntimeError("something else")], ids=repr)
def test_what_goes_wrong_is_told_by_poll_and_the_next_one_counts(either, places, tmp_path, error):
    places.storage.error = error
    either.begin(1, take(state_of(1)), {})
    either.commit(0)
    first = outcome(either)

    places.storage.error = None
    either.begin(2, take(state_of(2)), {})
    either.commit(0)
    second = outcome(either)

    assert (first.step, first.saved, first.error) == (1, None, error)
    assert (second.step, second.error) == (2, None)
    assert newest_intact(tmp_path) == 2


def test_what_goes_wrong_when_it_is_completed_is_told_and_leaves_nothing(either, places, tmp_path):
    save_parts(tmp_path, 1, [state_of(1)])
    either.begin(2, take(state_of(2)), {}, **TOKEN)
    if either._background:
        assert _until(lambda: "store" in places.storage.log)
    places.storage.error = CheckpointError("the disk is full")
    either.commit(0)

    found = outcome(either)

    assert (found.saved, str(found.error)) == (None, "the disk is full")
    assert {name.split("/")[0] for name in all_names(tmp_path)} == {"step-00000001"}


def _until(true):
    """Wait for something that another thread does."""
    tick = threading.Event()
    return any(true() or tick.wait(0.01) for _ in range(int(PATIENCE_S * 100)))


def test_a_manifest_that_arrives_after_nobody_waits_for_it_finds_its_tensors(places, storage, tmp_path, monkeypatch):
    late = []

    def put(path, data):
        late.append((path, data))
        raise CheckpointError("cannot write: no answer") from TimeoutError()

    writer = CheckpointWriter(places, background=True)
    monkeypatch.setattr(storage, "put", put)
    writer.begin(5, take(state_of(7)), {}, **TOKEN)
    writer.commit(0)

    assert str(outcome(writer).error) == "cannot write: no answer"
    assert newest_intact(tmp_path) is None
    LocalStorage(tmp_path).put(*late[0])
    assert same(load(tmp_path, 5).state, state_of(7))
