"""The simulator, against times worked out by hand."""

import subprocess
import sys
from dataclasses import fields, replace

import pytest
from oracle import simulator

from holdfast.errors import ConfigError
from holdfast_lab.simulate import Cluster, Costs, Failures, FailureTrace, Scenario, SimulatedJob, monte_carlo, simulate
from holdfast_lab.simulate.reading import OutageSpan

# A step computes for 6 s and sums for 4 s; two spares keep its pace when somebody dies.
COSTS = Costs(
    slice_s=6,
    sum_s=4,
    detect_s=1,
    regroup_s=2,
    save_s=5,
    load_s=30,
    restart_s=60,
    rebuild_s=20,
    rejoin_s=3,
    spawn_s=1e5,
)
UNDISTURBED_S = 20 * 10 + 5  # no checkpoint follows the last step


def scripted(*outages, costs=COSTS, cluster=None, level="worker", **job):
    cluster = cluster or Cluster(workers=3, spares=2)
    trace = FailureTrace(tuple(OutageSpan(*one) for one in outages), cluster.units(level), 1e6, level, replayed=True)
    job = SimulatedJob(**({"strategy": "rollback", "steps": 20, "save_every": 10, "horizon_s": 1e5} | job))
    return Scenario(cluster, job, costs, trace)


def run(scenario):
    """Return what the oracle says; the simulator must say the same of each history, alone and beside another."""
    history = simulator.simulate(scenario)
    sweep = monte_carlo(scenario, 2)
    for outcome in (simulate(scenario), sweep.history(0), sweep.history(1)):
        assert {one.name: getattr(outcome, one.name) for one in fields(outcome)} == {
            one.name: getattr(history, one.name) for one in fields(outcome)
        }
        assert outcome.total_ns == sum(outcome.parts_ns.values())
    return history


def spent(outcome):
    """Return the parts that took time, but useful work and saving."""
    parts = {part: ns / 1e9 for part, ns in outcome.parts_ns.items() if ns and part not in ("useful", "save")}
    return parts, outcome.total_ns / 1e9


def test_without_failures_there_is_only_work_and_checkpoints():
    outcome = run(scripted())

    assert spent(outcome) == ({}, UNDISTURBED_S)
    assert (outcome.finished, outcome.steps, outcome.decisions) == (True, 20, ())
    assert outcome.goodput == 200 / 205


def test_a_part_that_is_restored_as_it_was_costs_the_steps_until_the_loss_is_where_it_was():
    job = {"strategy": "partial", "model": "split"}
    free, two, default = (
        run(scripted(AT_133, costs=replace(COSTS, stale_iterations=stale), **job, mirror_every=4))
        for stale in (0, 2, None)
    )
    exact = run(scripted(AT_133, strategy="partial", model="mirrored", mirror_every=4))

    assert spent(exact) == spent(free)
    assert two.parts_ns["lost"] - free.parts_ns["lost"] == 2 * 10e9
    assert two.total_ns - free.total_ns == 2 * 10e9 + 5e9  # the steps go on to 22, so one more checkpoint is due at 20
    assert (free.steps, two.steps, two.finished) == (20, 22, True)
    assert default.parts_ns["lost"] - free.parts_ns["lost"] == 10e9  # a quarter of mirror_every


def test_no_more_is_lost_than_there_is_and_an_older_checkpoint_takes_nothing_back_twice():
    job = {"strategy": "partial", "model": "split", "min_workers": 3}
    costs = replace(COSTS, stale_iterations=1000, spawn_s=0)

    outcome = run(scripted((0, 33, 33), (1, 180, 400), (2, 300, 500), (0, 420, 700), costs=costs, **job))

    assert min(outcome.parts_ns.values()) >= 0
    assert outcome.finished


AT_133 = (0, 133, 133)  # step 12 began at 125: worker 0 dies when the bucket is summed and the closing sum is not


@pytest.mark.parametrize(
    ("job", "lost", "decision"),
    [
        ({"strategy": "rollback"}, {"lost": 8, "regroup": 2}, "redo"),
        ({"strategy": "forward"}, {"regroup": 2}, "continue"),
        ({"strategy": "partial"}, {"lost": 8, "regroup": 2}, "redo"),
        ({"strategy": "restart"}, {"lost": 28, "regroup": 2, "load": 30}, "load"),
        ({"strategy": "reinit"}, {"lost": 8, "regroup": 2, "restart": 20, "load": 30}, "reinit"),
        (
            {"strategy": "reinit", "reinit_from": "checkpoint"},
            {"lost": 28, "regroup": 2, "restart": 20, "load": 30},
            "reinit",
        ),
        ({"strategy": "rollback", "model": "split"}, {"lost": 28, "regroup": 2, "load": 30}, "load"),
        ({"strategy": "relaunch"}, {"lost": 28, "restart": 60, "load": 30}, None),
    ],
)
def test_each_strategy_loses_what_it_should(job, lost, decision):
    outcome = run(scripted(AT_133, **job))

    lost = {"detect": 1, **lost}
    assert spent(outcome) == (lost, UNDISTURBED_S + sum(lost.values()))
    assert [made for _, made, _ in outcome.decisions] == ([decision] if decision else [])
    assert (outcome.failures, outcome.lost_workers, outcome.lost_slices) == (1, 1, 0)


def test_forward_goes_on_without_the_dead_ones_gradients():
    outcome = run(scripted((0, 130, 130), strategy="forward"))  # it is missed when the others have computed, at 131

    assert spent(outcome) == ({"detect": 1, "regroup": 2}, UNDISTURBED_S + 3)
    assert outcome.lost_slices == 1


def test_a_checkpoint_that_is_still_written_is_no_help():
    outcome = run(scripted(AT_133, strategy="restart", costs=replace(COSTS, save_background_s=40)))

    assert outcome.parts_ns["lost"] == 128e9
    assert outcome.parts_ns["save"] == 10e9  # the checkpoint is written once more


def test_a_death_in_a_recovery_begins_it_anew():
    outcome = run(scripted(AT_133, (1, 150, 150), strategy="restart"))  # loading since 136

    assert spent(outcome)[0] == {"detect": 2, "regroup": 4, "lost": 28, "load": 14 + 30}
    assert outcome.decisions[0][1:] == (
        "load",
        {"Revoke": 2, "Agree": 6, "Shrink": 2, "ShareProgress": 2, "LoadCheckpoint": 2},
    )


def test_an_application_that_was_built_again_is_not_built_twice():
    outcome = run(scripted(AT_133, (1, 160, 160), strategy="reinit"))  # built until 156, loading since

    assert spent(outcome)[0] == {"detect": 2, "regroup": 4, "lost": 8, "restart": 20, "load": 4 + 30}


def test_what_was_loaded_is_not_loaded_again_when_somebody_dies_while_all_save_to_stop():
    # Four are needed: the second death leaves three, who load until 183 and then save; the third one meets them saving.
    outcome = run(scripted(AT_133, (1, 150, 150), (2, 185, 185), strategy="restart", min_workers=4, horizon_s=400))

    assert (outcome.parts_ns["load"], outcome.decisions[0][1]) == (44e9, "stop")
    assert outcome.decisions[0][2]["LoadCheckpoint"] == 2


def test_nothing_is_lost_to_a_checkpoint_that_nobody_has_begun_to_load():
    outcome = run(scripted(AT_133, strategy="reinit", reinit_from="checkpoint", horizon_s=150))  # built until 156

    assert spent(outcome) == ({"detect": 1, "regroup": 2, "restart": 14}, 150)


def test_nobody_is_let_in_where_somebody_is_dead_whom_nobody_misses_before_time_is_up():
    # Worker 4 comes while all save, until 105; worker 0 dies meanwhile, and would be missed at 111.
    outcome = run(scripted((4, 0, 100), (0, 101, 101), costs=replace(COSTS, spawn_s=0), horizon_s=110))

    assert (spent(outcome), outcome.joins, outcome.failures) == (({}, 110), 0, 1)


def test_deaths_together_are_one_failure():
    cluster = Cluster(workers=3, spares=2, workers_per_node=2, nodes_per_rack=1)

    outcome = run(scripted((0, 133, 133), cluster=cluster, level="rack"))

    assert (outcome.failures, outcome.lost_workers) == (1, 2)
    assert outcome.parts_ns["regroup"] == 2e9


def test_newcomers_are_let_in_between_two_steps():
    outcome = run(scripted(AT_133, costs=replace(COSTS, spawn_s=20)))  # at 153; the next step begins at 156

    assert spent(outcome) == ({"detect": 1, "regroup": 2, "lost": 8, "rejoin": 5}, UNDISTURBED_S + 16)
    assert (outcome.joins, [made for _, made, _ in outcome.decisions]) == (1, ["redo", "grow"])


def test_with_too_few_all_save_and_wait():
    scenario = scripted((0, 133, 233), cluster=Cluster(workers=3), costs=replace(COSTS, spawn_s=0), min_workers=3)

    outcome = run(scenario)

    lost = {"detect": 1, "regroup": 2, "lost": 8, "wait": 233 - 141, "restart": 60, "load": 30}
    assert spent(outcome) == (lost, UNDISTURBED_S + 5 + sum(lost.values()))
    assert (outcome.starts, outcome.decisions[0][1]) == (1, "stop")


def test_when_all_are_dead_the_job_starts_again_from_the_checkpoint():
    cluster = Cluster(workers=3, workers_per_node=3)

    outcome = run(scripted(AT_133, cluster=cluster, level="node", costs=replace(COSTS, spawn_s=0)))

    lost = {"detect": 1, "lost": 28, "restart": 60, "load": 30}
    assert spent(outcome) == (lost, UNDISTURBED_S + sum(lost.values()))


def test_a_step_takes_longer_when_somebody_computes_more():
    outcome = run(scripted((0, 3, 3), cluster=Cluster(workers=3)))  # two slices for one of the two: 16 s

    assert outcome.total_ns == (6 + 1 + 2 + 20 * 16 + 5) * 10**9
    assert run(scripted((0, 3, 3), cluster=Cluster(workers=3), split="even")).total_ns == (9 + 20 * 13 + 5) * 10**9


def test_a_mini_batch_that_shrinks_needs_more_steps():
    outcome = run(scripted((0, 3, 3), cluster=Cluster(workers=3), batch="local", save_every=0))

    assert (outcome.steps, outcome.total_ns) == (30, (9 + 30 * 10) * 10**9)
    assert outcome.ideal_ns == 200e9


def test_who_is_not_there_at_the_beginning_joins_later():
    outcome = run(scripted((0, 0, 12), cluster=Cluster(workers=3), costs=replace(COSTS, spawn_s=0), split="even"))

    assert outcome.joins == 1
    assert spent(outcome) == ({"rejoin": 5}, 13 + 5 + 19 * 10 + 5)


UPDATING = replace(COSTS, update_s=1.2, copy_s=0.3, undo_s=0.9)
"""With three buckets a sum takes 1 s, and an update of a bucket 0.4 s, 0.5 s with its copy."""


@pytest.mark.parametrize(
    ("overlap", "costs", "exposed_s"),
    [
        (False, UPDATING, 1.2),
        (True, UPDATING, 0.5),  # of the last bucket: the others are updated beside sums
        (
            True,
            replace(UPDATING, update_s=6, copy_s=0),
            4,
        ),  # from the first sum on, 2 s each: two of the 6 lie beside sums
    ],
)
def test_an_eager_update_is_waited_for_as_far_as_it_is_not_hidden_beside_sums(overlap, costs, exposed_s):
    scenario = scripted(overlap_optimizer=overlap, costs=costs, buckets=3)

    outcome = run(scenario)

    assert spent(outcome) == ({}, UNDISTURBED_S + 20 * exposed_s)
    assert (outcome.goodput, scenario.full_step_s) == (
        pytest.approx(1 - 5 / (UNDISTURBED_S + 20 * exposed_s)),
        10 + exposed_s,
    )


@pytest.mark.parametrize(
    ("overlap", "strategy", "into_s", "lost", "undone"),
    [
        (True, "rollback", 8.2, 8.2, 2 / 3),  # two of three sums are in
        (True, "rollback", 3, 6, 0),
        (True, "rollback", 9.2, 9.5, 1),  # all wait for the last update, and miss somebody in the closing sum
        (True, "forward", 8.2, 0, 0),
        (True, "forward", 9.2, 0, 0),  # the closing sum is all that is left
        (True, "restart", 8.2, 10.5 * 2 + 8.2, 0),  # a checkpoint goes over it
        (False, "rollback", 8.2, 8.2, 0),
        (False, "rollback", 10.6, 6, 0),  # the step is closed: somebody is missed in the first sum of the next one
        (False, "forward", 10.6, 0, 0),
    ],
)
def test_updates_are_taken_back_where_there_are_any(overlap, strategy, into_s, lost, undone):
    step_s = 10.5 if overlap else 11.2
    at = 12 * step_s + 5 + into_s

    outcome = run(scripted((0, at, at), overlap_optimizer=overlap, strategy=strategy, costs=UPDATING, buckets=3))

    expected = {"detect": 1, "regroup": 2 + 0.9 * undone, "lost": lost, "load": 30 * (strategy == "restart")}
    parts, total_s = spent(outcome)
    assert parts == pytest.approx({part: value for part, value in expected.items() if value})
    # What is gone on with begins anew with the sum that failed, and 0.2 s of that were over.
    again_s = 0.2 if (overlap, strategy, into_s) == (True, "forward", 8.2) else 0
    assert total_s == pytest.approx(20 * step_s + 5 + sum(parts.values()) + again_s)


def test_updates_that_something_was_loaded_over_are_not_taken_back():
    # The second death leaves too few: they load until 213, and save to stop; the third one makes them discard a step that they have not begun.
    deaths = ((0, 139.2, 139.2), (1, 180, 180), (2, 215, 215))

    outcome = run(
        scripted(
            *deaths, overlap_optimizer=True, strategy="reinit", costs=UPDATING, buckets=3, min_workers=4, horizon_s=400
        )
    )

    assert (outcome.parts_ns["regroup"], outcome.decisions[0][2]["DiscardStep"]) == (6e9, 1)


def test_who_dies_after_the_last_closing_sum_is_not_missed():
    at = 20 * 11.2 + 5 - 0.1

    outcome = run(scripted((0, at, at), costs=UPDATING, buckets=3))

    assert spent(outcome) == ({}, 20 * 11.2 + 5)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: SimulatedJob(strategy="hope", steps=1), "strategy must be one of rollback, forward"),
        (
            lambda: SimulatedJob(steps=1, overlap_optimizer=True, model="split"),
            "overlap_optimizer needs a replicated model, got model split",
        ),
        (lambda: SimulatedJob(), "a job needs steps, horizon_s, or both"),
        (lambda: SimulatedJob(steps=0), "steps must be at least 1 and at most 1e\\+11, got 0"),
        (lambda: Costs(load_s=-1), "load_s must be at least 0 and at most 1e"),
        (lambda: Costs(steps_s=((4, 1.0), (2, 1.0))), "with ascending members from 1, got members \\[4, 2\\]"),
        (lambda: Cluster(workers=0), "workers must be at least 1"),
        (
            lambda: Scenario(Cluster(workers=2), SimulatedJob(steps=1), Costs(), Failures()),
            "a step must take some time",
        ),
        (lambda: scripted(min_workers=6), "min_workers must be at least 1 and at most 5, got 6"),
        (lambda: FailureTrace((OutageSpan(3, 0, 1),), 3, 10), "one of 3 units and end after it begins, got unit 3"),
    ],
)
def test_what_cannot_be_is_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        wrong()


def test_only_reading_a_scenario_file_loads_pydantic():
    code = (
        "import importlib, pkgutil, sys, holdfast_lab.simulate as it\n"
        "names = {one.name for one in pkgutil.iter_modules(it.__path__)} - {'schema'}\n"
        "for name in names: importlib.import_module(f'{it.__name__}.{name}')\n"
        "print(len(names) > 20, 'pydantic' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.split() == ["True", "False"]


def test_importing_it_loads_nothing_heavy():
    code = "import sys, holdfast_lab.simulate; print([name for name in ('torch', 'numpy', 'pydantic') if name in sys.modules])"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip() == "[]"
