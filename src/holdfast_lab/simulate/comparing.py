"""Compares several settings on the same failures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from holdfast.checkpoint.interval import daly
from holdfast_lab.simulate.costs import STALE_SOURCE
from holdfast_lab.simulate.failures import Failures
from holdfast_lab.simulate.formulas import exact_interval_s, young
from holdfast_lab.simulate.many import monte_carlo, part_of
from holdfast_lab.simulate.optimum import best_interval, candidates
from holdfast_lab.simulate.outcome import PARTS, Estimate, Sweep
from holdfast_lab.simulate.scenario import Scenario
from holdfast_lab.simulate.toml import StrategySetting
from holdfast_lab.simulate.traces import FailureTrace

MEASURES = ("goodput", "lost_share", "total_s", "worker_hours", "failures", "starts")
"""Measures that a row gives with an interval."""

_TRIES = 20
"""Repetitions per tried checkpoint interval; few suffice, because all intervals are tried on the same failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyResult:
    """One setting, and its result.

    Args:
        name: The name of the setting.
        scenario: The scenario with the chosen interval.
        sweep: The histories.
        chosen: How the interval was chosen, as text.
    """

    name: str
    scenario: Scenario
    sweep: Sweep
    chosen: str

    def row(self) -> dict[str, Any]:
        """Return a flat row: ``goodput``, ``goodput_low`` etc., and each part's share of time as ``in_save`` etc."""
        job, total = self.scenario.job, self.sweep.total_ns.sum()
        found: dict[str, Any] = {
            "name": self.name,
            "strategy": job.strategy,
            "save_every": job.save_every,
            "interval_s": job.save_every * self.scenario.full_step_s,
            "chosen": self.chosen,
            "repetitions": len(self.sweep.total_ns),
            "steps_asked": job.steps,
            "horizon_s": self.scenario.horizon_s,
            **self._price_of_partial(),
            "finished": float(self.sweep.finished.mean()),
        }
        for measure in MEASURES:
            found |= flat(measure, self.sweep.estimate(measure))
        return found | {f"in_{part}": float(self.sweep.parts_ns[part].sum() / total) for part in PARTS}

    def _price_of_partial(self) -> dict[str, Any]:
        """Return what a failure costs under ``partial``, and where that number is from; nothing for the others."""
        scenario = self.scenario
        if not scenario.stale_iterations:
            return {}
        source = STALE_SOURCE if scenario.costs.stale_iterations is None else "given"
        return {
            "stale_iterations": scenario.stale_iterations,
            "stale_source": source,
            "mirror_every": scenario.job.mirror_every,
        }


def flat(name: str, estimate: Estimate) -> dict[str, float]:
    """Return an estimate as three keys."""
    return {name: estimate.mean, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def compare(
    settings: Iterable[StrategySetting],
    repetitions: int,
    *,
    seed: int = 0,
    now: Callable[[str], None] = lambda text: None,
    tell: Callable[[float], None] = lambda share: None,
) -> list[StrategyResult]:
    """Simulate each setting with the checkpoint interval that it asks for.

    Args:
        settings: The settings to compare.
        repetitions: Histories per setting, ``>= 2``; all settings use the same failures.
        seed: Same seed, same failures.
        now: Called with progress messages.
        tell: Called now and then with the share that is done, at most 1.

    Raises:
        ConfigError: if an interval cannot be determined.
    """
    settings = list(settings)
    searches, own = [_work_of_search(setting) for setting in settings], repetitions
    total, done = sum(searches) + own * len(settings), 0
    found = []
    for setting, search in zip(settings, searches, strict=True):
        now(f"simulating {setting.name}")
        every, chosen = choose_every(setting, seed=seed, tell=part_of(tell, done / total, search / total))
        done += search
        scenario = replace(setting.scenario, job=replace(setting.scenario.job, save_every=every))
        sweep = monte_carlo(scenario, repetitions, seed=seed, tell=part_of(tell, done / total, own / total))
        done += own
        tell(done / total)
        found.append(StrategyResult(name=setting.name, scenario=scenario, sweep=sweep, chosen=chosen))
    return found


def _work_of_search(setting: StrategySetting) -> int:
    """Return about how many histories the search for the best interval of a setting simulates."""
    if setting.every != "best":
        return 0
    return _TRIES * candidates(_least(setting.scenario), _most(setting.scenario))


def choose_every(
    setting: StrategySetting, *, seed: int = 0, tell: Callable[[float], None] = lambda share: None
) -> tuple[int, str]:
    """Return the steps between two checkpoints of a setting, and how they were chosen; ``tell`` as for :func:`compare`.

    Raises:
        ConfigError: if a formula is asked for and checkpoints cost nothing.
    """
    scenario, every = setting.scenario, setting.every
    match every:
        case "never":
            return 0, "no checkpoints"
        case "best":
            best = best_interval(scenario, _TRIES, seed=seed, least=_least(scenario), tell=tell)
            if 2 * best.interval_s > scenario.horizon_s or best.save_every >= (scenario.job.steps or math.inf):
                return 0, "no checkpoint is worth its cost"
            return best.save_every, f"best of {len(best.tried)} tried"
        case "young" | "daly":
            formula = young if every == "young" else daly
            interval_s = formula(scenario.costs.save_s, _mtbf_s(scenario))
            return scenario.save_steps(interval_s), f"{every.capitalize()}'s formula"
        case int():
            return every, "as given"
        case _:
            return scenario.save_steps(float(every)), "as given"


def _mtbf_s(scenario: Scenario) -> float:
    down = scenario.failures
    assert isinstance(down, Failures | FailureTrace)
    return down.mtbf_s(scenario.cluster)


def _least(scenario: Scenario) -> int:
    """Return a lower bound of the best interval in steps, far below the optimum if every failure loads a checkpoint."""
    mtbf_s, save_s = _mtbf_s(scenario), scenario.costs.save_s
    if save_s == 0 or not math.isfinite(mtbf_s):
        return 1
    return min(_most(scenario), max(1, scenario.save_steps(exact_interval_s(save_s, mtbf_s) / 8)))


def _most(scenario: Scenario) -> int:
    return max(1, int(scenario.horizon_s / scenario.full_step_s))
