"""Simulates the strategies of :mod:`holdfast.recovery` with costs in place of tensors. Does not need torch.

The input is a :class:`Scenario` with four parts of plain data:

:class:`Cluster`
    Number of workers, in nodes and racks, and number of spares.
:class:`SimulatedJob`
    Recovery strategy, checkpoint interval and amount of work.
:class:`Costs`
    Seconds and bytes: a step, its all-reduces, detection, regrouping, saving, loading, starting, joining.
:class:`Failures` or :class:`FailureTrace`
    Which machines are down, and when: drawn from distributions (:class:`Exponential`, :class:`Weibull`,
    :class:`LogNormal`, :class:`Bathtub`, :class:`Constant`) for workers, nodes and racks (:class:`Source`), or read
    from a recorded trace (:func:`read_trace`). Outages never depend on the job, so all strategies can be compared on
    the same history.

Usage::

    scenario = Scenario(cluster, job, costs, failures)
    outcome = simulate(scenario, seed=1)               # one history: an Outcome
    sweep = monte_carlo(scenario, 1000, seed=1)        # many: a Sweep, whose repetition r is simulate(..., repetition=r)
    sweep.estimate("goodput")                          # an Estimate: mean and 95 % interval
    best_interval(scenario, 200, seed=1)               # steps between two checkpoints, found by search

:func:`daly_expected_s` and :func:`exact_interval_s` are closed forms to compare with. docs/explanation/simulation.md
says what is modelled and what is not.

Importing this package imports nothing else: every name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.lazy import lazy

if TYPE_CHECKING:
    from holdfast_lab.simulate.cluster import Cluster
    from holdfast_lab.simulate.costs import Costs
    from holdfast_lab.simulate.distributions import (
        Bathtub,
        Constant,
        Distribution,
        Exponential,
        LogNormal,
        Weibull,
        make_distribution,
    )
    from holdfast_lab.simulate.failures import Failures, Outages, Source
    from holdfast_lab.simulate.formulas import daly_expected_s, exact_interval_s
    from holdfast_lab.simulate.job import SimulatedJob
    from holdfast_lab.simulate.many import monte_carlo, simulate
    from holdfast_lab.simulate.optimum import Optimum, best_interval
    from holdfast_lab.simulate.outcome import PARTS, Estimate, Outcome, Sweep
    from holdfast_lab.simulate.reading import read_interruptions
    from holdfast_lab.simulate.scenario import Scenario
    from holdfast_lab.simulate.traces import FailureTrace, read_trace

_WHERE = {
    ".cluster": "Cluster",
    ".costs": "Costs",
    ".distributions": "Bathtub Constant Distribution Exponential LogNormal Weibull make_distribution",
    ".failures": "Failures Outages Source",
    ".formulas": "daly_expected_s exact_interval_s",
    ".job": "SimulatedJob",
    ".many": "monte_carlo simulate",
    ".optimum": "Optimum best_interval",
    ".outcome": "PARTS Estimate Outcome Sweep",
    ".reading": "read_interruptions",
    ".scenario": "Scenario",
    ".traces": "FailureTrace read_trace",
}

__all__ = [
    "PARTS", "Bathtub", "Cluster", "Constant", "Costs", "Distribution", "Estimate", "Exponential", "FailureTrace",
    "Failures", "LogNormal", "Optimum", "Outages", "Outcome", "Scenario", "SimulatedJob", "Source", "Sweep", "Weibull",
    "best_interval", "daly_expected_s", "exact_interval_s", "make_distribution", "monte_carlo", "read_interruptions",
    "read_trace", "simulate",
]  # fmt: skip

__getattr__ = lazy(__name__, {name: module for module, names in _WHERE.items() for name in names.split()})


def __dir__() -> list[str]:
    return sorted(__all__)
