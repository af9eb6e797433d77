"""The protocol's decisions as a table, in which the simulator looks them up.

A decision depends on the members' phase and on whether enough of them are left, but not on the time. So the production
protocol is run once per case.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from holdfast.recovery.messages import (
    ComputeStep,
    DiscardStep,
    LoadCheckpoint,
    MoveParts,
    Reinitialise,
    SaveAndStop,
    SendState,
    Shrink,
)
from holdfast_lab.simulate.checks import ticks
from holdfast_lab.simulate.protocol_model import Rules, SimulatedRecovery, rules_of
from holdfast_lab.simulate.scenario import Scenario


class FailureCase(enum.IntEnum):
    """The members' phase when one of them fails.

    ``STEP``: in a step; the failure is detected in an all-reduce, or while a split model computes. ``BOUNDARY``:
    between two steps, while newcomers are admitted. ``LOADING``: while a checkpoint is loaded.
    """

    STEP = 0
    BOUNDARY = 1
    LOADING = 2


class SimulatedDecision(NamedTuple):
    """The protocol's decision in one case.

    Args:
        undo: How long updates of all buckets are undone, nanoseconds; they are stages of a recovery, after regrouping.
        restart: How long the application is rebuilt.
        load: How long a checkpoint is loaded, or parts are restored.
        save: How long everything is saved before the job stops.
        discards: The step in progress is lost.
        goes_back: Everything since the newest checkpoint is lost.
        loads: A checkpoint is loaded; a failure meanwhile is of case ``LOADING``.
        resumes: The step in progress is continued.
        stops: The whole job stops.
        falls_behind: A part is restored as it was some steps ago.
    """

    undo: int
    restart: int
    load: int
    save: int
    discards: bool
    goes_back: bool
    loads: bool
    resumes: bool
    stops: bool
    falls_behind: bool


def decision_table(scenario: Scenario) -> list[SimulatedDecision]:
    """Return the protocol's decisions: for each :class:`FailureCase`, with too few survivors and with enough."""
    rules = _rules(scenario)
    return [_decide(scenario, rules, case, enough) for case in FailureCase for enough in (False, True)]


def admission_ns(scenario: Scenario) -> int:
    """Return how long an admission of newcomers holds training after the members have regrouped, nanoseconds."""
    prices = {SendState: scenario.costs.rejoin_s, MoveParts: scenario.costs.rehome_s}
    recovery, held = SimulatedRecovery(_rules(scenario), 1), 0
    recovery.members_change()
    while not recovery.is_over:
        held += ticks(prices.get(type(recovery.open), 0.0))
        recovery.carry_out(enough=True)
    return held


def _rules(scenario: Scenario) -> Rules:
    job = scenario.job
    strategy = "rollback" if job.strategy == "relaunch" else job.strategy
    return rules_of(strategy, min_workers=job.min_workers, buckets=job.buckets, model=job.model)


def _decide(scenario: Scenario, rules: Rules, case: FailureCase, enough: bool) -> SimulatedDecision:
    costs, job = scenario.costs, scenario.job
    recovery = _failed(rules, case)
    undo = restart = load = save = 0
    discards = loads = rebuilds = moves = False
    while not (recovery.is_over or recovery.has_stopped):
        match recovery.open:
            case DiscardStep():
                discards = True
                undo = ticks(costs.undo_s) if case is FailureCase.STEP and job.overlap_optimizer else 0
            case Reinitialise():
                rebuilds, restart = True, ticks(costs.rebuild_s)
            case LoadCheckpoint():
                loads = True
                load += ticks(costs.load_s)
            case MoveParts():
                moves = True
                load += ticks(costs.rehome_s)
            case SaveAndStop():
                save = ticks(costs.save_s) + ticks(costs.save_background_s)
        recovery.carry_out(enough=enough)
    from_snapshot = rebuilds and job.reinit_from == "snapshot" and not rules.split
    return SimulatedDecision(
        undo, restart, load, save,
        discards=discards or from_snapshot,
        goes_back=loads and not from_snapshot,
        loads=loads,
        resumes=not isinstance(recovery.open, ComputeStep) and not recovery.has_stopped,
        stops=recovery.has_stopped,
        falls_behind=moves and not loads and scenario.stale_iterations > 0,
    )  # fmt: skip


def _failed(rules: Rules, case: FailureCase) -> SimulatedRecovery:
    """Return a recovery just after the failure was reported."""
    recovery = SimulatedRecovery(rules, 1, 0 if case is not FailureCase.BOUNDARY else None)
    if case is FailureCase.BOUNDARY:
        recovery.members_change()
        while not isinstance(recovery.open, Shrink):
            recovery.carry_out(enough=True)
    elif case is FailureCase.LOADING:
        recovery = _loading(rules)
    recovery.peer_lost()
    return recovery


def _loading(rules: Rules) -> SimulatedRecovery:
    """Return a recovery that has started loading; if the strategy never loads, a recovery from a failure in a step."""
    recovery = SimulatedRecovery(rules, 1, 0)
    recovery.peer_lost()
    while not (isinstance(recovery.open, LoadCheckpoint) or recovery.is_over):
        recovery.carry_out(enough=True)
    return recovery if not recovery.is_over else SimulatedRecovery(rules, 1, 0)
