"""A run that happened, decided once more: its failures go through the simulator's brain, and the decisions are compared.

What is taken from the records is who was lost, in which step, and whether that step had been computed; what was decided is
not. It is decided anew by the strategy that the run had.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from holdfast.errors import ConfigError
from holdfast.records.types import FailureSeen, JobRestarted, Record, Recovered, RunStarted, SettingChanged
from holdfast_lab.simulate.protocol_model import Recovery, rules_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One recovery, as it was and as it is decided again.

    Args:
        t_s: When the first survivor had decided.
        step: The step that was in progress.
        lost: Ranks.
        was: What was decided, as :class:`~holdfast.records.types.Recovered` has it.
        again: What the simulator decides.
        orders_were: The orders of the protocol, and how often each was carried out.
        orders_again: Those of the simulator.
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
        """Whether the same was decided."""
        return self.was == self.again


def replay(records: Iterable[Record], *, min_workers: int = 1) -> tuple[Replayed, ...]:
    """Return all recoveries of a run in the order of time, decided once more.

    Admissions of newcomers are among them; where the guard took everybody back to a state that is right, nothing failed, and
    they are left out.

    Args:
        records: Of ``events.jsonl``, in any order.
        min_workers: As the run had it; the records do not say.

    Raises:
        ConfigError: if nobody started, or the model was split: the records do not say who held what.
    """
    strategy, buckets = "", 0
    seen: list[FailureSeen] = []
    told: set[int] = set()
    replayed: list[Replayed] = []
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
                        "the records say nothing of a start, or that the model was split: who held what, they do not say"
                    )
                if record.decision != "heal":
                    replayed.append(_decide_again(record, seen, strategy, buckets, min_workers))
                seen = []
    return tuple(replayed)


def _decide_again(was: Recovered, seen: list[FailureSeen], strategy: str, buckets: int, min_workers: int) -> Replayed:
    rules = rules_of(strategy, min_workers=min_workers, buckets=buckets, model="replicated")
    step = min((record.step for record in seen), default=was.step)
    if not seen:
        recovery = Recovery(rules, was.step)
        recovery.members_change()
    else:
        # Somebody may have closed the step that others missed a worker in, and have begun the next one.
        latest = max(record.step for record in seen)
        recovery = Recovery(rules, latest, 0, some_behind=latest > step)
        recovery.peer_lost()
    enough = len(was.survivors) >= min_workers
    while not (recovery.is_over or recovery.has_stopped):
        recovery.carry_out(enough=enough, checkpoint=was.step)
    return Replayed(
        t_s=was.t_s,
        step=step,
        lost=was.lost,
        was=was.decision,
        again=recovery.decision,
        orders_were=was.orders,
        orders_again=recovery.orders,
    )
