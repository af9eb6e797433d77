"""The simulator under any scenario: it agrees with the oracle to the nanosecond, and nothing is counted twice or forgotten."""

import sys
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import simulator

from holdfast_lab.simulate import (
    PARTS,
    Cluster,
    Constant,
    Costs,
    Exponential,
    Failures,
    FailureTrace,
    LogNormal,
    Scenario,
    SimulatedJob,
    Source,
    Weibull,
    compiled,
    monte_carlo,
    simulate,
)
from holdfast_lab.simulate.job import MODELS, STRATEGIES
from holdfast_lab.simulate.outcome import COUNTS
from holdfast_lab.simulate.reading import OutageSpan


def some(*values):
    return st.sampled_from(values)


clusters = st.builds(
    Cluster,
    workers=some(1, 2, 3, 5, 16),
    spares=some(0, 0, 1, 3),
    workers_per_node=some(1, 2, 4),
    nodes_per_rack=some(2, 3),
)
costs = st.builds(
    Costs,
    slice_s=some(0, 1, 3.3),
    straggle=some(0, 0.1),
    sum_s=some(0.5, 2),
    sum_hop_s=some(0, 0.1),
    update_s=some(0, 0.3, 4),
    copy_s=some(0, 0.2),
    undo_s=some(0, 0.7),
    detect_s=some(0, 0.2, 5),
    regroup_s=some(0, 1),
    regroup_hop_s=some(0, 0.3),
    save_s=some(0, 3),
    save_background_s=some(0, 30, 500),
    load_s=some(0, 20),
    restart_s=some(0, 60),
    rebuild_s=some(0, 15),
    rehome_s=some(0, 4),
    spawn_s=some(0, 70, 1000),
    rejoin_s=some(0, 3),
    stale_iterations=some(None, 0, 0.4, 30),
)
jobs = st.builds(
    SimulatedJob,
    strategy=some(*STRATEGIES),
    steps=some(None, None, 200, 2000),
    horizon_s=some(3e3, 2e4),
    save_every=some(0, 1, 7, 50, 10**9),
    slices=some(None, 5, 64),
    split=some("slices", "even"),
    batch=some("global", "local"),
    buckets=some(1, 2, 5),
    model=some(*MODELS),
    reinit_from=some("snapshot", "checkpoint"),
    mirror_every=some(2, 16),
)
sources = st.builds(
    Source,
    level=some("worker", "node", "rack"),
    lifetime=some(Exponential(300.0), Exponential(3000.0), Weibull(2000.0, 0.7), LogNormal(2000.0, 1.0)),
    repair=some(Constant(0.0), Exponential(100.0), LogNormal(2000.0, 1.5)),
    age_s=some(0.0, 500.0),
)


@st.composite
def spells(draw):
    """Whole seconds, so that much happens at the same moment."""
    start = draw(st.integers(0, 500))
    return OutageSpan(draw(st.integers(0, 3)), start, start + draw(st.integers(0, 200)))


traces = st.builds(
    FailureTrace,
    st.lists(spells(), max_size=12).map(tuple),
    st.just(4),
    st.just(1000.0),
    some("worker", "node"),
    st.booleans(),
)


@st.composite
def scenarios(draw):
    cluster, job = draw(clusters), draw(jobs)
    least = draw(st.integers(1, cluster.total))
    start = draw(st.none() | st.integers(least, cluster.total))
    overlap = job.model == "replicated" and draw(st.booleans())
    failures = draw(st.lists(sources, max_size=2).map(lambda many: Failures(tuple(many))) | traces)
    return Scenario(
        cluster, replace(job, min_workers=least, start_workers=start, overlap_optimizer=overlap), draw(costs), failures
    )


def agree(scenario, seed, repetitions=2):
    """Compare many histories at once with the oracle's, one after the other; return the latter."""
    histories = [simulator.simulate(scenario, seed=seed, repetition=r) for r in range(repetitions)]
    sweep = monte_carlo(scenario, repetitions, seed=seed)
    for part in PARTS:
        assert sweep.parts_ns[part].tolist() == [o.parts_ns[part] for o in histories], part
    for name in ("total_ns", "ideal_ns", "finished", *COUNTS):
        assert getattr(sweep, name).tolist() == [getattr(o, name) for o in histories], name
    assert all(
        abs(a / b - 1) < 1e-9 for a, b in zip(sweep.member_ns, (o.member_ns for o in histories), strict=True) if b
    )
    return histories


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenario=scenarios(), seed=st.integers(0, 2**31))
def test_it_agrees_with_the_oracle_and_the_parts_are_the_whole(scenario, seed):
    for outcome in agree(scenario, seed):
        assert sum(outcome.parts_ns.values()) == outcome.total_ns > 0
        assert min(outcome.parts_ns.values()) >= 0  # time never goes back
        assert outcome.total_ns <= scenario.horizon_s * 1e9
        if scenario.job.strategy == "forward" and scenario.job.model == "replicated" and not outcome.starts:
            assert outcome.parts_ns["load"] == 0


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenario=scenarios(), seed=st.integers(0, 2**31), repetition=st.integers(0, 1))
def test_one_history_is_that_repetition_of_a_sweep(scenario, seed, repetition):
    assert simulate(scenario, seed=seed, repetition=repetition) == monte_carlo(scenario, 2, seed=seed).history(
        repetition
    )


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenario=scenarios(), seed=st.integers(0, 2**31))
def test_without_faults_nothing_is_lost(scenario, seed):
    outcome = simulate(replace(scenario, failures=Failures()), seed=seed)

    assert {part for part, ns in outcome.parts_ns.items() if ns} <= {"useful", "save"}
    assert (outcome.failures, outcome.joins, outcome.starts, outcome.lost_workers) == (0, 0, 0, 0)


@pytest.fixture(scope="module")
def no_plain_histories():
    """Compile from the first history on."""
    pytest.importorskip("numba")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(compiled, "PLAIN_OUTAGES", 0)
        yield


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenario=scenarios(), seed=st.integers(0, 2**31))
def test_compiled_it_agrees_with_the_oracle_too(no_plain_histories, scenario, seed):
    agree(scenario, seed)


def test_without_numba_it_says_so_once_and_gives_the_same(monkeypatch):
    scenario = Scenario(
        Cluster(workers=8),
        SimulatedJob(horizon_s=1e4, save_every=7),
        Costs(slice_s=1, sum_s=1),
        Failures((Source("worker", Exponential(3000.0), Constant(100.0)),)),
    )
    expected = monte_carlo(scenario, 3)
    monkeypatch.setattr(compiled, "PLAIN_OUTAGES", 0)
    monkeypatch.setitem(sys.modules, "numba", None)
    compiled.compiled.cache_clear()

    with pytest.warns(RuntimeWarning, match=r"as plain Python, about 40 times slower .* pip install") as warned:
        found = monte_carlo(scenario, 3)

    compiled.compiled.cache_clear()
    assert len(warned) == 1
    assert found.ideal_ns.tolist() == expected.ideal_ns.tolist()
    assert found.failures.sum() > 0


def test_with_the_compiler_of_numba_switched_off_it_gives_the_same(monkeypatch):
    numba = pytest.importorskip("numba")
    scenario = Scenario(
        Cluster(workers=8),
        SimulatedJob(horizon_s=1e4, save_every=7),
        Costs(slice_s=1, sum_s=1),
        Failures((Source("worker", Exponential(3000.0), Constant(100.0)),)),
    )
    expected = monte_carlo(scenario, 3)
    monkeypatch.setattr(compiled, "PLAIN_OUTAGES", 0)
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    compiled.compiled.cache_clear()

    found = monte_carlo(scenario, 3)

    compiled.compiled.cache_clear()
    assert found.ideal_ns.tolist() == expected.ideal_ns.tolist()
