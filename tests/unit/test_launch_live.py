"""What a person is told while a job runs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from usual_records import DDP, committed, recovered, started

from holdfast.launch.run_view import RunStatus
from holdfast.observe.terminal.views import PlainView, _panel
from holdfast.records.types import (
    DeviceLost,
    FailureSeen,
    FaultFired,
    JobRestarted,
    Left,
    SettingChanged,
    StragglerSeen,
    ValuesAltered,
    WorkerEnded,
    WorkerFenced,
)
from holdfast.summary.event_lines import EventFormatter


def lines_of(*records):
    story = EventFormatter()
    return [line for record in records if (line := story.format(record)) is not None]


def fired(kind, phase="forward", rank=1, **more):
    return FaultFired(t_s=0.5, rank=rank, step=5, fault=0, kind=kind, phase=phase, **more)


def ended(exit_code=-9, rank=1):
    return WorkerEnded(t_s=1.1, rank=rank, step=5, exit_code=exit_code, pid=1)


def changed(name, value, rank=0):
    return SettingChanged(t_s=1.0, rank=rank, step=7, name=name, value=value)


LEFT = Left(t_s=1.0, rank=1, step=6)
LOST = DeviceLost(t_s=1.0, rank=1, step=5, what="lost", message="CUDA error: unspecified launch failure", gpu="3")
SHORT = DeviceLost(t_s=1.0, rank=1, step=5, what="memory", message="CUDA out of memory.")
ALTERED = ValuesAltered(
    t_s=0.6, rank=1, step=5, fault=0, target="weights", count=2,
    values=({"path": "fc.weight", "index": 7, "bit": 30, "before": 0.0123456789, "after": "0x7f800000"},),
)  # fmt: skip
GROWN = {"step": 300, "decision": "grow", "survivors": (0, 2, 3), "joined": (3,)}
CAME = "rank 3 joined at step 300; the other workers paused for 48 ms; ranks 0, 2, 3 continue"
AGAIN = "lost rank 1; step 5 is computed again with ranks 0, 2"

TOLD = {
    "survivors of a death compute the step again": (
        [recovered(lost=(1,), redone_steps=1), recovered(2, lost=(1,), redone_steps=1)], [AGAIN],
    ),
    "a newcomer says when it came and how long the others were held": (
        [recovered(**GROWN, held_s=0.048), recovered(2, **GROWN, held_s=0.048)], [CAME],
    ),
    "a newcomer that speaks first does not say how long the others were held": (
        [recovered(3, **GROWN), recovered(**GROWN, held_s=0.048)], [CAME],
    ),
    "newcomers may come in the recovery of a death": (
        [recovered(lost=(1,), survivors=(0, 2, 3, 4), joined=(3, 4), redone_steps=1, held_s=0.1)],
        ["lost rank 1; ranks 3, 4 joined at step 5; the other workers paused for 100 ms; step 5 is computed again with "
         "ranks 0, 2, 3, 4"],
    ),
    "who leaves in order is not lost": (
        [LEFT, recovered(step=6, lost=(1,), survivors=(0,))],
        ["rank 1 left before step 6, as requested", "rank 0 continues"],
    ),
    "who left in order and says so last was not lost": (
        [recovered(step=6, lost=(1,), survivors=(0,)), LEFT],
        ["rank 1 has ended; rank 0 continues", "rank 1 left before step 6, as requested"],
    ),
    "who dies between two steps is lost": (
        [fired("kill", "optimizer"), recovered(lost=(1,))],
        ["kill of rank 1 at step 5, optimizer", "lost rank 1; ranks 0, 2 continue"],
    ),
    "who is lost while another leaves is lost": (
        [LEFT, recovered(step=6, lost=(1, 3), redone_steps=1)],
        ["rank 1 left before step 6, as requested", "lost rank 3; step 6 is computed again with ranks 0, 2"],
    ),
    "forward goes on with the step": (
        [recovered(lost=(1,), decision="continue")], ["lost rank 1; step 5 continues with ranks 0, 2"],
    ),
    "a death is told, and an injected one as the fault only": (
        [ended(), fired("kill", rank=2), ended(rank=2), FailureSeen(t_s=1.0, rank=0, step=3, phase="allreduce")],
        ["rank 1 died at step 5: killed by SIGKILL", "kill of rank 2 at step 5, forward"],
    ),
    "a worker that is fenced says why": (
        [fired("hang"), WorkerFenced(t_s=1.0, rank=1, step=5, silent_s=1.0, reason="no sign of life for 1.0 s"), ended()],
        ["hang of rank 1 at step 5, forward", "rank 1 is killed: no sign of life for 1.0 s"],
    ),
    "a worker that lost its GPU says which and why": (
        [LOST, ended()],
        ["rank 1 lost its GPU (3): CUDA error: unspecified launch failure", "rank 1 died at step 5: killed by SIGKILL"],
    ),
    "a worker whose device has too little memory says so": (
        [SHORT], ["rank 1 took over slices, and its device has too little memory: CUDA out of memory."],
    ),
    "a flip says what it altered and excuses no death": (
        [fired("flip"), ALTERED, ended(-11)],
        ["flip of rank 1 at step 5: 2 values of weights altered, fc.weight[7] from 0.0123457 to 0x7f800000",
         "rank 1 died at step 5: killed by SIGSEGV"],
    ),
    "a fault of a node names the node": (
        [fired("partition", rank=2, node=1, workers=(2, 3)), ended(rank=3)], ["partition of node 1 at step 5, forward"],
    ),
    "a change is told once though every worker says it": (
        [changed("lr", "0.01", rank) for rank in range(3)], ["from step 7 on, lr is 0.01"],
    ),
    "another number of workers": ([changed("workers", "4")], ["the job should have 4 workers from step 7 on"]),
    "one worker": ([changed("workers", "1")], ["the job should have 1 worker from step 7 on"]),
    "speeds": ([changed("speeds", '{"0": 0.25}')], ["from step 7 on, slices are assigned by worker speed"]),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_a_record_is_told_in_a_line(name):
    records, lines = TOLD[name]

    assert lines_of(started(), *records)[1:] == lines


@pytest.mark.parametrize(
    ("policy", "then"),
    [("warn", ""), ("rebalance", "; it gets fewer slices"), ("replace", "; it is replaced")],
)
def test_a_straggler_is_named_with_what_is_done_about_it(policy, then):
    slow = StragglerSeen(t_s=1.0, rank=2, step=40, score=3.14, policy=policy)

    assert lines_of(slow) == [f"rank 2 is slow: it takes 3.1 times as long as the other workers{then}"]


def test_what_every_survivor_writes_is_told_once_a_start():
    restart = JobRestarted(t_s=2.0, rank=-1, step=3, restart=1, workers=(0, 2), reason="why")

    first, second = (recovered(rank, lost=(1,), redone_steps=1) for rank in (0, 2))

    told = lines_of(first, second, restart, second)

    assert (len(told), told[0], told[2]) == (3, AGAIN, AGAIN)


def test_torch_distributed_is_told_with_its_first_step_and_without_a_plan():
    goes_on = {"lost": (1,), "decision": "continue"}
    ranks = [started(rank, **DDP) for rank in range(3)]

    assert lines_of(*ranks, committed(0), committed(1), recovered(step=2, **goes_on)) == [
        "3 ranks: torch.distributed; all-reduces of DDP continue over the survivors",
        "lost rank 1; step 2 continues with ranks 0, 2",
    ]
    assert lines_of(recovered(step=0, **goes_on), *ranks) == ["lost rank 1; ranks 0, 2 are left"], "there is no step"


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
