"""What the protocol decides, as a table: the vectorised body looks up what the event body asks for each time.

The protocol's answer depends on where the members are and on whether enough of them are left, not on when it is asked. So each
case is asked once, of the same objects.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from holdfast.recovery.messages import (
    ComputeStep,
    DiscardStep,
    LoadCheckpoint,
    Rehome,
    Reinitialise,
    SaveAndStop,
    Shrink,
    Welcome,
)
from holdfast_lab.simulate.checks import ticks
from holdfast_lab.simulate.deciding import Meeting, Rules, rules_of
from holdfast_lab.simulate.scenario import Scenario


class Case(enum.IntEnum):
    """Where the members are when they meet.

    ``STEP``: they miss somebody in a sum, or in computing a split model. ``BOUNDARY``: they were letting newcomers in.
    ``LOADING``: they had decided to load, and were doing so.
    """

    STEP = 0
    BOUNDARY = 1
    LOADING = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What comes of a meeting, after the members have regrouped; the parts are in this order.

    Args:
        restart: Building the application again, nanoseconds.
        load: Loading a checkpoint, or restoring parts.
        save: Saving, before all stop.
        undo: Taking the updates of all buckets back, before any of these.
        discards: The step in progress is lost.
        goes_back: All since the newest checkpoint is lost.
        loads: Whoever meets next finds all loading.
        goes_on: The step is gone on with.
        stops: All stop.
    """

    restart: int
    load: int
    save: int
    undo: int
    discards: bool
    goes_back: bool
    loads: bool
    goes_on: bool
    stops: bool


def fates(scenario: Scenario) -> dict[tuple[Case, bool], Fate]:
    """Return what comes of a meeting, by where the members are and whether enough are left."""
    rules = _rules(scenario)
    return {(case, enough): _fate(scenario, rules, case, enough) for case in Case for enough in (True, False)}


def welcome(scenario: Scenario) -> int:
    """Return how long all are held for newcomers, after they have regrouped, nanoseconds."""
    prices = {Welcome: scenario.costs.rejoin_s, Rehome: scenario.costs.rehome_s}
    meeting, held = Meeting(_rules(scenario), 1), 0
    meeting.change()
    while not meeting.is_over:
        held += ticks(prices.get(type(meeting.open), 0.0))
        meeting.do(enough=True)
    return held


def _rules(scenario: Scenario) -> Rules:
    job = scenario.job
    strategy = "rollback" if job.strategy == "relaunch" else job.strategy
    return rules_of(strategy, min_workers=job.min_workers, buckets=job.buckets, model=job.model)


def _fate(scenario: Scenario, rules: Rules, case: Case, enough: bool) -> Fate:
    costs, from_snapshot = scenario.costs, scenario.job.reinit_from == "snapshot" and not rules.split
    meeting = _failed(rules, case)
    restart = load = save = undo = 0
    discards = loads = rebuilds = stops = False
    while not (meeting.is_over or meeting.has_stopped):
        match meeting.open:
            case DiscardStep():
                discards, undo = (
                    True,
                    ticks(costs.undo_s) if case is Case.STEP and scenario.job.update == "eager" else 0,
                )
            case Reinitialise():
                restart, rebuilds = ticks(costs.rebuild_s), True
            case LoadCheckpoint():
                load, loads = load + ticks(costs.load_s), True
            case Rehome():
                load += ticks(costs.rehome_s)
            case SaveAndStop():
                save, stops = ticks(costs.save_s) + ticks(costs.save_background_s), True
        meeting.do(enough=enough)
    keeps = rebuilds and from_snapshot
    return Fate(
        restart=restart,
        load=load,
        save=save,
        undo=undo,
        discards=discards or keeps,
        goes_back=loads and not keeps,
        loads=loads,
        goes_on=not isinstance(meeting.open, ComputeStep) and not stops,
        stops=stops,
    )


def _failed(rules: Rules, case: Case) -> Meeting:
    """Return a meeting that was just told of a failure."""
    meeting = Meeting(rules, 1, 0 if case is not Case.BOUNDARY else None)
    if case is Case.BOUNDARY:
        meeting.change()
        while not isinstance(meeting.open, Shrink):
            meeting.do(enough=True)
    elif case is Case.LOADING:
        meeting = _loading(rules)
    meeting.lose()
    return meeting


def _loading(rules: Rules) -> Meeting:
    """Return a meeting that has come to loading, by whichever way there is one; else one that has met in a step."""
    meeting = Meeting(rules, 1, 0)
    meeting.lose()
    while not (isinstance(meeting.open, LoadCheckpoint) or meeting.is_over):
        meeting.do(enough=True)
    return meeting if not meeting.is_over else Meeting(rules, 1, 0)
