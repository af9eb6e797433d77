from __future__ import annotations

import contextlib
from dataclasses import replace

from drawn_plans import draw_plan
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.faults.alteration import Alteration
from holdfast.faults.flip import TARGETS, Flip
from holdfast.faults.kinds import DEVICE_PHASES
from holdfast.faults.plan import (
    FLIP,
    KINDS,
    NOBODY,
    OF_DEVICES,
    OF_NODES,
    PHASES,
    SCRIPT_PHASES,
    SPLIT_PHASES,
    STUCK,
    Fault,
    FaultPlan,
    mtbf_schedule,
    parse,
)

_numbers = st.integers(0, 10**6)


_ALTERATIONS = [
    Alteration(),
    Alteration(count=3, bits="critical", keep_sign=True),
    Alteration(percent=0.1 + 0.2, scale=-1e-300),
    Alteration(rate=1e-06, bits="0:22", law="tensors"),
    Alteration(count=10**9, mask="0101", finite=True, probability=1 / 3),
    Alteration(burst=4, bits="30", seed=10**17),
]
_PATTERNS = [(), ("fc1.weight",), ("a/*", "=", "?[b]"), (" ", ":", "\u0663")]


def flips(draw, rank, step):
    target = draw(st.sampled_from(list(TARGETS)))
    flip = Flip(target, draw(st.sampled_from(_ALTERATIONS)), draw(st.sampled_from(_PATTERNS)))
    return Fault(FLIP, rank, step, flip.phase, draw(_numbers) if target == "message" else None, flip=flip)


@st.composite
def faults(draw):
    phase = draw(st.sampled_from(PHASES + SPLIT_PHASES + SCRIPT_PHASES))
    number = draw(st.none() | _numbers) if phase == "handover" else None
    bucket = draw(st.none() | _numbers) if phase == "allreduce" else None
    kind = draw(st.sampled_from([kind for kind in KINDS if phase in DEVICE_PHASES or kind not in OF_DEVICES]))
    if kind == FLIP:
        return flips(draw, draw(_numbers), draw(_numbers))
    some_s = st.floats(0.001, 1e6) | st.integers(1, 10**6)
    lasts = {"slow": some_s} | dict.fromkeys((*STUCK, "partition", "gpu-hang"), st.none() | some_s)
    victim = {"rank": NOBODY, "node": draw(_numbers)} if kind in OF_NODES else {"rank": draw(_numbers)}
    seconds = draw(lasts.get(kind, st.none()))
    return Fault(kind, step=draw(_numbers), phase=phase, bucket=bucket, seconds=seconds, slice=number, **victim)


@st.composite
def plans(draw):
    listed = tuple(draw(st.lists(faults(), max_size=8)))
    fired = draw(st.sets(st.sampled_from(range(len(listed))))) if listed else set()
    return FaultPlan(listed, draw(_numbers), frozenset(fired))


@given(plans())
def test_a_plan_survives_json_and_specs(plan):
    assert FaultPlan.from_json(plan.to_json()) == plan
    assert tuple(map(parse, plan.to_specs())) == plan.faults


@given(
    st.text()
    | st.text("kilrankstepbucketphase=:,0123456789-").map("kill:".__add__)
    | st.text("0123456789.e-+_,").map("slow:rank=1,step=2,seconds=".__add__)
    | st.text("ranknodestepseconds=:,0123456789-").map("partition:".__add__)
    | st.text("ratesclcounfikp-gnbm=:,0123456789.").map("flip:rank=1,step=2,target=weights,".__add__)
)
def test_any_text_is_a_fault_or_is_refused_in_one_line(text):
    try:
        fault = parse(text)
    except ConfigError as refused:
        assert len(str(refused).splitlines()) == 1  # noqa: PT017 - both outcomes are right
    else:
        assert parse(fault.to_spec()) == fault


@given(st.text() | st.text('{}[]":,0123456789seedfaultsfired'))
def test_any_text_is_a_plan_or_is_refused(text):
    with contextlib.suppress(ConfigError):
        FaultPlan.from_json(text)


@given(plans())
def test_each_fault_fires_once_however_it_is_asked_for(plan):
    seen = []
    plan = FaultPlan(tuple(replace(f, rank=7) if f.node is not None else f for f in plan.faults), plan.seed, plan.fired)
    for fault in (*plan.faults, *plan.faults):
        target = fault.flip.target if fault.flip else ""
        within = fault.bucket if fault.slice is None else fault.slice
        while found := plan.due(fault.rank, fault.step, fault.phase, within, target):
            seen.append(found[0])
            plan = plan.without([found[0]])

    assert len(seen) == len(set(seen))
    assert plan.fired == frozenset(range(len(plan.faults)))


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 30), st.integers(1, 5), st.data())
def test_a_random_plan_leaves_somebody_alive_and_is_a_function_of_its_seed(seed, workers, steps, num_buckets, data):
    kills = data.draw(st.integers(0, workers - 1))

    plan = draw_plan(seed, workers, steps, kills, num_buckets)

    assert plan == draw_plan(seed, workers, steps, kills, num_buckets)
    assert len({fault.rank for fault in plan.faults}) == len(plan.faults) == kills < workers
    assert all(fault.step < steps for fault in plan.faults)
    plan.check(range(workers), num_buckets)
    for fault in plan.faults:
        others = [other for other in plan.faults if other.step == fault.step and other.phase != "recovery"]
        assert fault.phase != "recovery" or others, "nobody recovers in a step in which nobody else dies"


@given(st.floats(1e-3, 1e9), st.integers(0, 10**6), st.sets(_numbers, max_size=9))
def test_a_schedule_grows_and_names_each_victim_once(mtbf_s, seed, workers):
    deaths = list(mtbf_schedule(mtbf_s, seed, list(workers)))

    times = [t for t, _ in deaths]
    victims = [rank for _, rank in deaths]
    assert times == sorted(times)
    assert len(set(victims)) == len(victims) == max(0, len(workers) - 1)
    assert workers.issuperset(victims)
