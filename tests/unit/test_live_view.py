"""The state that live displays show: order, duplicates, restarts, spares, slices; and that it stays bounded."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from usual_records import committed, recovered
from view_runs import a_kill, begun, finished, recovery, steps

from holdfast.observe.monitor.checkpoints import MOST_CHECKPOINTS
from holdfast.observe.monitor.lanes import MOST_SPANS, Lanes
from holdfast.observe.monitor.series import Series
from holdfast.observe.monitor.view import LiveState, RunInfo
from holdfast.records.queued import SinkCount
from holdfast.records.types import (
    ActionRequested,
    CheckpointSaved,
    CorruptionFound,
    FailureSeen,
    JobRestarted,
    Left,
    SamplesLost,
    SettingChanged,
    StateHashed,
    StragglerSeen,
    WorkerEnded,
    WorkerFenced,
)
from holdfast.summary.build import build_report


def shown(records, *, started=range(3), spares=(3,), end_s=6.0, **info):
    live = LiveState(RunInfo(id="run", started=started, spares=spares, **info))
    live.take(records)
    if end_s is not None:
        live.finish(0)
        live.close(end_s)
    return live.full(end_s or 100.0)


def kinds(told, rank):
    return [span[2] for lane in told["lanes"] if lane["id"] == rank for span in lane["spans"]]


def states(told):
    return {row["id"]: row["state"] for row in told["workers"]}


def test_a_death_and_the_spare_that_takes_over():
    told = shown(a_kill())

    assert kinds(told, 0) == ["start", "train", "recover", "train", "done"]
    assert kinds(told, 1) == ["start", "train", "lost"]
    assert kinds(told, 3) == ["start", "spare", "train", "done"]
    (worker,) = [row for row in told["workers"] if row["id"] == 1]
    assert (worker["state"], worker["cause"], worker["pid"], worker["step"]) == ("lost", "killed by SIGKILL", 101, 10)
    (row,) = told["recoveries"]
    assert row["lost"] == [{"rank": 1, "cause": "killed by SIGKILL"}]
    assert (row["step"], row["workers_after"], row["decision"]) == (10, 3, "step 10 is computed again")
    assert row["parts"]["detection"] > 0
    assert row["parts"]["agreement"] > 0
    assert told["state"] == {"level": "done", "sentence": "Done after 40 steps in 6.00 s; 1 worker lost."}
    assert (told["progress"]["samples"], told["run"]["ended"]) == (160, True)


@pytest.mark.parametrize("seed", range(5))
def test_workers_may_be_late_by_different_times_and_records_may_arrive_twice(seed):
    records, luck = a_kill(), random.Random(seed)
    late_s = {rank: luck.random() / 2 for rank in range(4)}
    late = sorted(records * 2, key=lambda record: record.t_s + late_s[record.rank])
    told, calm = shown(late), shown(records)

    for section in ("goodput", "recoveries", "state"):
        assert told[section] == calm[section]
    assert told["progress"] | {"steps_per_s": 0} == calm["progress"] | {"steps_per_s": 0}
    assert states(told) == states(calm)
    assert len(told["events"]) == len(calm["events"])


def test_what_happens_now_is_shown_before_it_is_settled():
    records = [*begun(1.0, range(3)), *steps(0, 9, 1.1), *recovery(2.2, 10, (1,), (0, 2))]
    live = LiveState(RunInfo(id="run", started=range(3)))
    live.take(records[:-2])
    assert live.full(2.25)["state"]["sentence"].startswith("Recovering at step 10")

    live.take(records[-2:])
    told = live.full(2.26)

    (row,) = told["recoveries"]
    assert (row["parts"], row["lost"][0]["rank"]) == ({}, 1)
    assert row["duration_s"] == pytest.approx(0.032)
    assert told["state"]["level"] == "busy"

    live.take(steps(10, 11, 2.4))
    assert live.full(4.0)["recoveries"][0]["parts"]["agreement"] > 0
    assert live.full(4.0)["state"] == {"level": "warning", "sentence": "Training: step 12 of 40, 2 of 3 workers."}


def test_changes_have_only_what_changed_and_add_up_to_everything():
    records = a_kill()
    live = LiveState(RunInfo(id="run", started=range(3), spares=(3,)))
    told = live.full(0.0)
    for place in range(0, len(records), 5):
        live.take(records[place : place + 5])
        change = live.changes(told["version"], 3.0)
        for name, value in change.items():
            is_rows = isinstance(value, list) and name != "series"
            old = {row["id"]: row for row in told[name]} if is_rows else {}
            told[name] = list((old | {row["id"]: row for row in value}).values()) if is_rows else value
    assert live.changes(told["version"], 3.0).keys() == {
        "version", "now_s", "state", "progress", "goodput", "workers",
    }  # fmt: skip

    whole = live.full(3.0)
    for name in ("lanes", "recoveries", "events", "nodes", "run"):
        assert told[name] == whole[name], name


def test_slices_are_those_that_the_workers_compute():
    told = shown([*begun(1.0, range(4)), *steps(0, 9, 1.1)], end_s=None)
    assert [row["slices"] for row in told["workers"]] == [[0, 1], [2, 3], [4, 5], []]

    told = shown([*begun(1.0, range(3)), *steps(0, 9, 1.1), *recovery(2.2, 10, (1,), (0, 2))], spares=(), end_s=None)
    assert [row["slices"] for row in told["workers"]] == [[0, 1, 2], [], [3, 4, 5]]


def test_a_newcomer_catches_up_then_trains():
    records = [*begun(1.0, range(3)), *steps(0, 9, 1.1), *recovery(2.2, 10, (1,), (0, 2)), *steps(10, 14, 2.4)]
    records += begun(3.0, [3], step=15)
    told = shown(records, spares=(), end_s=None)
    assert states(told) == {0: "training", 1: "lost", 2: "training", 3: "joining"}

    how = {"survivors": (0, 2, 3), "joined": (3,), "decision": "grow", "generation": 2, "held_s": 0.01}
    records += [recovered(rank, t_s=3.2 + rank / 1000, step=15, **how) for rank in (0, 2, 3)]
    told = shown(records, spares=(), end_s=None)

    assert kinds(told, 3) == ["catch-up", "train"]
    assert [row["joined"] for row in told["workers"]] == [False, False, False, True]
    assert [row["kind"] for row in told["events"]][-1] == "join"
    assert told["recoveries"][-1]["decision"] == "the membership changed"


def test_a_restart_begins_again_with_the_workers_that_are_left():
    records = [*begun(1.0, range(3)), *steps(0, 9, 1.1)]
    records += [WorkerEnded(t_s=2.2, rank=1, step=10, exit_code=-9, pid=101)]
    records += [WorkerFenced(t_s=2.3, rank=2, step=10, silent_s=1.0, reason="no heartbeat")]
    again = JobRestarted(t_s=2.5, rank=-1, step=9, restart=1, workers=(0, 2), reason="workers were lost")
    told = shown([*records, again, again], spares=(), end_s=None)
    assert states(told) == {0: "starting", 1: "lost", 2: "starting"}
    assert told["state"] == {"level": "busy", "sentence": "Restarting the job, restart 1: 0 of 2 workers ready."}
    assert told["progress"]["restarts"] == 1

    records += [again, *begun(4.0, (0, 2), step=5, workers=2), *steps(5, 39, 4.1), *finished(8.0, (0, 2))]
    told = shown(records, spares=(), end_s=9.0)

    report = build_report(records, started=range(3), wall_s=9.0, seed=0)
    assert told["progress"]["steps_redone"] == report["steps_redone"] == 6
    assert {name: told["goodput"][name] for name in report["goodput"]} == report["goodput"]
    (row,) = told["recoveries"]
    assert (row["decision"], row["workers_after"]) == ("the job is restarted", 2)
    assert row["parts"]["restart"] == pytest.approx(told["goodput"]["badput_s"]["restart"])
    assert kinds(told, 0) == ["start", "train", "start", "train", "done"]


def test_a_newcomer_that_starts_is_shown_before_it_says_anything():
    live = LiveState(RunInfo(id="run", started=range(2), node_of=lambda rank: 0 if rank < 2 else -1))
    live.take([*begun(1.0, range(2)), *steps(0, 9, 1.1)])
    live.note_newcomers([2])
    assert (live.unplaced(), live.without_pid()) == ([2], [0, 1, 2])
    live.note_node(2, 1)
    live.note_processes({2: 77})
    told = live.full(3.0)

    assert told["workers"][2] | {"since_s": 0} == {
        "id": 2, "node": 1, "pid": 77, "state": "joining", "step": None, "slices": [], "since_s": 0, "joined": False,
        "cause": "",
    }  # fmt: skip
    assert [(row["id"], row["alive"]) for row in told["nodes"]] == [(0, 2), (1, 1)]


def test_a_launcher_that_came_back_sees_the_workers_that_go_on():
    how = {"survivors": (0, 1, 2, 3), "joined": (2, 3), "decision": "grow", "generation": 2, "held_s": 0.1}
    said = [recovered(r, t_s=52.0 + r / 1000, step=510, **how) for r in range(4)]
    records = [*steps(500, 509, 50.0), *begun(51.5, (2, 3), step=510), *said]
    told = shown(records, started=range(4), spares=(), end_s=None)

    assert set(states(told).values()) == {"training"}
    assert told["state"]["sentence"] == "Training: step 510 of 40, 4 workers."


def test_a_worker_that_left_is_not_lost():
    left = [Left(t_s=2.15, rank=2, step=10), *recovery(2.2, 10, (2,), (0, 1), decision="grow", redone=0)]
    told = shown([*begun(1.0, range(3)), *steps(0, 9, 1.1), *left], spares=(), end_s=None)

    assert states(told)[2] == "left"
    assert told["progress"]["steps_redone"] == 0


def test_other_events_have_a_line_and_a_mark():
    records = [
        *begun(1.0, range(3)), *steps(0, 9, 1.1),
        StragglerSeen(t_s=2.11, rank=1, step=9, score=2.5, policy="warn"),
        CorruptionFound(t_s=2.12, rank=0, step=9, what="replicas", where=("fc.weight",), ranks=(2,), policy="heal"),
        SettingChanged(t_s=2.13, rank=0, step=10, name="lr", value="0.1"),
        SettingChanged(t_s=2.14, rank=1, step=10, name="lr", value="0.1"),
        ActionRequested(t_s=2.15, rank=-1, step=-1, action="kill", values='{"rank": 1}'),
        SamplesLost(t_s=2.16, rank=0, step=9, epoch=0, ids=(1, 2), buckets=(0,)),
        CheckpointSaved(t_s=2.17, rank=0, step=10, path="ck/10", size_bytes=100, seconds=0.01),
    ]  # fmt: skip
    told = shown(records, spares=(), end_s=None, guard="heal")

    assert [row["kind"] for row in told["events"]] == [
        "info", "info", "corruption", "change", "change", "info", "checkpoint",
    ]  # fmt: skip
    assert told["events"][-3]["text"] == "requested through the dashboard: kill rank 1"
    marks = {lane["id"]: [mark[1] for mark in lane["marks"]] for lane in told["lanes"]}
    assert (marks[1], marks[2]) == (["straggler"], ["corruption"])
    assert told["integrity"]["findings"][0]["text"].startswith("guard, step 9: replicas differ of rank 2 (fc.weight)")
    assert told["integrity"]["certificate"] == "The hash chain covers steps 0 to 9; its last link is link9."
    assert told["progress"]["samples_lost"] == 2
    assert told["checkpoints"][0]["size_bytes"] == 100


def hashed(step, *links):
    return [StateHashed(t_s=3.0 + step, rank=rank, step=step, link=link) for rank, link in enumerate(links)]


def saved(step):
    return CheckpointSaved(t_s=2.0 + step, rank=0, step=step, path="ck", size_bytes=1, seconds=0.0)


@pytest.mark.parametrize(
    ("records", "verified"),
    [
        ([saved(5), *hashed(4, "a", "a")], [None]),  # it may be wrong since
        ([saved(5), *hashed(5, "a")], [None]),
        ([saved(5), *hashed(5, "", "")], [None]),
        ([saved(5), *hashed(5, "a", "a")], [True]),
        ([saved(5), saved(9), *hashed(8, "a", "a")], [True, None]),
        ([*hashed(8, "a", "a"), saved(5)], [True]),
        ([saved(3), *hashed(4, "a", "a"), saved(5), *hashed(8, "b", "c"), saved(9)], [True, False, None]),
        ([saved(3), *hashed(4, "a", "a"), saved(5), *hashed(8, "b", "b", "c")], [True, False]),
        ([saved(5), *hashed(8, "a"), JobRestarted(t_s=12.0, rank=-1, step=8, restart=1, workers=(0, 1), reason=""),
          *hashed(8, "b", "b")], [True]),
    ],
)  # fmt: skip
def test_a_checkpoint_is_verified_once_the_chains_of_two_workers_agree(records, verified):
    told = shown(records, spares=(), end_s=None)

    assert [row["verified"] for row in told["checkpoints"]] == verified


def test_the_links_of_a_single_worker_stay_bounded_and_those_of_a_late_node_still_count():
    live = LiveState(RunInfo(id="run", started=range(2)))
    live.take([saved(990), *(hashed(step, "a")[0] for step in range(1000))])
    assert len(live._checkpoints._links) <= 256
    live.take([hashed(990, "a", "a")[1]])
    assert live.full(2000.0)["checkpoints"][0]["verified"] is True


def test_the_state_stays_bounded_over_many_steps_and_recoveries():
    live = LiveState(RunInfo(id="run", started=range(2), node_of=lambda rank: rank))
    live.take(begun(0.5, range(2), workers=2))
    for number in range(600):
        begin_s = 1.0 + 3 * number
        live.take(steps(10 * number, 10 * number + 9, begin_s))
        how = {"survivors": (0, 1), "redone_steps": 1, "generation": number + 1}
        for rank in range(2):
            at_s, step = begin_s + 1.5 + rank / 100, 10 * number + 10
            seen = FailureSeen(t_s=at_s, rank=rank, step=step, phase="backward")
            live.take([seen, recovered(rank, t_s=at_s + 0.1, step=step, **how)])
        live.take([CheckpointSaved(t_s=begin_s + 2, rank=0, step=number, path="ck", size_bytes=1, seconds=0.0)])
    told = live.full(2000.0)

    assert all(len(series["points"]) <= 600 for series in told["series"])
    assert all(len(lane["spans"]) <= MOST_SPANS for lane in told["lanes"])
    assert (len(told["events"]), len(told["recoveries"]), len(told["checkpoints"])) == (300, 200, MOST_CHECKPOINTS)
    assert len(live._account._unsettled) < 50
    assert kinds(told, 0)[:2] == ["start", "train"]
    assert told["recoveries"][-2]["parts"] != {}


def test_workers_that_were_lost_long_ago_are_dropped():
    live = LiveState(RunInfo(id="run", started=range(3)))
    live.take(begun(0.5, range(3)))
    version = live.version
    for number in range(700):
        t_s, alive = 2.0 + number, (0, 1, 3 + number)
        live.take([WorkerEnded(t_s=t_s, rank=2 + number, step=number, exit_code=-9, pid=1)])
        how = {"lost": (2 + number,), "survivors": alive, "joined": (3 + number,), "redone_steps": 1}
        live.take([recovered(t_s=t_s + 0.1, step=number, generation=number + 1, **how)])
    told = live.full(800.0)

    assert len(told["workers"]) in (505, 506)
    assert told["workers"][-1]["state"] == "training"
    gone = live.changes(version, 800.0)["dropped"]
    assert gone == list(range(2, 2 + len(gone)))
    assert len(gone) + len(told["workers"]) == 703


def test_lanes_of_many_workers_are_shorter():
    lanes = Lanes(lambda: 1, lambda rank: 0)
    for rank in range(1000):
        lanes.lane(rank, "starting", 0.0)
    for turn in range(200):
        lanes.enter(5, ("training", "recovering")[turn % 2], 1.0 + turn)

    spans = lanes.by_rank[5].spans
    assert len(spans) in (19, 20)
    assert (spans[0][0], spans[-1][1]) == (0.0, None)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))


@pytest.mark.parametrize("count", [1, 7, 599, 600, 601, 5_000, 70_001])
def test_a_thinned_curve_keeps_its_extremes_and_its_end(count):
    series, luck = Series(), random.Random(count)
    values = [luck.gauss(0, 1) for _ in range(count)]
    for step, value in enumerate(values):
        series.add(step, step / 10, value)
    points = series.points()

    assert len(points) <= 600
    assert len(points) >= min(count, 290)
    assert [point[0] for point in points] == sorted({point[0] for point in points})
    found = [point[2] for point in points]
    assert max(found) == pytest.approx(max(values), rel=1e-5)
    assert min(found) == pytest.approx(min(values), rel=1e-5)
    assert points[-1][0] == count - 1


def test_a_value_that_is_not_finite_is_a_gap():
    series = Series()
    for step, value in enumerate([1.0, float("nan"), float("inf"), 2.0]):
        series.add(step, float(step), value)

    assert [point[2] for point in series.points()] == [1.0, None, None, 2.0]


def test_names_from_scripts_stay_text():
    name = "<img src=x onerror=alert(1)>"
    commit = committed(0, t_s=1.2, metrics={name: 1.0, "rate": 2.0})
    live = LiveState(RunInfo(id="run", script=name, started=range(3)))
    live.take([*begun(1.0, range(3)), commit])
    live.note_sinks([SinkCount(name="metrics", taken=1, dropped=2)])
    told = json.loads(json.dumps(live.full(2.0)))

    assert [series["id"] for series in told["series"]] == [name, "rate (metric)"]
    assert told["run"]["script"] == name
    assert told["sinks"] == [{"id": "metrics", "missed": 2}]
