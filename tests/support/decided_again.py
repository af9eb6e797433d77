"""Replays a run's failures through the simulator's protocol and compares the decisions.

From the records it takes the lost ranks, the step, and whether that step had been computed, but not the decision. The
run's strategy decides again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from holdfast.errors import ConfigError
from holdfast.records.types import FailureSeen, JobRestarted, Record, Recovered, RunStarted, SettingChanged
from holdfast_lab.simulate.protocol_model import SimulatedRecovery, rules_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedRecovery:
    """One recovery with its recorded and its replayed decision.

    Args:
        t_s: When the first survivor had decided.
        step: The step in progress.
        lost: The lost ranks.
        was: The recorded decision, as in :class:`~holdfast.records.types.Recovered`.
        again: The simulator's decision.
        orders_were: How often each protocol order was executed in the run.
        orders_again: The same in the simulator.
    """

    t_s: float
    step: int
    lost: tuple[int, ...]
    was: str
    again: str
    orders_were: Mapping[str, int]
    orders_again: Mapping[str, int]

    @property
    def agrees(self) -> bool:
        """Whether both decisions are the same."""
        return self.was == self.again


def replay(records: Iterable[Record], *, min_workers: int = 1) -> tuple[ReplayedRecovery, ...]:
    """Return all recoveries of a run in time order, decided again.

    Admissions of newcomers are included. Rollbacks by the guard are left out, because nothing failed.

    Args:
        records: Records of ``events.jsonl``, in any order.
        min_workers: The run's value, which the records do not contain.

    Raises:
        ConfigError: if no start is recorded, or the model was split: the records do not say which worker held which
            part.
    """
    strategy, buckets = "", 0
    seen: list[FailureSeen] = []
    told: set[int] = set()
    replayed: list[ReplayedRecovery] = []
    for record in sorted(records, key=lambda r: r.t_s):
        match record:
            case RunStarted():
                strategy, buckets = record.strategy, record.num_buckets
            case SettingChanged(name="strategy"):
                strategy = json.loads(record.value)
            case FailureSeen():
                seen.append(record)
            case JobRestarted():
                seen, told = [], set()
            case Recovered(generation=generation) if generation not in told:
                told.add(generation)
                if not strategy or not buckets:
                    raise ConfigError(
                        "the records have no start of a worker, or the model was split: they do not say which worker "
                        "held which part"
                    )
                if record.decision != "heal":
                    replayed.append(_decide_again(record, seen, strategy, buckets, min_workers))
                seen = []
    return tuple(replayed)


def _decide_again(
    was: Recovered, seen: list[FailureSeen], strategy: str, buckets: int, min_workers: int
) -> ReplayedRecovery:
    rules = rules_of(strategy, min_workers=min_workers, buckets=buckets, model="replicated")
    step = min((record.step for record in seen), default=was.step)
    if not seen:
        recovery = SimulatedRecovery(rules, was.step)
        recovery.members_change()
    else:
        # A survivor may have committed the step in which others missed a worker, and have begun the next one.
        latest = max(record.step for record in seen)
        recovery = SimulatedRecovery(rules, latest, 0, some_behind=latest > step)
        recovery.peer_lost()
    enough = len(was.survivors) >= min_workers
    while not (recovery.is_over or recovery.has_stopped):
        recovery.carry_out(enough=enough, checkpoint=was.step)
    return ReplayedRecovery(
        t_s=was.t_s,
        step=step,
        lost=was.lost,
        was=was.decision,
        again=recovery.decision,
        orders_were=was.orders,
        orders_again=recovery.orders,
    )
