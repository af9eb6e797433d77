"""What only one worker does, such as saving: whether it was done, and whether ranks wait for one that has left. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.base.formatting import count, listing
from holdfast.records.texts import UNDER_RANK_0, USE_IS_LEAD
from holdfast.records.types import (
    CollectiveAwaited,
    Record,
    RunStarted,
    ScriptEnded,
    SeatTaken,
    WriterDeclared,
)


@dataclass(slots=True)
class Duties:
    """The workers' declarations in one start of the job.

    Args:
        holder: The worker that holds seat 0.
    """

    holder: int = -1
    _is_distributed: bool = False
    _declared: dict[int, list[WriterDeclared]] = field(default_factory=dict)
    _ended: dict[int, ScriptEnded] = field(default_factory=dict)
    _awaited: dict[int, CollectiveAwaited] = field(default_factory=dict)

    def apply(self, record: Record) -> None:
        """Take one record."""
        match record:
            case RunStarted():
                self._is_distributed = record.is_distributed
                if not self._is_distributed:  # what was said before this loop says nothing about what follows it
                    self._declared.pop(record.rank, None)
            case SeatTaken(seat=0):
                self.holder = record.worker
            case WriterDeclared():
                self._declared.setdefault(record.rank, []).append(record)
            case ScriptEnded():
                self._ended[record.rank] = record
            case CollectiveAwaited(what=""):
                self._awaited.pop(record.rank, None)
            case CollectiveAwaited():
                self._awaited[record.rank] = record

    # -- the end of the job

    def missing(self, ended_well: Collection[int], died_late: Collection[int]) -> str:
        """Return what a job that has ended may lack, and what to do, in a sentence; "" if it lacks nothing.

        Args:
            ended_well: Workers whose script has ended with 0.
            died_late: Workers that died after training, and whose loss the others have not recovered from.
        """
        if self._is_distributed:
            # the record of the script's end: a crash of the interpreter afterwards, or a kill at the gate, takes nothing away
            has_written = self.holder in ended_well or self.holder in self._ended
            return "" if has_written else self._missing_of_rank_0(ended_well)
        return self._missing_after_training(ended_well, died_late) if died_late else ""

    def _missing_of_rank_0(self, ended_well: Collection[int]) -> str:
        calls = self._calls(ended_well)
        if any(call.is_lead for call in calls):  # a survivor has taken the duties over
            return ""
        if calls:
            return (
                "the lead was lost, and no survivor has asked holdfast.distributed.is_lead() since: what the script writes"
                " last may be missing. Start it again, so that it resumes from its own snapshot"
            )
        return (
            f"rank 0 was lost: {UNDER_RANK_0} has not happened since. Start it again, so that it resumes from its own"
            f" snapshot; or {USE_IS_LEAD}"
        )

    def _missing_after_training(self, ended_well: Collection[int], died_late: Collection[int]) -> str:
        calls = {call.how for call in self._calls(ended_well) if not call.in_loop}
        lead_died = min(died_late) < min(ended_well)
        if calls == {"save"} or ("is_lead" in calls and not lead_died):
            return ""
        ranks = f"worker{'s' * (len(died_late) > 1)} {listing(sorted(died_late))}"
        was = "was" if len(died_late) == 1 else "were"
        return (
            f"{ranks} {was} lost after training, before the script had ended: what it writes last, such as the trained"
            " model, may be missing or incomplete. session.save(path) writes a file that survives this"
        )

    def _calls(self, ranks: Collection[int]) -> list[WriterDeclared]:
        return [call for rank in ranks for call in self._declared.get(rank, ())]

    # -- ranks that wait in vain

    def blocked(self, living: Sequence[int]) -> str:
        """Return why collectives that ``living`` wait in can never complete, in a sentence; "" if they may."""
        waiting = {rank: self._awaited[rank] for rank in living if rank in self._awaited}
        return self._left_behind(waiting, living) or _mismatched(waiting, living)

    def _left_behind(self, waiting: Mapping[int, CollectiveAwaited], living: Sequence[int]) -> str:
        for wait in waiting.values():
            members = [rank for rank in wait.members if rank in living]
            left = [rank for rank in members if self._never_calls(rank, wait)]
            peers = [rank for rank in members if rank not in left]
            # One that still saves is not interrupted, and one that waits in an earlier collective is on its way to this.
            if left and all(rank in waiting and not _is_before(waiting[rank], wait) for rank in peers):
                return _left_sentence(left, peers, wait, self._ended[left[0]].steps)
        return ""

    def _never_calls(self, rank: int, wait: CollectiveAwaited) -> bool:
        """Return whether the script of ``rank`` has ended before the collective that another waits in."""
        end = self._ended.get(rank)
        return end is not None and dict(zip(end.groups, end.completed, strict=True)).get(wait.group, 0) <= wait.number


def _mismatched(waiting: Mapping[int, CollectiveAwaited], living: Sequence[int]) -> str:
    for wait in waiting.values():
        members = sorted(rank for rank in wait.members if rank in living)  # a rank elsewhere does not matter to them
        waits = [waiting[rank] for rank in members if rank in waiting]
        same_place = {(each.group, each.number) for each in waits} == {(wait.group, wait.number)}
        if len(waits) < len(members) or not same_place or len({each.signature for each in waits}) == 1:
            continue
        calls = "; ".join(f"rank {rank}: {waiting[rank].signature}{_where(waiting[rank])}" for rank in members)
        return (
            f"the ranks call different collectives as number {wait.number} of their group: {calls}. Every rank must"
            " make the same calls in the same order; the usual cause is uneven data"
        )
    return ""


def _is_before(one: CollectiveAwaited, other: CollectiveAwaited) -> bool:
    return one.group == other.group and one.number < other.number


def _left_sentence(left: Sequence[int], peers: Sequence[int], wait: CollectiveAwaited, steps: int) -> str:
    has, pronoun = ("has ended its script", "it") if len(left) == 1 else ("have ended their scripts", "them")
    after = f" after {count(steps, 'step')}" if steps else ""
    return (
        f"{_ranks(left)} {has}{after}; {_ranks(peers)} wait{'s' * (len(peers) == 1)} for {pronoun} in {wait.what}"
        f"{_where(wait)}: uneven data; use model.join(), or give every rank the same number of batches"
    )


def _where(wait: CollectiveAwaited) -> str:
    return f" ({wait.where})" if wait.where else ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listing(ranks)}"
