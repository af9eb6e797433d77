"""Plans a job: compares strategies, searches the best checkpoint interval, and maps the best strategy by cluster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.checkpoint.interval import daly
from holdfast_lab.simulate.assuming import LLAMA, PlanQuestion, down_share
from holdfast_lab.simulate.cluster import Cluster
from holdfast_lab.simulate.comparing import StrategyResult, flat
from holdfast_lab.simulate.costs import Costs
from holdfast_lab.simulate.distributions import Constant, Exponential, stretched
from holdfast_lab.simulate.failures import Failures, Source
from holdfast_lab.simulate.formulas import exact_interval_s, young
from holdfast_lab.simulate.job import SimulatedJob
from holdfast_lab.simulate.many import monte_carlo
from holdfast_lab.simulate.optimum import Optimum, best_interval
from holdfast_lab.simulate.outcome import Estimate
from holdfast_lab.simulate.scenario import Scenario
from holdfast_lab.simulate.spare_worth import worthwhile_spares
from holdfast_lab.simulate.toml import of_step

REPETITIONS = 100
"""Histories per strategy, by default."""

ENOUGH = 0.005
"""Half a point of goodput; a smaller difference is no reason to choose another strategy."""

_FEWEST, _MOST = 30, 60
"""Approximate bounds of the failures in one history: a history takes as long to simulate as it has failures."""
_LONGEST_S = 1e8
_MAP_REPETITIONS, _MAP_FAILURES = 16, 25
_MAP_STRATEGIES = ("relaunch", "rollback", "forward")
_AROUND = 8
"""Search range of the best interval around the formula's, as a factor."""
_TRIES = 40

_GO_BACK = ("relaunch", "restart")
"""Strategies that restore a checkpoint at every failure; the others do so only when a failure ends the job."""

_OF_SCENARIOS = ("finished", "chosen", "steps_asked", "horizon_s", "stale_source")
"""What the rows of scenarios have, but not those of plans."""

Say = Callable[[str], None]


def plan(
    question: PlanQuestion,
    *,
    repetitions: int = REPETITIONS,
    seed: int = 0,
    with_map: bool = True,
    now: Say = lambda text: None,
) -> dict[str, Any]:
    """Plan a job.

    Args:
        question: The job, and its costs and failures.
        repetitions: Histories per strategy, ``>= 2``.
        seed: Same seed, same plan.
        with_map: Whether to compute the map.
        now: Called with progress messages.

    Returns:
        Plain data: ``question``; ``rows``, one per strategy; ``best``, the recommended one; ``optimum``, the intervals
        tried for it; ``without_spares``, the best strategy without spares, by ``split``, None on one node; ``map``, the best strategy by
        cluster, empty without a map.
    """
    names = ["relaunch", "restart", "reinit", "rollback", "forward"] + ["partial"] * (question.model == "split")
    rows = []
    for name in names:
        now(f"simulating {name}")
        rows.append(_row(question, name, _usual_every(question, name), repetitions, seed))
    best = recommended({row["name"]: row["goodput"] for row in rows})
    place = names.index("rollback" if best in ("any", "none") else best)
    now(f"searching the best interval of {names[place]}")
    optimum = _optimum(question, names[place], seed, now)
    if optimum is not None and not _is_flat(optimum, rows[place]["save_every"]):
        rows[place] = _row(question, names[place], optimum.save_every, repetitions, seed)
    return {
        "question": _plain(question),
        "rows": rows,
        "best": best,
        "shown": names[place],
        "optimum": None if optimum is None else _tried(optimum),
        "without_spares": _without_spares(question, rows[place], repetitions, seed),
        "map": _map(question, seed, now) if with_map else [],
        "llama": LLAMA,
        "seed": seed,
        "repetitions": repetitions,
    }


def _plain(question: PlanQuestion) -> dict[str, Any]:
    plain = {field.name: getattr(question, field.name) for field in dataclasses.fields(question)}
    lifetime = "exponential" if question.lifetime is None else type(question.lifetime).__name__.lower()
    return plain | {
        "nodes": question.nodes,
        "mtbf_s": question.mtbf_s,
        "down_share": question.down_share,
        "lifetime": lifetime,
    }


def recommended(goodput: Mapping[str, float]) -> str:
    """Return the strategy to use, from the goodput of each: ``rollback`` unless another is better by :data:`ENOUGH`.

    Returns:
        A strategy; ``"any"`` if not even ``relaunch`` is worse by that much; ``"none"`` if hardly any work gets done
        with any of them.
    """
    best = max(goodput.values())
    if best < 10 * ENOUGH:
        return "none"
    for name, answer in (("relaunch", "any"), ("rollback", "rollback")):
        if goodput[name] >= best - ENOUGH:
            return answer
    return max(goodput, key=lambda name: goodput[name])


def scenario_of(question: PlanQuestion, strategy: str, save_every: int, horizon_s: float) -> Scenario:
    """Return the scenario of one strategy."""
    total_nodes = -(-(question.workers + question.spares) // question.workers_per_node)
    cluster = Cluster(
        workers=question.workers,
        spares=question.spares,
        workers_per_node=question.workers_per_node,
        nodes_per_rack=total_nodes,  # all nodes are in one rack, so a rack failure ends the job
    )
    job = SimulatedJob(
        strategy=strategy,
        horizon_s=horizon_s,
        save_every=save_every,
        model=question.model,
        split=question.split,
        mirror_every=question.mirror_every,
    )
    names = (
        "detect_s",
        "regroup_s",
        "save_s",
        "save_background_s",
        "load_s",
        "restart_s",
        "rebuild_s",
        "rehome_s",
        "rejoin_s",
        "stale_iterations",
    )
    costs = Costs(**{name: getattr(question, name) for name in names})
    return of_step(cluster, job, costs, _failures(question), question.step_s)


def mtbf_back_s(question: PlanQuestion, strategy: str) -> float:
    """Return the mean time between failures that restore a checkpoint, seconds; infinity if none does."""
    loses_parts = question.model == "split" and strategy != "partial"
    loads = strategy == "reinit" and question.model != "replicated"  # a snapshot of one worker lacks the others' parts
    if strategy in _GO_BACK or loses_parts or loads or question.nodes == 1:
        return question.mtbf_s
    return question.mtbf_s / question.whole_job_share if question.whole_job_share else math.inf


def _failures(question: PlanQuestion) -> Failures:
    share, sources = question.whole_job_share, []
    if share < 1:
        repair = Exponential(question.repair_s) if question.repair_s > 0 else Constant(0.0)
        mean_s = question.mtbf_node_s / (1 - share)
        if question.lifetime is None:
            sources.append(Source("node", Exponential(mean_s), repair))
        else:  # nodes that have been in use for long: the job's failures come at the rate that the answer names
            sources.append(Source("node", stretched(question.lifetime, mean_s), repair, stationary=True))
    if share > 0:
        sources.append(Source("rack", Exponential(question.mtbf_s / share)))
    return Failures(tuple(sources))


def _horizon_s(question: PlanQuestion) -> float:
    """Return the length of a history: the length of the work, adjusted to contain enough failures, but not too many."""
    fewest, most = _FEWEST * question.mtbf_s, _MOST * question.mtbf_s
    return min(max(min(question.work_s, most), fewest, 20 * question.step_s), _LONGEST_S)


def _formulas(question: PlanQuestion, strategy: str) -> dict[str, float | None]:
    """Return the closed forms' time between two checkpoints; None if no checkpoint is needed or they cost nothing."""
    back_s, save_s = mtbf_back_s(question, strategy), question.save_s
    if save_s <= 0 or not math.isfinite(back_s):
        return {"young_s": None, "daly_s": None, "exact_s": None}
    return {
        "young_s": young(save_s, back_s),
        "daly_s": daly(save_s, back_s),
        "exact_s": exact_interval_s(save_s, back_s),
    }


def _usual_every(question: PlanQuestion, strategy: str) -> int:
    """Return the steps between two checkpoints by the closed form.

    A checkpoint waits for the previous one to be written.
    """
    exact_s = _formulas(question, strategy)["exact_s"]
    if exact_s is None and math.isinf(mtbf_back_s(question, strategy)):
        return 0
    interval_s = max(exact_s or 0.0, question.save_background_s, question.step_s)
    return min(math.ceil(interval_s / question.step_s - 0.5), 10**9)


def _row(question: PlanQuestion, strategy: str, save_every: int, repetitions: int, seed: int) -> dict[str, Any]:
    horizon_s = _horizon_s(question)
    scenario = scenario_of(question, strategy, save_every, horizon_s)
    sweep = monte_carlo(scenario, repetitions, seed=seed)
    row = StrategyResult(name=strategy, scenario=scenario, sweep=sweep, chosen="").row()
    goodput = sweep.estimate("goodput")
    times = [_over(question.work_s, value) for value in (goodput.mean, goodput.high, goodput.low)]
    total_workers = question.workers + question.spares
    hours = [None if time is None else total_workers * time / 3600 for time in times]
    failures = sweep.estimate("failures")
    mean, low, high = (value / horizon_s * 86_400 for value in (failures.mean, failures.low, failures.high))
    per_day = Estimate(mean, low, high, failures.number)
    for name in ("total_s", "worker_hours", "failures", "starts"):
        for end in ("", "_low", "_high"):
            del row[name + end]
    return {
        **{name: value for name, value in row.items() if name not in _OF_SCENARIOS},
        **dict(zip(("train_s", "train_s_low", "train_s_high"), times, strict=True)),
        **dict(zip(("worker_hours", "worker_hours_low", "worker_hours_high"), hours, strict=True)),
        **flat("failures_per_day", per_day),
        "mtbf_back_s": _finite(mtbf_back_s(question, strategy)),
        "simulated_s": horizon_s,
        **_formulas(question, strategy),
    }


def _over(work_s: float, goodput: float) -> float | None:
    return work_s / goodput if goodput > 1e-3 else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# -- the interval


def _optimum(question: PlanQuestion, strategy: str, seed: int, now: Say) -> Optimum | None:
    """Search around the closed form's number of steps; None if no checkpoint is needed."""
    usual = _usual_every(question, strategy)
    if not usual:
        return None
    scenario = scenario_of(question, strategy, usual, _horizon_s(question))
    most = max(1, int(scenario.horizon_s / scenario.full_step_s))
    least = max(1, usual // _AROUND)
    ends = {"least": min(least, most), "most": min(most, _AROUND * usual)}

    def tell(share: float) -> None:
        now(f"searching the best interval of {strategy}: {share:.0%}")

    return best_interval(scenario, _TRIES, seed=seed, tell=tell, **ends)


def _is_flat(optimum: Optimum, every: int) -> bool:
    """Return whether ``every`` is statistically as good as the best."""
    near = min(optimum.tried, key=lambda one: abs(math.log(one[0] / max(every, 1))))
    return near[1].mean >= optimum.goodput.mean - ENOUGH / 5


def _tried(optimum: Optimum) -> dict[str, Any]:
    """Return the best candidate, and the range of candidates that cost almost nothing more."""
    good = [every for every, goodput in optimum.tried if goodput.mean >= optimum.goodput.mean - ENOUGH / 5]
    step_s = optimum.interval_s / optimum.save_every
    return {
        "save_every": optimum.save_every,
        "interval_s": optimum.interval_s,
        "good_from_s": min(good) * step_s,
        "good_to_s": max(good) * step_s,
        "tried": [
            {"save_every": every, "interval_s": every * step_s} | flat("goodput", g) for every, g in optimum.tried
        ],
    }


def _without_spares(
    question: PlanQuestion, best: Mapping[str, Any], repetitions: int, seed: int
) -> dict[str, float] | None:
    """Return the goodput of the best strategy, by ``split``, and of ``relaunch``, without spares; None on one node."""
    if question.nodes == 1:
        return None
    found = {}
    for split in ("slices", "even"):
        bare = dataclasses.replace(question, spares=0, split=split)
        found[split] = _row(bare, best["name"], best["save_every"], repetitions, seed)["goodput"]
    bare = dataclasses.replace(question, spares=0)
    found["relaunch"] = _row(bare, "relaunch", _usual_every(bare, "relaunch"), repetitions, seed)["goodput"]
    return found


# -- the map


def _map(question: PlanQuestion, seed: int, now: Say) -> list[dict[str, Any]]:
    """Return the best strategy for other numbers of workers and other nodes.

    Step and checkpoint costs stay the same.
    """
    now("computing the map")
    sizes = [n for factor in (1 / 16, 1 / 4, 1, 4, 16) if 2 <= (n := round(question.workers * factor)) <= 300_000]
    cells = []
    for factor in (4, 1, 1 / 4, 1 / 16):
        for workers in sizes:
            now(f"computing the map: {workers} workers")
            cells.append(_cell(_scaled(question, workers, question.mtbf_node_s * factor), seed))
    return cells


def _scaled(question: PlanQuestion, workers: int, mtbf_node_s: float) -> PlanQuestion:
    """Return the question for another cluster, with the spares that a plan for it would recommend."""
    per_node = min(question.workers_per_node, workers)
    down = down_share(mtbf_node_s, question.repair_s, question.whole_job_share)
    spares = worthwhile_spares(workers, per_node, down, question.split)
    return dataclasses.replace(
        question, workers=workers, workers_per_node=per_node, mtbf_node_s=mtbf_node_s, spares=spares
    )


def _cell(question: PlanQuestion, seed: int) -> dict[str, Any]:
    horizon_s = min(max(_MAP_FAILURES * question.mtbf_s, 20 * question.step_s), _LONGEST_S)
    goodput = {}
    for name in _MAP_STRATEGIES:
        scenario = scenario_of(question, name, _usual_every(question, name), horizon_s)
        goodput[name] = monte_carlo(scenario, _MAP_REPETITIONS, seed=seed).estimate("goodput").mean
    return {
        "workers": question.workers,
        "mtbf_node_s": question.mtbf_node_s,
        "mtbf_s": question.mtbf_s,
        "spares": question.spares,
        "wins": recommended(goodput),
        **{f"goodput_{name}": value for name, value in goodput.items()},
    }
