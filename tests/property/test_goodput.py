"""Whatever the records say, in whatever order: each moment has one use, and badput never decreases."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.records.types import (
    CheckpointSaved,
    CorruptionFound,
    FailureSeen,
    FaultFired,
    Finished,
    JobRestarted,
    Recovered,
    Reinitialised,
    RunStarted,
    StepCommitted,
    StragglerSeen,
    WorkerEnded,
    WorkerFenced,
)
from holdfast.summary.goodput import CAUSES, RECOVERY_PARTS, TimeAccount, goodput_of

START = {
    "fabric": "gloo", "strategy": "rollback", "seed": 0, "workers": 3, "slices": 3, "order": "fold", "split": "slices",
    "batch": "global", "rescale": "survivors", "steps_planned": 9, "samples_planned": 36, "num_buckets": 1, "parameters": 9,
}  # fmt: skip
END = {"sha256": "", "state_sha256": "", "planned": 0, "committed": 0, "lost": 0, "repeated": 0}
seconds = st.floats(0, 20)


@st.composite
def recovered(draw):
    decision = draw(st.sampled_from(["redo", "continue", "load", "reinit", "heal", "grow", "stop"]))
    times_s = draw(st.dictionaries(st.sampled_from(["Agree", "Shrink", "LoadCheckpoint", "SendState"]), seconds))
    numbers = {"redone_steps": draw(st.integers(0, 3)), "generation": draw(st.integers(1, 4))}
    return Recovered, {
        "lost": (2,), "survivors": (0, 1), "decision": decision, "held_s": draw(seconds), "times_s": times_s, **numbers
    }  # fmt: skip


fields = st.one_of(
    st.just((RunStarted, START)),
    st.just((StepCommitted, {"epoch": 0, "samples": 4, "workers": 3, "metrics": {}})),
    st.builds(lambda s: (CheckpointSaved, {"path": "", "size_bytes": 0, "seconds": s}), seconds),
    st.builds(
        lambda kind, phase: (FaultFired, {"fault": 0, "kind": kind, "phase": phase}),
        st.sampled_from(["kill", "hang", "slow"]),
        st.sampled_from(["forward", "allreduce"]),
    ),
    st.just((WorkerEnded, {"exit_code": -9, "pid": 1})),
    st.builds(lambda s: (WorkerFenced, {"silent_s": s, "reason": ""}), seconds),
    st.just((FailureSeen, {"phase": "allreduce"})),
    st.just((CorruptionFound, {"what": "range", "where": (), "ranks": (), "policy": "heal"})),
    recovered(),
    st.builds(
        lambda a, b, c: (
            Reinitialised,
            {"generation": 1, "source": "own", "form": "survivors", "snapshot_s": a, "rebuild_s": b, "load_s": c},
        ),
        seconds,
        seconds,
        seconds,
    ),
    st.builds(lambda s, p: (StragglerSeen, {"score": s, "policy": p}), seconds, st.sampled_from(["warn", "rebalance"])),
    st.just((JobRestarted, {"restart": 1, "workers": (0, 1), "reason": ""})),
    st.just((Finished, {"outcome": "done", "metrics": {}, "checkpoint": "", **END})),
)


@st.composite
def streams(draw):
    """Records of any kinds at any times, and when the launcher ended."""
    records = []
    for kind, of_kind in draw(st.lists(fields, max_size=30)):
        stamps = {"t_s": draw(seconds), "rank": draw(st.integers(0, 2)), "step": draw(st.integers(0, 8))}
        records.append(kind(**stamps, **of_kind))
    return records, max([r.t_s for r in records], default=0.0) + draw(seconds)


@given(streams())
def test_useful_work_and_badput_add_up_to_the_wall_time(stream):
    records, wall_s = stream
    spent = goodput_of(records, wall_s)

    assert set(spent.badput_s) == set(CAUSES)
    assert min(spent.useful_s, *spent.badput_s.values()) >= -1e-9
    assert spent.useful_s + sum(spent.badput_s.values()) == pytest.approx(wall_s, rel=1e-3, abs=1e-9)
    assert spent.ratio <= 1 + 1e-9


@given(streams())
def test_while_records_arrive_badput_never_decreases_and_its_parts_are_those_of_the_recoveries(stream):
    records, wall_s = stream
    account, before = TimeAccount(), dict.fromkeys(CAUSES, 0.0)
    for record in sorted(records, key=lambda r: r.t_s):
        account.take(record)
        now = account.now(record.t_s)
        assert all(now.badput_s[cause] >= before[cause] - 1e-9 for cause in CAUSES)
        assert now.useful_s + sum(now.badput_s.values()) <= now.wall_s + 1e-9
        before = dict(now.badput_s)
    end = account.close(wall_s)

    recoveries = [parts for _, parts in account.new_recoveries()]
    for part in RECOVERY_PARTS:
        assert sum(each[part] for each in recoveries) == pytest.approx(end.badput_s[part], abs=1e-9)
