from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from drawn_plans import draw_plan

from holdfast.errors import ConfigError
from holdfast.faults.alteration import Alteration
from holdfast.faults.flip import TARGETS, Flip
from holdfast.faults.plan import (
    FLIP,
    KINDS,
    NOBODY,
    OF_WORKERS,
    PHASES,
    SCRIPT_PHASES,
    SPLIT_PHASES,
    STUCK,
    Fault,
    FaultPlan,
    mtbf_schedule,
    parse,
)


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("kill:rank=1,step=20", Fault("kill", 1, 20)),
        ("kill:step=20,rank=1", Fault("kill", 1, 20, "forward")),
        ("kill:rank=2,step=3,phase=allreduce", Fault("kill", 2, 3, "allreduce", None)),
        ("kill:rank=2,step=3,bucket=0,phase=allreduce", Fault("kill", 2, 3, "allreduce", 0)),
        ("kill:rank=2,step=3,slice=1,phase=handover", Fault("kill", 2, 3, "handover", slice=1)),
        ("gil:rank=1,step=2,seconds=1.5", Fault("gil", 1, 2, seconds=1.5)),
        ("slow:seconds=2,rank=0,step=9,phase=backward", Fault("slow", 0, 9, "backward", None, 2.0)),
        ("nodeloss:node=1,step=5", Fault("nodeloss", NOBODY, 5, node=1)),
        (
            "partition:seconds=10,step=5,node=0,phase=allreduce,bucket=2",
            Fault("partition", NOBODY, 5, "allreduce", 2, 10.0, 0),
        ),
        ("flip:rank=1,step=20,target=weights", Fault(FLIP, 1, 20, flip=Flip("weights", Alteration()))),
        (
            "flip:step=20,keep-sign,at=fc1,target=gradients,rank=1,count=3,at=*.bias,bits=0:22,seed=7,finite",
            Fault(
                FLIP,
                1,
                20,
                "backward",
                flip=Flip(
                    "gradients",
                    Alteration(count=3, bits="0:22", seed=7, keep_sign=True, finite=True),
                    ("fc1", "*.bias"),
                ),
            ),
        ),
        (
            "flip:rank=1,step=2,target=message,rate=1e-6",
            Fault(FLIP, 1, 2, "allreduce", 0, flip=Flip("message", Alteration(rate=1e-6))),
        ),
        (
            "flip:rank=1,step=2,target=message,bucket=3,percent=5,scale=-4.5",
            Fault(FLIP, 1, 2, "allreduce", 3, flip=Flip("message", Alteration(percent=5.0, scale=-4.5))),
        ),
    ],
)
def test_a_spec_says_what_happens_to_whom_and_when(spec, fault):
    assert parse(spec) == fault


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("", f"the kind before the colon must be one of {', '.join(KINDS)}, got ''"),
        ("kill", "after the kind there must be at least rank and step, as in kill:rank=1,step=20"),
        ("maim:rank=1,step=2", f"the kind before the colon must be one of {', '.join(KINDS)}, got 'maim'"),
        ("kill:rank=1", "step is missing; rank and step are required"),
        (
            "kill:rank=1,step=2,colour=red",
            "unknown key 'colour'; valid keys are rank, step, phase, bucket, slice, seconds",
        ),
        ("kill:rank=,step=2", "rank needs a value, as in rank=1"),
        ("kill:rank=-1,step=2", "rank must be a whole number of at least 0, got '-1'"),
        ("kill:rank=1,step=2.5", "step must be a whole number of at least 0, got '2.5'"),
        ("kill:rank=1,step=\u0663", "step must be a whole number of at least 0, got '\u0663'"),
        ("kill:rank=1,rank=2,step=3", "rank is given twice; give it once"),
        (
            "kill:rank=1,step=2,phase=lunch",
            f"phase must be one of {', '.join(PHASES + SPLIT_PHASES + SCRIPT_PHASES)}, got 'lunch'",
        ),
        ("kill:rank=1,step=2,bucket=1", "bucket is only allowed with phase=allreduce, got phase=forward"),
        ("kill:rank=1,step=2,slice=1", "slice is only allowed with phase=handover, got kill in phase=forward"),
        ("kill:rank=1,step=2,phase=handover,slice=x", "slice must be a whole number of at least 0, got 'x'"),
        (
            "gpu-error:rank=1,step=2,phase=checkpoint",
            "phase must be one of forward, backward, allreduce, optimizer for gpu-error, got checkpoint",
        ),
        ("slow:rank=1,step=2", "slow needs seconds, as in slow:rank=1,step=20,seconds=0.5"),
        (
            "gpu-oom:rank=1,step=2,seconds=1",
            "seconds is only allowed with hang, gil, spin, deadlock, slow, partition, gpu-hang, got gpu-oom",
        ),
        ("nodeloss", "after the kind there must be at least node and step, as in nodeloss:node=1,step=20"),
        ("nodeloss:step=2", "node is missing; node and step are required"),
        ("partition:rank=1,step=2", "rank is not allowed here: this kind strikes a whole node, given by node"),
        ("kill:node=1,step=2", "node is not allowed here: this kind strikes one worker, given by rank"),
        ("hang:rank=1,step=2,seconds=0.0009", "seconds must be a number from 0.001 to 1000000, got 0.0009"),
        ("hang:rank=1,step=2,seconds=nan", "seconds must be a number from 0.001 to 1000000, got 'nan'"),
        ("flip:rank=1,step=2", f"target is missing; it must be one of {', '.join(TARGETS)}"),
        ("flip:rank=1,step=2,target=disk", f"target must be one of {', '.join(TARGETS)}, got 'disk'"),
        (
            "flip:rank=1,step=2,target=weights,bucket=1",
            "bucket is only allowed with target=message, got target=weights",
        ),
        (
            "flip:rank=1,step=2,target=weights,phase=forward",
            "unknown key 'phase'; valid keys are rank, step, bucket, target, at, count, percent, rate, probability, bits, burst, "
            "mask, scale, keep-sign, finite, law, seed",
        ),
        ("flip:rank=1,step=2,target=weights,finite=yes", "finite takes no value, got 'yes'"),
        ("flip:rank=1,step=2,target=weights,keep-sign,keep-sign", "keep-sign is given twice; give it once"),
        ("flip:rank=1,step=2,target=weights,count=1.5", "count must be a whole number of at least 0, got '1.5'"),
        ("flip:rank=1,step=2,target=weights,count=0", "count of flips must be at least 1, got 0"),
        ("flip:rank=1,step=2,target=weights,rate=often", "rate must be a number, got 'often'"),
    ],
)
def test_a_malformed_spec_is_refused_in_one_line_that_begins_with_it(spec, complaint):
    with pytest.raises(ConfigError) as refused:
        parse(spec)

    assert str(refused.value) == f"{spec}: {complaint}"


def test_a_fault_is_due_at_its_place_and_nowhere_else():
    plan = FaultPlan((Fault("kill", 1, 20, "allreduce", 2), Fault("kill", 3, 20, "allreduce")))

    assert plan.due(1, 20, "allreduce", 2) == (0, plan.faults[0])
    assert plan.due(3, 20, "allreduce") == (1, plan.faults[1])
    assert plan.due(1, 20, "allreduce") is None
    assert plan.due(3, 20, "allreduce", 2) is None
    assert plan.due(1, 21, "allreduce", 2) is None
    assert plan.due(1, 20, "backward") is None


def test_numbers_of_faults_stay_when_some_have_fired():
    plan = FaultPlan((Fault("kill", 0, 1), Fault("kill", 1, 1), Fault("kill", 2, 1))).without([1]).without([0])

    assert plan.fired == {0, 1}
    assert plan.due(0, 1, "forward") is None
    assert plan.due(2, 1, "forward") == (2, plan.faults[2])


def test_two_faults_at_one_place_fire_one_after_the_other():
    plan = FaultPlan((Fault("kill", 0, 1), Fault("kill", 0, 1)))

    assert plan.due(0, 1, "forward") == (0, plan.faults[0])
    assert plan.without([0]).due(0, 1, "forward") == (1, plan.faults[1])


@pytest.mark.parametrize(
    ("workers", "allowed"), [(range(4), "one of 0..3"), ((0, 2, 5), "one of 0, 2, 5"), ([1], "one of 1..1")]
)
def test_a_fault_for_nobody_is_refused(workers, allowed):
    plan = FaultPlan((parse("kill:rank=7,step=1"),))

    with pytest.raises(ConfigError) as refused:
        plan.check(workers)

    assert str(refused.value) == f"kill:rank=7,step=1: rank must be {allowed}, got 7"


@pytest.mark.parametrize(
    ("nodes", "complaint"),
    [
        (1, "nodeloss strikes one of several nodes, so it needs --fabric gloo and --nnodes 2 or more"),
        (3, "node must be one of 0..2, got 3"),
    ],
)
def test_a_fault_of_a_node_that_there_is_not_is_refused(nodes, complaint):
    plan = FaultPlan((parse("nodeloss:node=3,step=1"),))

    plan.check(range(2), nodes=4)
    with pytest.raises(ConfigError) as refused:
        plan.check(range(2), nodes=nodes)

    assert str(refused.value) == f"nodeloss:node=3,step=1: {complaint}"


def test_a_fault_of_a_node_is_due_at_its_first_worker_and_only_in_the_plan_of_that_node():
    plan = FaultPlan((parse("kill:rank=4,step=5"), parse("nodeloss:node=2,step=5")))

    assert plan.due(4, 5, "forward") == (0, plan.faults[0])
    assert plan.of_node(1, 4) == plan
    here = plan.without([0]).of_node(2, 4)
    assert here.due(4, 5, "forward") == (1, Fault("nodeloss", 4, 5, node=2))
    assert here.to_specs() == plan.to_specs()
    assert FaultPlan.from_json(here.to_json()) == here


def as_written(spec, law, **schema):
    """A plan of one flip, as JSON of this schema and law."""
    document = json.loads(FaultPlan((parse(spec),)).to_json())
    flip = document["faults"][0]["flip"]
    del flip["schema"]
    flip.update({"law": law}, **schema)
    return json.dumps(document)


def test_the_law_of_a_plan_of_today_is_the_one_it_names():
    plan = FaultPlan((parse("flip:rank=1,step=2,target=weights,law=values"),))

    again = FaultPlan.from_json(plan.to_json())

    assert again == plan
    assert again.faults[0].flip.how.law == "values"
    assert again.to_specs() == ["flip:rank=1,step=2,target=weights,law=values"]


@pytest.mark.parametrize("schema", [0, 1, 3, "2", True, None])
def test_a_flip_of_another_schema_is_refused(schema):
    written = as_written("flip:rank=1,step=2,target=weights", "bits", schema=schema)

    with pytest.raises(ConfigError, match=r"schema of a flip must be 2, got .*; another version of holdfast may"):
        FaultPlan.from_json(written)


def test_a_fault_after_a_bucket_that_there_is_not_is_refused():
    plan = FaultPlan((parse("kill:rank=1,step=1,phase=allreduce,bucket=3"),))

    plan.check(range(2), num_buckets=4)
    with pytest.raises(ConfigError, match=r"bucket must be one of 0\.\.2, got 3"):
        plan.check(range(2), num_buckets=3)


_FAULT = '{"kind": "kill", "rank": 1, "step": 2, "phase": "forward", "bucket": null, "seconds": null}'

_ON_NODE = _FAULT.replace("kill", "nodeloss").replace("}", ', "node": 3}')

_SLOW = '{"kind": "slow", "rank": 1, "step": 2, "phase": "forward", "bucket": null, "seconds": 0.5}'


def test_the_json_of_a_plan_is_what_its_readers_rely_on():
    plan = FaultPlan((parse("kill:rank=1,step=2"),), seed=5).without([0])

    assert plan.to_json() == f'{{"seed": 5, "faults": [{_FAULT}], "fired": [0]}}'
    assert FaultPlan.from_json(plan.to_json()) == plan


def test_a_fault_between_two_slices_says_so_in_json_and_is_due_there_alone():
    plan = FaultPlan((parse("kill:rank=1,step=2,phase=handover,slice=3"),))

    again = FaultPlan.from_json(plan.to_json())
    assert again == plan
    due = [again.due(1, 2, "handover", number) for number in (None, *range(5))]
    assert due == [None, None, None, None, (0, plan.faults[0]), None]


def test_the_json_of_a_flip_says_all_of_it():
    plan = FaultPlan((parse("flip:rank=1,step=2,target=weights,at=fc,count=2"),))

    (fault,) = json.loads(plan.to_json())["faults"]
    where = {"kind": "flip", "rank": 1, "step": 2, "phase": "forward", "bucket": None, "seconds": None}
    how = dataclasses.asdict(Alteration(count=2))
    assert fault == where | {"flip": {"schema": 2, "target": "weights", "at": ["fc"]} | how}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"flip": None}, "flip must be a JSON object"),
        ({"flip": {}}, "flip must have the keys schema, target, at, count,"),
        ({"bucket": 1}, "bucket is only allowed with target=message"),
        ({"phase": "backward"}, "phase must be forward for a flip of weights, got backward"),
        ({"kind": "kill"}, "it must have the keys kind, rank, step, phase, bucket, seconds; wrong or missing: flip"),
        ({"at": "fc"}, "at must be a list"),
        ({"at": ["a,b"]}, "at must be the path of a tensor or a pattern without a comma"),
        ({"at": [1]}, "at must be the path of a tensor or a pattern without a comma"),
        ({"count": True}, "count must be of type int, got True"),
        ({"count": "2"}, "count must be of type int, got '2'"),
        ({"seed": None}, "seed must be of type int, got None"),
        ({"finite": 1}, "finite must be of type bool, got 1"),
        ({"percent": 1}, "give only one of count of flips, percent and rate"),
    ],
)
def test_a_flip_that_is_not_exactly_one_is_refused(change, complaint):
    plan = json.loads(FaultPlan((parse("flip:rank=1,step=2,target=weights,at=fc,count=2"),)).to_json())
    (fault,) = plan["faults"]
    for key, value in change.items():
        place = fault if key in fault else fault["flip"]
        place[key] = value

    with pytest.raises(ConfigError) as refused:
        FaultPlan.from_json(json.dumps(plan))

    assert str(refused.value).startswith(f"fault 0 of the plan: {complaint}")


def test_a_flip_is_due_for_its_target_alone_and_no_other_fault_is():
    plan = FaultPlan((parse("flip:rank=1,step=2,target=optimizer"), parse("kill:rank=1,step=2")))

    assert plan.due(1, 2, "forward") == (1, plan.faults[1])
    assert plan.due(1, 2, "forward", target="optimizer") == (0, plan.faults[0])
    assert plan.due(1, 2, "forward", target="weights") is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "must be one JSON object"),
        ("[]", "must be a JSON object"),
        ("[" * 100_000, "must be one JSON object"),
        ('{"seed": 0, "faults": []}', "wrong or missing: fired"),
        ('{"seed": 0, "faults": [], "fired": [], "more": 1}', "wrong or missing: more"),
        ('{"seed": 0, "seed": 0, "faults": [], "fired": []}', "'seed' of a fault plan is given twice"),
        ('{"seed": "0", "faults": [], "fired": []}', "seed must be a whole number"),
        ('{"seed": 0, "faults": {}, "fired": []}', "faults of a fault plan must be a list"),
        ('{"seed": 0, "faults": [], "fired": [0]}', "fired must hold numbers of the 0 faults"),
        ('{"seed": 0, "faults": [1], "fired": []}', "fault 0 of the plan: it must be a JSON object"),
        (
            '{"seed": 0, "faults": [{"kind": "kill"}], "fired": []}',
            "wrong or missing: bucket, phase, rank, seconds, step",
        ),
        (f'{{"seed": 0, "faults": [{_SLOW.replace("0.5", "NaN")}], "fired": []}}', "seconds must be a number"),
        (f'{{"seed": 0, "faults": [{_SLOW.replace("0.5", "1e400")}], "fired": []}}', "seconds must be a number"),
        (f'{{"seed": 0, "faults": [{_SLOW.replace("0.5", "null")}], "fired": []}}', "slow needs seconds"),
        (f'{{"seed": 0, "faults": [{_FAULT}], "fired": [0.0]}}', "fired must be whole numbers"),
        (f'{{"seed": 0, "faults": [{_FAULT.replace("kill", "nodeloss")}], "fired": []}}', "wrong or missing: node"),
        (f'{{"seed": 0, "faults": [{_ON_NODE.replace("3", "null")}], "fired": []}}', "nodeloss strikes a node"),
        (
            f'{{"seed": 0, "faults": [{_FAULT.replace("2", "2.5")}], "fired": []}}',
            "fault 0 of the plan: step must be a whole number of at least 0, got 2.5",
        ),
        (f'{{"seed": 0, "faults": [], "fired": [{"9" * 5000}]}}', "must be one JSON object"),
    ],
)
def test_a_plan_that_is_not_exactly_one_is_refused(text, complaint):
    with pytest.raises(ConfigError) as refused:
        FaultPlan.from_json(text)

    assert complaint in str(refused.value)


def test_random_plans_reach_every_phase_and_several_deaths_at_once():
    plans = [draw_plan(seed, workers=8, steps=20, kills=4, num_buckets=3) for seed in range(50)]

    phases = {fault.phase for plan in plans for fault in plan.faults}
    at_once = [plan for plan in plans if len({fault.step for fault in plan.faults}) < len(plan.faults)]

    assert phases == {"forward", "backward", "allreduce", "optimizer", "recovery", "checkpoint"}
    assert 10 < len(at_once) < 50


def test_random_plans_draw_every_kind_and_only_what_can_be_asked_for():
    plans = [draw_plan(seed, 8, 20, 4, 3, kinds=OF_WORKERS, newcomers=3) for seed in range(100)]
    faults = [fault for plan in plans for fault in plan.faults]

    assert {fault.kind for fault in faults} == set(OF_WORKERS)
    assert {fault.phase for fault in faults} == set(PHASES)
    assert {fault.rank for fault in faults} == set(range(11))
    assert any(fault.seconds is None for fault in faults if fault.kind in STUCK)
    assert any(fault.seconds is not None for fault in faults if fault.kind in STUCK)
    assert all(FaultPlan.from_json(plan.to_json()) == plan for plan in plans)
    for plan in plans:
        assert len({fault.rank for fault in plan.faults}) == len(plan.faults)
        assert len([fault for fault in plan.faults if fault.rank < 8]) == 4


def test_a_fault_in_rejoin_strikes_the_first_time_from_its_step_on():
    plan = FaultPlan((parse("kill:rank=5,step=10,phase=rejoin"),))

    assert plan.due(5, 9, "rejoin") is None
    assert plan.due(4, 12, "rejoin") is None
    assert plan.due(5, 12, "rejoin") == (0, plan.faults[0])
    assert plan.without([0]).due(5, 12, "rejoin") is None


def test_a_schedule_is_a_function_of_its_seed_and_spares_one():
    deaths = list(mtbf_schedule(10.0, 7, range(5)))

    assert deaths == list(mtbf_schedule(10.0, 7, (4, 3, 2, 1, 0)))
    assert deaths != list(mtbf_schedule(10.0, 8, range(5)))
    assert len({rank for _, rank in deaths}) == 4


def test_the_times_of_a_schedule_have_the_mean_that_was_asked_for():
    times = [t for t, _ in itertools.islice(mtbf_schedule(3.0, 1, range(4001)), 4000)]

    # Mean of 4,000 exponential times: its standard error is 3 / sqrt(4000) = 0.05.
    assert times[-1] / 4000 == pytest.approx(3.0, abs=0.2)


def test_victims_are_chosen_evenly():
    first = [next(mtbf_schedule(1.0, seed, range(4)))[1] for seed in range(400)]

    assert all(70 <= first.count(rank) <= 130 for rank in range(4))


@pytest.mark.parametrize("mtbf_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_schedule_without_a_mean_is_refused_at_once(mtbf_s):
    with pytest.raises(ConfigError, match="mtbf_s must be more than 0"):
        mtbf_schedule(mtbf_s, 0, range(2))


def test_one_worker_alone_is_never_a_victim():
    assert list(mtbf_schedule(1.0, 0, [3])) == []
    assert json.loads(draw_plan(0, 1, 5, 0, 1).to_json())["faults"] == []
