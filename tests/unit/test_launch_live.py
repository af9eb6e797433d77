"""What a person is told while a job runs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from holdfast.launch.run_view import RunStatus
from holdfast.observe.terminal.views import PlainView, _panel
from holdfast.records.types import (
    DeviceLost,
    FaultFired,
    Left,
    Recovered,
    RunStarted,
    SettingChanged,
    StragglerSeen,
    ValuesAltered,
    WorkerEnded,
    WorkerFenced,
)
from holdfast.summary.event_lines import EventFormatter

START = RunStarted(
    t_s=0.0, rank=0, step=0, fabric="gloo", strategy="rollback", seed=0, workers=3, slices=4, order="fold", split="slices",
    batch="global", rescale="survivors", steps_planned=9, samples_planned=9, num_buckets=1, parameters=1,
)  # fmt: skip


def recovered(rank=0, step=5, generation=1, **said):
    usual = {"lost": (), "survivors": (0, 2), "decision": "redo", "redone_steps": 0}
    return Recovered(t_s=1.0, rank=rank, step=step, generation=generation, **(usual | said))


def told(*records):
    story = EventFormatter()
    return [line for record in (START, *records) if (line := story.format(record)) is not None][1:]


def test_survivors_of_a_death_compute_the_step_again():
    assert told(recovered(lost=(1,), redone_steps=1), recovered(rank=2, lost=(1,), redone_steps=1)) == [
        "lost rank 1; step 5 is computed again with ranks 0, 2"
    ]


def test_a_newcomer_says_when_it_came_and_how_long_the_others_were_held():
    grown = {"decision": "grow", "survivors": (0, 2, 3), "joined": (3,), "held_s": 0.048}

    assert told(recovered(step=300, **grown), recovered(rank=2, step=300, **grown)) == [
        "rank 3 joined at step 300; the other workers paused for 48 ms; ranks 0, 2, 3 continue"
    ]


def test_a_newcomer_that_speaks_first_does_not_say_how_long_the_others_were_held():
    grown = {"decision": "grow", "survivors": (0, 2, 3), "joined": (3,)}

    assert told(recovered(rank=3, step=300, **grown), recovered(step=300, **grown, held_s=0.048)) == [
        "rank 3 joined at step 300; the other workers paused for 48 ms; ranks 0, 2, 3 continue"
    ]


def test_newcomers_may_come_in_the_recovery_of_a_death():
    record = recovered(lost=(1,), survivors=(0, 2, 3, 4), joined=(3, 4), redone_steps=1, held_s=0.1)

    assert told(record) == [
        "lost rank 1; ranks 3, 4 joined at step 5; the other workers paused for 100 ms; step 5 is computed again with "
        "ranks 0, 2, 3, 4"
    ]


def test_who_leaves_in_order_is_not_lost():
    assert told(Left(t_s=1.0, rank=1, step=6), recovered(step=6, lost=(1,), survivors=(0,))) == [
        "rank 1 left before step 6, as requested",
        "rank 0 continues",
    ]


def test_who_left_in_order_and_says_so_last_was_not_lost():
    assert told(recovered(step=6, lost=(1,), survivors=(0,)), Left(t_s=1.0, rank=1, step=6)) == [
        "rank 1 has ended; rank 0 continues",
        "rank 1 left before step 6, as requested",
    ]


def test_who_dies_between_two_steps_is_lost():
    kill = FaultFired(t_s=0.5, rank=1, step=5, fault=0, kind="kill", phase="optimizer")

    assert told(kill, recovered(lost=(1,)))[1:] == ["lost rank 1; ranks 0, 2 continue"]


def test_who_is_lost_while_another_leaves_is_lost():
    assert told(Left(t_s=1.0, rank=1, step=6), recovered(step=6, lost=(1, 3), redone_steps=1)) == [
        "rank 1 left before step 6, as requested",
        "lost rank 3; step 6 is computed again with ranks 0, 2",
    ]


def test_before_training_under_torch_distributed_there_is_no_step_to_speak_of():
    assert EventFormatter().format(recovered(lost=(1,), decision="continue")) == "lost rank 1; ranks 0, 2 are left"


def test_forward_goes_on_with_the_step():
    assert told(recovered(lost=(1,), decision="continue")) == ["lost rank 1; step 5 continues with ranks 0, 2"]


def test_a_worker_that_is_fenced_says_why():
    fenced = WorkerFenced(t_s=1.0, rank=1, step=5, silent_s=1.0, reason="no sign of life for 1.0 s")
    hang = FaultFired(t_s=0.5, rank=1, step=5, fault=0, kind="hang", phase="forward")

    assert told(hang, fenced, WorkerEnded(t_s=1.1, rank=1, step=5, exit_code=-9, pid=1)) == [
        "hang of rank 1 at step 5, forward",
        "rank 1 is killed: no sign of life for 1.0 s",
    ]


def test_a_worker_that_lost_its_gpu_says_which_and_why():
    ended = WorkerEnded(t_s=1.1, rank=1, step=5, exit_code=-9, pid=1)
    lost = DeviceLost(t_s=1.0, rank=1, step=5, what="lost", message="CUDA error: unspecified launch failure", gpu="3")
    short = DeviceLost(t_s=1.0, rank=1, step=5, what="memory", message="CUDA out of memory.")

    assert told(lost, ended) == [
        "rank 1 lost its GPU (3): CUDA error: unspecified launch failure",
        "rank 1 died at step 5: killed by SIGKILL",
    ]
    assert told(short)[0] == "rank 1 took over slices, and its device has too little memory: CUDA out of memory."


def test_a_flip_says_what_it_altered_and_excuses_no_death():
    flip = FaultFired(t_s=0.5, rank=1, step=5, fault=0, kind="flip", phase="forward")
    value = {"path": "fc.weight", "index": 7, "bit": 30, "before": 0.0123456789, "after": "0x7f800000"}
    done = ValuesAltered(t_s=0.6, rank=1, step=5, fault=0, target="weights", count=2, values=(value,))

    assert told(flip, done, WorkerEnded(t_s=1.1, rank=1, step=6, exit_code=-11, pid=1)) == [
        "flip of rank 1 at step 5: 2 values of weights altered, fc.weight[7] from 0.0123457 to 0x7f800000",
        "rank 1 died at step 6: killed by SIGSEGV",
    ]


@pytest.mark.parametrize(
    ("policy", "then"),
    [("warn", ""), ("rebalance", "; it gets fewer slices"), ("replace", "; it is replaced")],
)
def test_a_straggler_is_named_with_what_is_done_about_it(policy, then):
    slow = StragglerSeen(t_s=1.0, rank=2, step=40, score=3.14, policy=policy)

    assert told(slow) == [f"rank 2 is slow: it takes 3.1 times as long as the other workers{then}"]


def test_a_change_is_told_once_though_every_worker_says_it():
    said = [SettingChanged(t_s=1.0, rank=rank, step=7, name="lr", value="0.01") for rank in range(3)]

    assert told(*said) == ["from step 7 on, lr is 0.01"]


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("workers", "4", "the job should have 4 workers from step 7 on"),
        ("workers", "1", "the job should have 1 worker from step 7 on"),
        ("speeds", '{"0": 1.0, "1": 0.25}', "from step 7 on, slices are assigned by worker speed"),
    ],
)
def test_a_change_that_is_no_setting_is_told_in_words(name, value, line):
    assert told(SettingChanged(t_s=1.0, rank=0, step=7, name=name, value=value)) == [line]


def test_a_fault_of_a_node_names_the_node():
    fault = FaultFired(t_s=0.5, rank=2, step=5, fault=0, kind="partition", phase="forward", node=1, workers=(2, 3))

    assert told(fault, WorkerEnded(t_s=3.0, rank=3, step=5, exit_code=-9, pid=1)) == [
        "partition of node 1 at step 5, forward"
    ]


# -- what a terminal would obey

EVIL = "\x1b]0;title\x07\x1b[2Jname"


def test_names_of_figures_reach_the_terminal_as_text():
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)

    console.print(_panel(RunStatus(step=1, planned=2, alive={0: 7}, metrics={EVIL: 1.0}), "last"))

    assert "\\x1b]0;title\\x07\\x1b[2Jname 1" in console.file.getvalue()
    assert "\x1b]0;" not in console.file.getvalue()


def test_what_the_launcher_says_is_text_and_what_a_script_prints_keeps_its_colours(capsys):
    view = PlainView()

    view.print_line(f"saved in {EVIL}")
    view.output(0, "\x1b[31mred\x1b[0m")

    said = capsys.readouterr()
    assert said.err == "holdfast: saved in \\x1b]0;title\\x07\\x1b[2Jname\n"
    assert said.out == "[0] \x1b[31mred\x1b[0m\n"
