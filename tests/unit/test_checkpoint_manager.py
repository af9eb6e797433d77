"""What is kept of a run, and what becomes of a checkpoint when workers, disks and storages fail around it."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import random
import signal
import threading

import numpy as np
import pytest
import torch
from train_saving import LOOP_ENDS, Training, undisturbed

from holdfast.checkpoint import load, steps, verify, write_tensors
from holdfast.checkpoint import writer as writers
from holdfast.config import Settings
from holdfast.data.seeds import generator_states, set_generator_states
from holdfast.engine.restorer import StateRestorer
from holdfast.errors import CheckpointError, ConfigError
from holdfast.faults import points
from holdfast.state import manager as keepers
from holdfast.state.manager import CheckpointManager

STEPS = LOOP_ENDS[-1]


@pytest.fixture(autouse=True)
def _nothing_outlives_a_test(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    yield
    points.arm(None)


def saved_at(step, where, schedule="step", **settings):
    """Train until SIGTERM stops the run before ``step``."""
    ask = lambda now: os.kill(os.getpid(), signal.SIGTERM) if now.number == step - 1 else None  # noqa: E731
    with pytest.raises(SystemExit) as stopped:
        Training(schedule, checkpoint_dir=str(where), **settings).run(ask)
    assert stopped.value.code == 4
    assert steps(where)[-1] == step


# -- a run that goes on ends with the bits of one that was never stopped


@pytest.mark.parametrize(("processes", "writers"), [(1, 1), (2, 2), (128, 128), (129, 65), (1024, 128)])
def test_the_writers_of_a_large_job_are_spread_over_its_nodes(processes, writers):
    chosen = keepers.spread([(rank,) for rank in range(processes)])

    assert (len(chosen), chosen[0]) == (writers, (0,))
    assert len({b[0] - a[0] for a, b in itertools.pairwise(chosen)}) <= 1


def test_each_of_fewer_writers_than_workers_saves_a_part(tmp_path, monkeypatch):
    monkeypatch.setattr(keepers, "_MOST_WRITERS", 2)
    state = {"model": {"w": torch.arange(12.0)}}
    monkeypatch.setattr(keepers, "SHARED_BYTES", 8)
    everyone = [(rank,) for rank in range(3)]
    managers = [CheckpointManager(Settings(checkpoint_dir=str(tmp_path)), background=False) for _ in everyone]

    for manager, me in reversed(list(zip(managers, everyone, strict=True))):
        manager.begin(1, state, {}, everyone, me, 0)
        manager.publish(0, 0, is_lead=me == (0,))
        manager.finish()

    assert torch.equal(load(tmp_path, 1).state["model"]["w"], state["model"]["w"])
    assert len(verify(tmp_path, 1).files) == 2


@pytest.mark.parametrize(
    ("at", "schedule", "workers", "then"),
    [(1, "step", 1, 3), (7, "epoch", 1, 3), (9, "step", 3, 2), (9, "epoch", 2, 2), (17, "step", 1, 1)],
)
def test_a_run_that_was_stopped_goes_on_to_the_same_bits_on_any_number_of_workers(
    tmp_path, at, schedule, workers, then
):
    saved_at(at, tmp_path / "c", schedule, workers=workers)

    resumed = Training(schedule, workers=then, checkpoint_dir=str(tmp_path / "c"), resume=True).run()

    assert resumed.session.step == STEPS
    assert resumed.sha256 == undisturbed(schedule)


def test_a_script_that_ends_itself_goes_on_where_it_ended(tmp_path):
    settings = {"checkpoint_dir": str(tmp_path / "c"), "checkpoint_every": 4}
    first = Training(**settings)
    first.run(lambda step: first.stop(step) if step.number == 11 else None)
    assert first.session.step == 12

    assert Training(**settings, resume=True).run().sha256 == undisturbed()


def test_a_run_may_be_stopped_again_and_again(tmp_path):
    at, where = 0, str(tmp_path / "c")
    for stop in (2, 3, 14):
        ask = lambda now, stop=stop: os.kill(os.getpid(), signal.SIGTERM) if now.number == stop - 1 else None  # noqa: E731
        with pytest.raises(SystemExit):
            Training(checkpoint_dir=where, resume=at > 0).run(ask)
        at = stop

    assert Training(checkpoint_dir=where, resume=True).run().sha256 == undisturbed()
    assert steps(where) == [2, 3, 14]


def test_a_run_goes_on_from_an_object_store():
    pytest.importorskip("obstore")
    settings = {"checkpoint_dir": "memory://runs/a", "checkpoint_every": 4, "keep_last": 2}
    first = Training(**settings)
    first.run(lambda step: first.stop(step) if step.number == 11 else None)

    assert Training(**settings, resume=True).run().sha256 == undisturbed()
    assert steps("memory://runs/a") == [12, 16]


def test_a_run_without_any_intact_checkpoint_says_that_it_starts_at_the_beginning(tmp_path, capfd):
    saved_at(9, tmp_path / "c")
    (tmp_path / "c" / "step-00000009" / "manifest.json").write_bytes(b"{}")

    resumed = Training(checkpoint_dir=str(tmp_path / "c"), resume=True).run()

    said = capfd.readouterr().err
    assert "skipped step 9: " in said
    assert f"there is no intact checkpoint in {tmp_path / 'c'}: training starts at step 0" in said
    assert resumed.sha256 == undisturbed()


# -- and needs all that was saved


def go_on_with(edit, where, elsewhere, step=9):
    """Edit the state of a checkpoint, save it elsewhere, and train from there; return the hash at the end."""
    loaded = load(where, step)
    initial = Training().session._trainable.state_dict()
    state, info, step = edit(loaded.state, loaded.info, initial) or (loaded.state, loaded.info, step)
    write_tensors(elsewhere, step, state, info).commit(0)
    return Training(checkpoint_dir=str(elsewhere), resume=True).run().sha256


def without(part):
    def edit(state, info, initial):
        state["replica"][part] = copy.deepcopy(initial[part])

    return edit


def without_averages(state, info, initial):
    saved, fresh = state["replica"]["model"], initial["model"]
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        saved[name] = fresh[name].clone()


def elsewhere_in_the_data(state, info, initial):
    info["offset"] += 10


def in_another_epoch(state, info, initial):
    info["epoch"] += 1


def in_another_step(state, info, initial):
    return state, info, 8


ABLATIONS = {
    "the model": without("model"),
    "its averages": without_averages,
    "the optimizer": without("optimizer"),
    "the scheduler": without("scheduler"),
    "the scaler": without("scaler"),
    "what was registered": without("registered.mean"),
    "what the script draws": without("registered.noise"),
    "the place in the epoch": elsewhere_in_the_data,
    "the epoch": in_another_epoch,
    "the step": in_another_step,
}


@pytest.fixture(scope="module")
def at_9(tmp_path_factory):
    """The checkpoints of a run that was stopped before step 9."""
    where = tmp_path_factory.mktemp("stopped") / "c"
    saved_at(9, where)
    return where


@pytest.mark.parametrize("left_out", ABLATIONS)
def test_negative_control_a_run_that_lacks_a_part_of_its_state_ends_with_other_bits(tmp_path, at_9, left_out):
    assert go_on_with(ABLATIONS[left_out], at_9, tmp_path / "d") != undisturbed()


def test_a_state_that_is_only_copied_ends_with_the_same_bits(tmp_path, at_9):
    assert go_on_with(lambda *_: None, at_9, tmp_path / "d") == undisturbed()


def test_the_generators_go_on_where_they_were_behind_a_loop(tmp_path):
    """Inside a loop they are seeded for every step; what a script draws between two loops goes on from the first."""
    settings = {"checkpoint_dir": str(tmp_path / "c"), "checkpoint_every": LOOP_ENDS[0]}

    def die(step):
        if step.number == LOOP_ENDS[0] + 2:
            raise ConnectionError

    with pytest.raises(ConnectionError):
        Training(**settings).run(die)
    assert steps(tmp_path / "c") == [LOOP_ENDS[0]]

    def elsewhere(state, info, initial):
        torch.rand(3), random.random(), np.random.rand()
        state["generators"] = generator_states()

    resumed = functools.partial(go_on_with, where=tmp_path / "c", step=LOOP_ENDS[0])
    assert resumed(lambda *_: None, elsewhere=tmp_path / "same") == undisturbed()
    assert resumed(elsewhere, elsewhere=tmp_path / "other") != undisturbed()


@pytest.mark.parametrize("loop", [0, 1])
def test_a_load_that_a_death_interrupted_loads_the_same_state_again_in_any_loop(tmp_path, monkeypatch, loop):
    """Some have then loaded it and some not: whoever looks, it must be the same for all."""
    at = LOOP_ENDS[loop] - 1
    saved_at(at, tmp_path / "c")
    loaded, load_once, load_state = [], StateRestorer.load, CheckpointManager.load

    def load_twice(self, *, trained):
        load_once(self, trained=trained)
        load_once(self, trained=trained)

    def note(self, step, only=None):
        loaded.append(step)
        return load_state(self, step, only)

    monkeypatch.setattr(StateRestorer, "load", load_twice)
    monkeypatch.setattr(CheckpointManager, "load", note)
    resumed = Training(checkpoint_dir=str(tmp_path / "c"), resume=True).run()

    assert loaded == [at, at] * (loop + 1)
    assert resumed.sha256 == undisturbed()


def test_generators_come_back_as_they_were():
    torch.rand(3), random.gauss(0, 1), np.random.standard_normal()
    states = generator_states()
    drawn = torch.rand(3).tolist(), random.gauss(0, 1), random.random(), np.random.standard_normal(3).tolist()

    set_generator_states(states)

    again = torch.rand(3).tolist(), random.gauss(0, 1), random.random(), np.random.standard_normal(3).tolist()
    assert again == drawn


# -- several workers write one checkpoint; here each has a keeper, and no thread of its own but the writer's


class Worker:
    """One of several that save the same state."""

    def __init__(self, rank, where, **settings):
        self.rank = rank
        self.keeper = CheckpointManager(Settings(checkpoint_dir=str(where), **settings), background=True)
        self.keeper.start_over(77, 0)

    def begin(self, step, members, generation=0, value=None):
        state = {"w": torch.full((6, 5), float(step if value is None else value)), "note": f"of worker {self.rank}"}
        writers = [(rank,) for rank in members]
        self.keeper.note_alive(members)
        self.keeper.begin(step, state, {"lead": members[0]}, writers, (self.rank,), generation)

    def publish(self, stable, members, generation=0):
        self.keeper.publish(stable, generation, is_lead=self.rank == members[0])


@pytest.fixture
def trio(tmp_path, monkeypatch):
    monkeypatch.setattr(keepers, "SHARED_BYTES", 0)
    return [Worker(rank, tmp_path) for rank in range(3)]


def hold(step, name, rank_of_thread):
    """Hold a writer at a point until the event is set; return the event."""
    go_on = threading.Event()

    def wait(reached):
        if reached == name and rank_of_thread():
            assert go_on.wait(30)

    points.arm(wait)
    return go_on


def everybody(workers, act, *args, **kwargs):
    for worker in workers:
        getattr(worker, act)(*args, **kwargs)


def test_all_write_a_part_and_the_lead_completes_it(trio, tmp_path):
    everybody(trio, "begin", 4, (0, 1, 2))
    assert steps(tmp_path) == []
    everybody(trio, "publish", 3, (0, 1, 2))

    (outcome,) = trio[0].keeper.finish()

    assert outcome.error is None
    assert outcome.saved.step == 4
    assert len(verify(tmp_path, 4).files) == 3
    assert load(tmp_path, 4).state["note"] == "of worker 0"


def test_a_step_that_is_not_stable_does_not_count(trio, tmp_path):
    everybody(trio, "begin", 4, (0, 1, 2))

    everybody(trio, "publish", 2, (0, 1, 2))

    assert trio[0].keeper.finish() == []
    assert steps(tmp_path) == []


def test_nobody_waits_for_the_part_of_the_dead(trio, tmp_path):
    everybody(trio[:2], "begin", 4, (0, 1, 2))
    everybody(trio[:2], "publish", 3, (0, 1, 2))  # the third has died, and nobody knows yet

    trio[1].keeper.finish()  # its part is there, so that it can be cleared away
    trio[0].keeper.note_alive((0, 1))
    (outcome,) = trio[0].keeper.finish()

    assert "part 2 of 3 was not written, and its writer is gone" in str(outcome.error)
    assert steps(tmp_path) == []
    assert list(tmp_path.iterdir()) == [], "what cannot be completed is cleared away"


def test_the_part_of_the_dead_counts_if_it_was_written(trio, tmp_path):
    everybody(trio, "begin", 4, (0, 1, 2))
    trio[2].keeper.publish(3, 0, is_lead=False)
    trio[2].keeper.finish()
    everybody(trio[:2], "publish", 3, (0, 1, 2))

    trio[0].keeper.note_alive((0, 1))
    (outcome,) = trio[0].keeper.finish()

    assert outcome.error is None
    assert len(verify(tmp_path, 4).files) == 3


def test_survivors_begin_a_checkpoint_again_that_the_dead_had_a_part_in(trio, tmp_path):
    everybody(trio, "begin", 4, (0, 1, 2))
    survivors = trio[1:]  # the lead is gone
    assert all(worker.keeper.is_outdated(4, 1) for worker in survivors)

    everybody(survivors, "begin", 4, (1, 2), generation=1)
    assert not any(worker.keeper.is_outdated(4, 1) for worker in survivors)
    everybody(survivors, "publish", 3, (1, 2), generation=1)

    outcome = survivors[0].keeper.finish()[-1]
    assert outcome.error is None
    assert load(tmp_path, 4).info == {"lead": 1}
    assert len(list((tmp_path / "step-00000004").iterdir())) == 2, "the first attempt is gone"


def test_who_caught_up_and_who_was_ahead_write_the_same_checkpoint(trio, tmp_path):
    """The lead began the step before the failure; the one behind applied it after it, in the next generation."""
    trio[0].begin(4, (0, 1, 2))
    trio[0].keeper.note_alive((0, 1))
    trio[1].begin(4, (0, 1), generation=1)
    for worker in trio[:2]:
        if worker.keeper.is_outdated(4, 1):
            worker.begin(4, (0, 1), generation=1)

    everybody(trio[:2], "publish", 3, (0, 1), generation=1)

    outcome = trio[0].keeper.finish()[-1]
    assert outcome.error is None
    assert len(verify(tmp_path, 4).files) == 2


def test_nobody_removes_a_part_of_a_checkpoint_that_the_lead_is_completing(trio, tmp_path):
    """The lead knows that the step is stable and waits for parts; another does not know it, and begins again."""
    trio[0].begin(4, (0, 1, 2))
    trio[1].begin(4, (0, 1, 2))
    trio[0].publish(3, (0, 1, 2))

    trio[1].begin(4, (0, 1), generation=1)  # which forgets the first attempt
    trio[2].begin(4, (0, 1, 2))
    (outcome,) = trio[0].keeper.finish()

    assert outcome.error is None
    verify(tmp_path, 4)


def test_a_part_that_cannot_be_written_is_not_waited_for(trio, tmp_path):
    in_the_way = tmp_path / "step-00000004" / "data-4d-0" / "part-00001.safetensors"
    in_the_way.mkdir(parents=True)
    everybody(trio, "begin", 4, (0, 1, 2))
    everybody(trio, "publish", 3, (0, 1, 2))
    (failed,) = trio[0].keeper.finish()
    (why,) = trio[1].keeper.finish()
    everybody(trio, "begin", 8, (0, 1, 2))
    everybody(trio, "publish", 7, (0, 1, 2))
    (next_one,) = trio[0].keeper.finish()

    assert "part 1 of 3 could not be written; its writer says why" in str(failed.error)
    assert "Is a directory" in str(why.error)
    assert next_one.error is None
    assert steps(tmp_path) == [8]


# -- storages and disks that fail


@pytest.fixture
def single(tmp_path):
    return Worker(0, tmp_path / "c")


def save(worker, step, generation=0):
    worker.begin(step, (0,), generation)
    worker.publish(step - 1, (0,), generation)
    return worker.keeper.finish()


def test_a_storage_that_hangs_is_given_up_and_training_goes_on(single, tmp_path, monkeypatch):
    monkeypatch.setattr(writers, "_LIMIT_S", 0.2)
    hangs = hold(4, "checkpoint.tensors", lambda: True)

    (first,) = save(single, 4)
    single.begin(8, (0,))
    (second,) = single.keeper.poll()
    hangs.set()
    single.keeper._writer._job.done.wait(30)
    (late,) = single.keeper.poll()
    (last,) = save(single, 12)

    for outcome in (first, second):
        assert "was not written to" in str(outcome.error)
        assert "within 0.2 s" in str(outcome.error)
    assert (late.step, late.error) == (4, None), "it came late, and whole: its copy was not written over"
    assert load(tmp_path / "c", 4).state["w"].unique().tolist() == [4.0]
    assert last.error is None
    assert steps(tmp_path / "c") == [4, 12]


def test_a_place_that_cannot_be_written_fails_that_checkpoint_alone(single, tmp_path):
    place = tmp_path / "c"
    place.write_text("in the way")

    (failed,) = save(single, 4)
    place.unlink()
    (saved,) = save(single, 8)

    assert isinstance(failed.error, CheckpointError)
    assert str(place) in str(failed.error)
    assert saved.error is None


def test_what_was_saved_and_cannot_be_pruned_is_still_saved(tmp_path, monkeypatch):
    worker = Worker(0, tmp_path, keep_last=2)
    for step in (1, 2):
        save(worker, step)

    def refuse(step):
        raise CheckpointError(f"cannot remove step {step}")

    monkeypatch.setattr(worker.keeper._checkpoints, "remove", refuse)
    (outcome,) = save(worker, 3)

    assert outcome.saved.step == 3
    assert str(outcome.error) == "cannot remove step 1"


def test_a_state_that_cannot_be_saved_says_so_at_once(single):
    with pytest.raises(CheckpointError, match="the state cannot be saved: thing has type"):
        single.keeper.begin(4, {"thing": object()}, {}, [(0,)], (0,), 0)


# -- which are kept


def test_the_newest_and_every_nth_are_kept(tmp_path):
    worker = Worker(0, tmp_path, keep_last=2, keep_every=4)
    for step in range(1, 11):
        save(worker, step)

    assert steps(tmp_path) == [4, 8, 9, 10]


def test_a_damaged_checkpoint_does_not_push_an_intact_one_out(tmp_path):
    before = Worker(0, tmp_path)
    for step in (10, 20):
        save(before, step)
    (file,) = (tmp_path / "step-00000020").glob("data-*/*")
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    worker, damaged = Worker(0, tmp_path, keep_last=2), []
    worker.keeper.start_over(78, 0)

    assert worker.keeper.newest(lambda step, error: damaged.append(step)) == 10
    save(worker, 15)

    assert damaged == [20]
    assert steps(tmp_path) == [10, 15, 20]
    (again,) = save(worker, 20)
    assert again.error is None
    assert steps(tmp_path) == [15, 20], "saved again, it counts"
    verify(tmp_path, 20)


def test_without_a_name_nothing_of_another_run_is_overwritten(tmp_path):
    def worker():
        made = Worker(0, "")
        made.keeper.start_over(5, made.keeper.choose_fallback())
        return made

    first, second = worker(), None
    save(first, 9)
    second = worker()
    save(second, 3)

    assert first.keeper.url == "holdfast-checkpoint"
    assert second.keeper.url.startswith("holdfast-checkpoint-")
    assert (steps(first.keeper.url), steps(second.keeper.url)) == ([9], [3])


# -- how often


def test_checkpoints_by_the_clock_come_as_often_as_they_pay(tmp_path, monkeypatch):
    """Daly (2006), eq. 37, of the measured cost, and of the failures that were seen."""
    from holdfast.checkpoint.interval import daly

    now = [100.0]
    monkeypatch.setattr(keepers.time, "monotonic", lambda: now[0])
    keeper = CheckpointManager(
        Settings(checkpoint_dir=str(tmp_path), checkpoint_auto=True, mtbf_s=1000.0), background=False
    )
    keeper.adaptive.is_due(now[0])
    keeper.adaptive.cost(2.0)
    before = keeper.interval_s()
    now[0] += 200.0
    for _ in range(3):
        keeper.note_failure()

    assert before == daly(2.0, 1000.0)
    assert keeper.interval_s() == daly(2.0, (1000.0 + 200.0) / (1 + 3)) < before


def test_no_checkpoint_is_asked_for_while_one_is_written(tmp_path):
    worker = Worker(0, tmp_path, checkpoint_auto=True)
    written = hold(1, "checkpoint.tensors", lambda: True)
    assert worker.keeper.is_due_now(), "the first one shows what one costs"

    worker.begin(1, (0,))

    assert not worker.keeper.is_due_now()
    written.set()
    worker.publish(0, (0,))
    worker.keeper.finish()


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_time_between_failures_must_be_positive(value):
    with pytest.raises(ConfigError, match="mtbf_s must be positive"):
        Settings(mtbf_s=value)
