"""Who is taken to be stuck, and who is not. Time is made up; a look is taken every tenth of the timeout."""

import pytest

from holdfast.launch.health.hangs import HangDetector
from holdfast.records.beacon import BeaconPosition

TIMEOUT_S = 10.0
QUIET = {"waits": False, "busy": False}


def at(phase, step=5, **more):
    return BeaconPosition(step=step, slice=0, phase=phase, pid=1, samples=(), **more)


class Job:
    """Workers whose places a test sets, seen by a launcher once a second; their pulses beat unless it says no."""

    def __init__(self, workers=3, timeout_s=TIMEOUT_S):
        self.hangs = HangDetector(timeout_s)
        self.now_s = 100.0
        self.pulse = 1
        self.stopped = {}
        self.places = {rank: {"phase": "forward", "step": 0, "beats": 1, "applied": 0} for rank in range(workers)}
        self.given_up = {}
        self.told = {}

    def put(self, rank, phase, step=5, **more):
        """Move a worker: it has said where it is."""
        known = self.places.get(rank, {"beats": 0, "applied": 0})
        self.places[rank] = known | {"phase": phase, "step": step, "beats": known["beats"] + 1} | QUIET | more

    def stop(self, rank):
        self.stopped[rank] = self.pulse

    def position(self, rank):
        return at(**self.places[rank] | {"pulse": self.stopped.get(rank, self.pulse)})

    def look(self):
        positions = {rank: self.position(rank) for rank in self.places}
        for stuck in self.hangs.poll(positions, self.now_s, **self.told):
            assert stuck.rank not in self.given_up, "each is named once"
            self.given_up[stuck.rank] = stuck
        self.pulse += 1

    def pass_time(self, seconds, every_s=1.0):
        for _ in range(round(seconds / every_s)):
            self.now_s += every_s
            self.look()

    def found_after(self, quiet_s, more_s):
        """Let time pass in which nobody is given up, and some more; return who is then."""
        self.pass_time(quiet_s)
        assert self.given_up == {}
        self.pass_time(more_s)
        return list(self.given_up)

    def keep_waiting(self, stuck, phase, step=5, **more):
        """Let all others wait for one in the all-reduce of a step."""
        for rank in self.places:
            self.put(rank, "allreduce", step, waits=True)
        self.put(stuck, phase, step, **more)

    def train(self, steps=3, step_s=1.0):
        """Let everybody compute and wait through some steps, so that nobody is new."""
        for step in range(steps):
            for rank in self.places:
                self.put(rank, "forward", step)
            self.pass_time(step_s)
            for rank in self.places:
                self.put(rank, "allreduce", step, waits=True)
            self.pass_time(1)
            for rank in self.places:
                self.put(rank, "optimizer", step, applied=step + 1)
        return self


@pytest.mark.parametrize("phase", ["forward", "allreduce", "checkpoint", "gate", "script"])
def test_a_worker_without_a_pulse_is_given_up_wherever_it_is(phase):
    job = Job().train()
    for rank in range(3):
        job.put(rank, phase)
    job.look()
    job.stop(1)

    assert job.found_after(TIMEOUT_S, 3) == [1]
    assert job.given_up[1].silent_s > TIMEOUT_S
    assert "stopped" in job.given_up[1].reason


def test_all_workers_without_a_pulse_are_given_up_together():
    job = Job().train()
    for rank in range(3):
        job.stop(rank)

    job.pass_time(TIMEOUT_S + 3)

    assert sorted(job.given_up) == [0, 1, 2]


@pytest.mark.parametrize(("phase", "times"), [("start", 10), ("exit", 10), ("forward", 3)])
def test_a_new_worker_may_be_without_a_pulse_for_longer(phase, times):
    job = Job()
    job.put(1, phase, 0)
    job.look()
    job.stop(1)

    assert job.found_after(times * TIMEOUT_S, 3) == [1]


def test_the_silence_of_a_new_worker_sets_no_limit_for_later():
    job = Job()
    job.look()
    job.stop(1)
    job.pass_time(2 * TIMEOUT_S)
    del job.stopped[1]
    job.train()
    job.stop(1)

    job.pass_time(TIMEOUT_S + 3)

    assert list(job.given_up) == [1]


def test_a_worker_that_was_never_seen_to_pulse_is_not_missed():
    job = Job().train()
    job.stopped[1] = 0

    job.pass_time(10 * TIMEOUT_S)

    assert job.given_up == {}


def test_a_silence_that_ended_by_itself_allows_for_three_such():
    job = Job().train()
    job.stop(1)
    job.pass_time(8)
    del job.stopped[1]
    job.pass_time(2)
    job.stop(1)

    assert job.found_after(24, 4) == [1]


@pytest.mark.parametrize("phase", ["forward", "backward", "allreduce", "optimizer"])
def test_who_stands_still_in_a_step_while_another_waits_is_given_up(phase):
    job = Job().train()
    job.keep_waiting(1, phase)

    assert job.found_after(TIMEOUT_S, 2) == [1]
    assert f"in {phase} of step 5" in job.given_up[1].reason
    assert "busy" in job.given_up[1].reason


def test_two_that_stand_still_at_the_same_time_are_both_given_up():
    job = Job(workers=4).train()
    job.put(0, "allreduce", waits=True)
    job.put(3, "allreduce", waits=True)
    job.put(1, "forward")
    job.put(2, "backward")

    job.pass_time(TIMEOUT_S + 3)

    assert sorted(job.given_up) == [1, 2]


def test_a_slow_worker_that_moves_hides_no_stuck_one_and_is_spared():
    job = Job().train()
    job.put(0, "allreduce", waits=True)
    job.put(1, "forward")
    for _ in range(8):
        job.put(2, "forward")  # the next slice
        job.pass_time(2)

    assert list(job.given_up) == [1]


WAITS, PATIENT = {"waits": True}, {"waits": True, "in_collective": True, "is_patient": True}
SPARED = {
    "where nobody waits: all evaluate in the middle of the loop": [("backward", {})] * 3,
    "where all wait: it is for --stall-timeout": [("allreduce", WAITS)] * 3,
    "for a newcomer that waits to be let in": [("backward", {})] * 3 + [("start", WAITS | {"step": -1})],
    "for newcomers that wait to be admitted": [("start", WAITS), ("forward", {}), ("start", WAITS)],
    "for newcomers that wait to be admitted to a script": [("start", WAITS), ("script", {}), ("start", WAITS)],
    "for a group with a timeout longer than PyTorch's": [("script", PATIENT), ("script", PATIENT), ("script", {})],
}


@pytest.mark.parametrize("why", SPARED)
def test_nobody_is_given_up(why):
    job = Job().train()
    for rank, (phase, more) in enumerate(SPARED[why]):
        job.put(rank, phase, **more)

    job.pass_time(100 * TIMEOUT_S)

    assert job.given_up == {}


def test_without_a_timeout_nobody_is_given_up():
    job = Job(timeout_s=0.0).train()
    job.put(0, "allreduce", waits=True)
    job.put(1, "forward")
    job.stop(2)

    job.pass_time(1000)

    assert job.given_up == {}


def test_a_rank_of_torch_distributed_moves_with_each_collective():
    job = Job()
    for _ in range(10):
        job.put(0, "script", waits=True, in_collective=True)
        job.put(1, "script", waits=True, in_collective=True)
        job.put(2, "script")
        job.pass_time(50 * TIMEOUT_S)
    assert job.given_up == {}

    job.pass_time(11 * TIMEOUT_S)

    assert job.given_up.keys() == {2}


def test_waiting_must_have_lasted_too():
    job = Job().train()
    for rank in range(3):
        job.put(rank, "backward")
    job.pass_time(5 * TIMEOUT_S)

    job.put(0, "allreduce", waits=True)  # the first to be done with what takes long
    job.pass_time(TIMEOUT_S - 1)

    assert job.given_up == {}


def test_what_took_long_before_may_take_three_times_as_long():
    job = Job().train(step_s=20.0)
    job.keep_waiting(1, "forward", 7)

    assert job.found_after(59, 5) == [1]


def test_waiting_for_others_teaches_nothing():
    job = Job().train()
    job.put(0, "allreduce", 7, waits=True)
    for _ in range(10):
        for rank in (1, 2):
            job.put(rank, "forward", 7)
        job.pass_time(9)
    job.put(0, "forward", 8)
    job.put(1, "allreduce", 8, waits=True)
    job.put(2, "allreduce", 8, waits=True)

    job.pass_time(30)

    assert list(job.given_up) == [0], "the limit is three times 9 s, not three times 90 s"


def test_a_first_step_may_take_ten_times_as_long():
    job = Job()
    job.keep_waiting(1, "forward", 0)

    assert job.found_after(10 * TIMEOUT_S, 2) == [1]


def test_the_first_step_sets_no_limit_for_the_others():
    job = Job()
    job.pass_time(60)  # compiling
    job.train()
    job.keep_waiting(1, "forward", 7)

    job.pass_time(TIMEOUT_S + 2)

    assert list(job.given_up) == [1]


def test_the_first_step_of_a_newcomer_may_take_long_too():
    job = Job().train()
    job.put(3, "start", -1, waits=True)
    job.pass_time(2)
    for rank in range(3):
        job.put(rank, "allreduce", 8, waits=True)
    job.put(3, "forward", 8)

    job.pass_time(9 * TIMEOUT_S)
    assert job.given_up == {}
    job.put(3, "allreduce", 8, waits=True)
    job.train()
    for rank in range(3):
        job.put(rank, "allreduce", 9, waits=True)
    job.put(3, "forward", 9)
    job.pass_time(TIMEOUT_S + 2)

    assert list(job.given_up) == [3]


@pytest.mark.parametrize(
    ("phase", "times"), [("recovery", 10), ("gate", 10), ("checkpoint", 30), ("start", 60), ("script", 60)]
)
def test_what_is_no_step_may_take_much_longer(phase, times):
    job = Job().train()
    for rank in (0, 2):
        job.put(rank, phase, waits=True)
    job.put(1, phase)

    assert job.found_after(times * TIMEOUT_S, 2) == [1]


def test_who_says_that_it_is_busy_is_left_alone_pulse_or_not():
    job = Job().train()
    job.keep_waiting(1, "backward", busy=True)
    job.look()
    job.stop(1)

    job.pass_time(50 * TIMEOUT_S)

    assert job.given_up == {}


def test_what_was_done_while_busy_sets_no_limit():
    job = Job().train()
    job.keep_waiting(1, "backward", busy=True)
    job.look()
    job.stop(1)
    job.pass_time(100)
    del job.stopped[1]
    job.places[1]["busy"] = False

    job.pass_time(TIMEOUT_S + 3)

    assert list(job.given_up) == [1]


def test_a_launcher_that_stood_still_itself_blames_nobody_for_it():
    job = Job().train()
    job.put(0, "allreduce", waits=True)
    job.put(1, "forward")
    job.stop(2)
    job.pass_time(5)

    job.now_s += 1000.0
    job.look()
    job.pass_time(TIMEOUT_S - 1)
    assert job.given_up == {}
    job.pass_time(4)

    assert 2 in job.given_up, "it counts from when it looked again"


def test_whoever_is_kept_waiting_on_another_node_counts_too():
    job = Job(workers=1).train()
    job.put(0, "forward")
    job.pass_time(TIMEOUT_S + 2)
    assert not job.hangs.keep_us_waiting

    (stuck,) = job.hangs.poll({0: job.position(0)}, job.now_s + 1, elsewhere=True)

    assert stuck.rank == 0


@pytest.mark.parametrize("flag", ["load_elsewhere", "elsewhere"])
def test_a_worker_that_loads_is_given_up_for_others_on_another_node(flag):
    there, here = Job(workers=1), Job(workers=1)
    there.put(0, "start", -1, waits=True)
    here.put(0, "start", -1)

    there.pass_time(TIMEOUT_S + 2)
    assert there.hangs.load_too_long, "it tells the other launchers"
    assert not there.hangs.keep_us_waiting, "this would blame workers that train"
    here.pass_time(100 * TIMEOUT_S)
    assert here.given_up == {}
    here.told[flag] = True
    here.pass_time(60 * TIMEOUT_S)
    assert here.given_up == {}
    here.pass_time(3)

    assert list(here.given_up) == [0]


def test_waits_of_other_nodes_do_not_add_up_against_a_newcomer_that_loads():
    job = Job().train()
    job.put(3, "start", -1)
    for is_waiting in (True, False) * 20:
        job.told = {"newcomers": {3}, "elsewhere": is_waiting}
        for rank in range(3):
            job.put(rank, "forward")
        job.pass_time(TIMEOUT_S - 2)
    job.told["elsewhere"] = True
    for rank in range(3):
        job.put(rank, "allreduce", waits=True)

    assert job.found_after(59 * TIMEOUT_S, 2 * TIMEOUT_S) == [3], "one wait as long as its limit does"


@pytest.mark.parametrize("newcomers", [{3, 4}, set()])
def test_a_newcomer_that_waits_makes_no_other_newcomer_that_loads_stuck(newcomers):
    job = Job().train()
    job.told["newcomers"] = newcomers
    job.put(3, "start", -1, waits=True)
    job.put(4, "start", -1)
    for rank in range(3):
        job.put(rank, "forward")

    job.pass_time(70 * TIMEOUT_S)

    assert list(job.given_up) == ([] if newcomers else [4])
    assert job.hangs.load_too_long == (not newcomers)


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("exit", "in exit handlers, after the script, while other workers wait for it. If this is expected"),
        ("gate", "in gate of step 5, while other workers wait for it"),
        ("forward", "in forward of step 5, while other workers wait for it; the longest so far took 1.0 s. If"),
    ],
)
def test_the_reason_says_what_holds_in_the_phase(phase, words):
    job = Job().train()
    for rank in (0, 2):
        job.put(rank, "allreduce", waits=True)
    job.put(1, phase)

    job.pass_time(70 * TIMEOUT_S)

    assert words in job.given_up[1].reason
    assert ("busy" in job.given_up[1].reason) == (phase != "gate")


def test_a_node_says_that_its_workers_are_kept_waiting():
    job = Job().train()
    for rank in range(3):
        job.put(rank, "allreduce", waits=True)

    job.pass_time(TIMEOUT_S)
    assert not job.hangs.keep_us_waiting
    job.pass_time(2)

    assert job.hangs.keep_us_waiting
    assert job.given_up == {}


def test_a_timeout_shorter_than_a_launcher_can_look_still_finds_the_stuck():
    job = Job(timeout_s=0.02).train(step_s=0.05)
    job.put(1, "forward")
    job.stop(1)

    job.pass_time(0.5, every_s=0.05)

    assert 1 in job.given_up


def test_the_one_worker_of_a_job_is_only_given_up_for_want_of_a_pulse():
    job = Job(workers=1).train()
    job.put(0, "forward")
    job.pass_time(50 * TIMEOUT_S)
    assert job.given_up == {}

    job.stop(0)
    job.pass_time(TIMEOUT_S + 3)

    assert list(job.given_up) == [0]


def test_a_start_of_the_job_knows_nothing_of_the_one_before_but_how_long_things_take():
    job = Job().train(step_s=20.0)
    job.stop(1)
    job.pass_time(TIMEOUT_S + 3)
    assert list(job.given_up) == [1]

    job.hangs.begin()
    job.given_up.clear()
    job.stopped.clear()
    job.train()
    job.keep_waiting(1, "forward")
    job.pass_time(50)
    assert job.given_up == {}
    job.stop(1)
    job.pass_time(15)

    assert list(job.given_up) == [1]
