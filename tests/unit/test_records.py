"""The beacon, the pulse of an interpreter, records on a full disk, and the stamps of records."""

import subprocess
import sys

import pytest
from lock_holders import wait_for
from small_disk import fill, small_disk

from holdfast.comm.waiting import WaitContext
from holdfast.errors import InternalError
from holdfast.faults.plan import Fault
from holdfast.records.beacon import PHASES, Beacon, BeaconPosition, Pulse
from holdfast.records.encoding import record_from_dict, record_to_dict
from holdfast.records.files import FileRecorder, read_records
from holdfast.records.logger import Logger
from holdfast.records.types import FailureSeen, StepCommitted

DEADLINE_S = 30.0


def test_a_beacon_says_where_a_worker_is(tmp_path):
    beacon = Beacon(tmp_path / "beacon")
    beacon.mark("forward", 20, 3, [7, 8, 9])

    position = Beacon.read(tmp_path / "beacon")

    assert position == BeaconPosition(
        beats=1, step=20, slice=3, phase="forward", pid=position.pid, samples=(7, 8, 9), pulse=0, applied=0
    )


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_is_told_apart(tmp_path, phase):
    beacon = Beacon(tmp_path / "beacon")
    beacon.mark(phase, -1)

    position = Beacon.read(tmp_path / "beacon")

    assert (position.phase, position.step, position.slice, position.samples) == (phase, -1, -1, ())


def test_who_has_said_nothing_is_nowhere(tmp_path):
    assert Beacon.read(tmp_path / "beacon") is None
    beacon = Beacon(tmp_path / "beacon")
    beacon.pulse()
    assert Beacon.read(tmp_path / "beacon") is None
    (tmp_path / "short").write_bytes(bytes(100))
    assert Beacon.read(tmp_path / "short") is None


@pytest.mark.parametrize("rubbish", [bytes(range(256)), b"\xff" * 64, b"{}\n" * 30], ids=["bytes", "ones", "json"])
def test_where_a_worker_is_in_a_beacon_that_was_overwritten_is_unknown_until_its_next_mark(tmp_path, rubbish):
    beacon = Beacon(tmp_path / "beacon")
    beacon.mark("forward", 3)

    with (tmp_path / "beacon").open("r+b") as file:
        file.write(rubbish)

    assert Beacon.read(tmp_path / "beacon") is None
    beacon.mark("allreduce", 3)
    position = Beacon.read(tmp_path / "beacon")
    assert (position.phase, position.step) == ("allreduce", 3)


def test_every_mark_is_a_beat_and_every_optimizer_a_step_applied(tmp_path):
    beacon = Beacon(tmp_path / "beacon")
    for step in range(3):
        for phase in ("forward", "allreduce", "optimizer"):
            beacon.mark(phase, step)

    position = Beacon.read(tmp_path / "beacon")

    assert (position.beats, position.applied) == (9, 3)


def test_a_second_beacon_of_a_process_takes_the_place_of_the_first(tmp_path):
    first = Beacon(tmp_path / "beacon")
    first.mark("start", -1)
    second = Beacon(tmp_path / "beacon")
    second.mark("forward", 3)
    first.pulse()

    position = Beacon.read(tmp_path / "beacon")

    assert (position.phase, position.step, position.pulse) == ("forward", 3, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["beacon"]


def test_samples_that_do_not_fit_are_left_out(tmp_path):
    beacon = Beacon(tmp_path / "beacon")
    beacon.mark("forward", 0, 0, list(range(Beacon.MAX_SAMPLES + 5)))
    beacon.publish_waits(True)

    position = Beacon.read(tmp_path / "beacon")

    assert position.samples == tuple(range(Beacon.MAX_SAMPLES))
    assert position.waits
    assert not position.busy


def test_a_worker_is_busy_until_the_outermost_of_what_takes_long_is_over(tmp_path):
    beacon = Beacon(tmp_path / "beacon")
    beacon.mark("forward", 0)
    said = []
    for busy in (True, True, False, False):
        beacon.publish_busy(busy=busy)
        said.append(Beacon.read(tmp_path / "beacon").busy)

    assert said == [True, True, True, False]


def test_what_a_worker_takes_to_compute_is_the_median_over_its_last_steps(tmp_path):
    beacon = Beacon(tmp_path / "beacon")
    beacon.mark("forward", 0)
    said = []
    for seconds in [1.0] * 10 + [60.0] + [1.0] * 4 + [2.0] * 8:  # one step held an evaluation; then it is slower
        beacon.publish_computed(seconds)
        said.append(Beacon.read(tmp_path / "beacon").compute_s)

    assert said[:21] == [1.0] * 21
    assert said[-1] == 2.0


def test_waiting_is_said_once_however_deep():
    waiting, said = WaitContext(), []
    with waiting:
        pass
    waiting.on_wait(said.append)
    with waiting, waiting:
        assert said == [True]
    assert said == [True, False]
    with pytest.raises(ValueError, match="lost"), waiting:
        raise ValueError("lost")
    assert said == [True, False, True, False]
    waiting.on_wait(None)
    with waiting:
        pass
    assert len(said) == 4


def test_an_interpreter_that_runs_has_a_pulse(tmp_path):
    beacon = Beacon(tmp_path / "beacon")
    beacon.mark("forward", 0)
    Pulse(beacon, 0.01)

    wait_for(lambda: Beacon.read(tmp_path / "beacon").pulse > 5)


STUCK_FOR_A_WHILE = """
import sys, time
from pathlib import Path
from holdfast.faults.plan import parse
from holdfast.faults.process import strike
from holdfast.records.beacon import Beacon, Pulse
path = Path(sys.argv[1])
beacon = Beacon(path)
beacon.mark("forward", 0)
Pulse(beacon, 0.01)
while Beacon.read(path).pulse < 3:
    time.sleep(0.01)
before = Beacon.read(path).pulse
strike(parse(sys.argv[2]))
print(Beacon.read(path).pulse - before)
while Beacon.read(path).pulse < before + 6:
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("kind", "pulses"),
    [
        ("hang", range(30)),  # some before it is stopped: first it starts who will wake it
        ("gil", range(3)),
        ("deadlock", range(5, 200)),
        ("slow", range(5, 200)),
    ],
)
def test_stopped_or_without_the_lock_there_is_no_pulse_and_afterwards_there_is(tmp_path, kind, pulses):
    spec = Fault(kind, 0, 0, seconds=1.0).to_spec()

    done = subprocess.run(
        [sys.executable, "-c", STUCK_FOR_A_WHILE, str(tmp_path / "beacon"), spec],
        capture_output=True, text=True, timeout=DEADLINE_S, check=True,
    )  # fmt: skip

    assert int(done.stdout) in pulses


@pytest.mark.parametrize(("kind", "exit_code"), [("kill", -9), ("oom", -9), ("segfault", -11), ("leave", -15)])
def test_who_is_ended_ends_as_it_is_said(kind, exit_code):
    strike = f"from holdfast.faults.plan import Fault; from holdfast.faults.process import strike; strike(Fault({kind!r}, 0, 0))"

    done = subprocess.run(
        [sys.executable, "-c", f"print('before'); {strike}; print('after')"],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (exit_code, "before\n")


def test_recoveries_in_vain_are_counted_until_members_change_or_a_step_is_applied(tmp_path):
    beacon = Beacon(tmp_path / "beacon")
    counted = []
    for said in ("same", "same", "others", "same", "same", "recovery", "optimizer", "same"):
        if said in PHASES:
            beacon.mark(said, 4)
        else:
            beacon.publish_recovered(in_vain=said == "same")
            beacon.mark("recovery", 4)
        counted.append(Beacon.read(tmp_path / "beacon").in_vain)

    assert counted == [1, 2, 0, 1, 2, 2, 0, 1]


def committed(step):
    return StepCommitted(t_s=1.0, rank=0, step=step, epoch=0, samples=4, workers=2, metrics={})


def seen(step):
    return FailureSeen(t_s=1.0, rank=0, step=step, phase="allreduce")


def test_a_full_disk_costs_records_of_steps_but_none_of_a_failure(tmp_path, capsys):
    with small_disk(tmp_path / "disk") as disk:
        recorder = FileRecorder(disk / "records.jsonl")
        recorder.write(committed(0))
        filler = fill(disk)

        for step in range(1, 1000):
            recorder.write(committed(step))
        for step in range(50):
            recorder.write(seen(step))
        filler.unlink()
        recorder.write(committed(1000))

        records = list(read_records(disk / "records.jsonl"))
    steps = [record.step for record in records if isinstance(record, StepCommitted)]
    assert steps[0] == 0
    assert steps[-1] == 1000
    assert steps == sorted(steps)
    assert len(steps) < 1000, "the disk was not full"
    assert [record.step for record in records if isinstance(record, FailureSeen)] == list(range(50))
    (warning,) = capsys.readouterr().err.splitlines()
    assert "cannot write records to" in warning
    assert "No space left on device; training continues" in warning


def test_a_line_that_a_full_disk_cut_short_is_skipped_and_the_next_one_is_whole(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        recorder = FileRecorder(disk / "records.jsonl")
        filler = fill(disk)
        for step in range(2000):  # more than is reserved
            recorder.write(seen(step))
        filler.unlink()
        recorder.write(seen(2000))

        text = (disk / "records.jsonl").read_bytes()
        steps = [record.step for record in read_records(disk / "records.jsonl")]
    assert steps == [*range(len(steps) - 1), 2000]
    assert len(text.splitlines()) in (len(steps), len(steps) + 1)


# -- stamps


class Recorded(list):
    """A sink, and a clock that stands still."""

    write = list.append

    def now_s(self):
        return 2.5


def test_a_record_gets_the_stamps_that_it_lacks_and_keeps_those_that_it_has():
    sink = Recorded()
    log = Logger(sink, lambda: (3, 7), sink)

    written = [log.write(FailureSeen(phase="gate")), log.write(FailureSeen(rank=1, step=-1, phase="gate"))]

    assert sink == written
    assert [(record.t_s, record.rank, record.step) for record in sink] == [(2.5, 3, 7), (2.5, 1, -1)]
    assert list(record_to_dict(sink[0])) == ["event", "t_s", "rank", "step", "phase"]


def test_every_sink_gets_every_record_from_its_subscription_on():
    first, second = Recorded(), Recorded()
    log = Logger(first, lambda: (0, 0), first)

    log.write(FailureSeen(phase="forward"))
    log.subscribe(second)
    log.write(FailureSeen(phase="gate"))

    assert [record.phase for record in first] == ["forward", "gate"]
    assert second == first[1:]


def test_a_file_refuses_a_record_without_stamps(tmp_path):
    recorder = FileRecorder(tmp_path / "records.jsonl")

    with pytest.raises(InternalError, match="a FailureSeen is written without t_s, step"):
        recorder.write(FailureSeen(rank=0, phase="gate"))

    assert (tmp_path / "records.jsonl").read_bytes() == b""


@pytest.mark.parametrize("stamp", ["t_s", "rank", "step"])
def test_a_line_without_a_stamp_is_no_record(stamp):
    line = record_to_dict(seen(3))
    del line[stamp]

    with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{stamp}'"):
        record_from_dict(line)
