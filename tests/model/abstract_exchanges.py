"""What a worker of the abstract engine does with the parts of a split model; and the promises about these.

Who takes part in an exchange means the same step, group, settings and homes as the others. Nobody closes a step without
the gradients of all parts that it holds, of every chain once. All that hold a part put the same into it. What is given
is of the step that everybody is at, from somebody who has it; and once homes have changed, everybody has its parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.recovery.messages import Computed, Done, Event, MoveParts
from model.abstract_members import Lapse
from model.abstract_memory import Violation, ranks
from model.abstract_parts import (
    ABSENT,
    RESTORED,
    UNKNOWN,
    Exchange,
    Giving,
    Registry,
    SumPart,
    Swap,
    Transfer,
    concerned,
    needed_by,
)
from model.abstract_state import Parts, Payload, living_ranks
from model.abstract_table import Table

_LATE = Lapse.MIRRORS_LATE | Lapse.SUMS_LATE


class Exchanges(Table):
    """A state that is being changed, and how its workers share a model."""

    @property
    def _registry(self) -> Registry:
        assert self._engine.homes is not None
        return self._engine.homes

    # -- the exchanges of a step

    def _next_exchange(self, rank: int) -> Event | None:
        """Let ``rank`` enter the next exchange; return that it has computed if there is none."""
        worker = self._worker(rank)
        exchanges = self._registry.exchanges(worker.homes, rank, worker.steps)
        for place in range(worker.place, len(exchanges)):
            self._set(rank, place=place, waits=exchanges[place])
            self._enter_exchange(rank, exchanges[place])
            if not (self._engine.world.atomic and _is_sent(rank, exchanges[place])):
                return None
        self._set(rank, place=len(exchanges))
        return Computed()

    def _enter_exchange(self, rank: int, order: Exchange) -> None:
        worker = self._worker(rank)
        weights = worker.parts[order.part] if isinstance(order, SumPart) else 0
        what = (worker.steps, worker.group, worker.taken, worker.homes, weights)
        this = self._swaps.get(order) or Swap(order, what, 0, 0)
        if this.what != what:
            msg = f"rubbish is exchanged: {rank} enters {order} with {what}, others are in it with {this.what}"
            raise Violation(msg)
        chains = self._registry.computing(worker.homes, order.part, rank) if isinstance(order, SumPart) else 0
        if chains & this.chains and not this.entered & 1 << rank:
            msg = f"gradients are there twice: {rank} brings those of chains {list(ranks(chains))} to {order}"
            raise Violation(msg)
        self._swaps[order] = this._replace(entered=this.entered | 1 << rank, chains=this.chains | chains)

    def _complete_exchange(self, rank: int, order: Exchange) -> Event | None:
        """Let ``rank`` have the result of ``order``, and go on to the next."""
        worker = self._worker(rank)
        if isinstance(order, SumPart):
            have = list(worker.have)
            have[order.part] = self._swaps[order].chains
            self._set(rank, have=tuple(have))
        self._set(rank, place=worker.place + 1)
        return self._next_exchange(rank)

    def _is_still_needed(self, this: Swap) -> bool:
        """Return whether anybody may still complete ``this``."""
        living = living_ranks(self._workers)
        may_come = [
            rank
            for rank in ranks(concerned(this.order) & living & ~self._failed)
            if not self._is_past(rank, this.order)
        ]
        return any(not needed_by(rank, this.order) & ~this.entered & ~living for rank in may_come)

    def _is_past(self, rank: int, order: Exchange) -> bool:
        """Return whether ``rank`` has completed ``order``."""
        worker = self._worker(rank)
        if worker.steps != order.step or not worker.group:  # it may yet get the homes in which it takes part
            return worker.steps > order.step
        exchanges = self._registry.exchanges(worker.homes, rank, worker.steps)
        return order not in exchanges[worker.place :]

    # -- applying a step

    def _check_has_gradients(self, rank: int, does: str) -> None:
        """Check that ``rank`` has the gradients of its parts, of every chain."""
        worker = self._worker(rank)
        for part in self._registry.held_by(worker.homes, rank):
            if worker.have[part] != self._registry.all_chains(worker.homes):
                msg = f"gradients are missing: {rank} {does} step {worker.steps} and has those of part {part} of chains {list(ranks(worker.have[part]))} only"
                raise Violation(msg)

    def _check_may_close_split(self, rank: int) -> None:
        if not self._engine.world.lapses & _LATE:
            self._check_has_gradients(rank, "closes")

    def _apply_parts(self, rank: int, step: int) -> None:
        """Let ``rank`` apply ``step`` to its parts."""
        if self._engine.world.lapses & _LATE:
            self._get_late_gradients(rank)
        self._check_has_gradients(rank, "applies")
        self._check_has_its_parts(rank, "applies to it")
        self._set(rank, parts=tuple(there if there == ABSENT else there + 1 for there in self._worker(rank).parts))

    def _get_late_gradients(self, rank: int) -> None:
        """Let ``rank`` have what the sums of its parts did not give it, if all who computed them are alive."""
        worker = self._worker(rank)
        have = list(worker.have)
        for part in self._registry.held_by(worker.homes, rank):
            givers = {chain[part] for chain in self._registry.homes(worker.homes).chains}
            if not have[part] and all(self._workers[giver] is not None for giver in givers):
                have[part] = self._registry.all_chains(worker.homes)
        self._set(rank, have=tuple(have))

    def _check_has_its_parts(self, rank: int, does: str) -> None:
        """Check that ``rank`` has what its homes say, and of the step that it is at."""
        if self._engine.homes is None:
            return
        worker = self._worker(rank)
        held = self._registry.held_by(worker.homes, rank)
        expected = tuple(worker.steps if part in held else ABSENT for part in range(self._registry.parts))
        if tuple(map(_steps_of, worker.parts)) != expected:
            msg = f"part missing: {rank} {does}, has {worker.parts} and should have {expected}"
            raise Violation(msg)

    # -- homes

    def _load_parts(self, rank: int, steps: int) -> None:
        """Let ``rank`` have the parts that are its own after loading."""
        if self._engine.homes is None:
            return
        homes = self._registry.first(self._members)
        self._set_homes(rank, homes, (steps,) * self._registry.parts)

    def _begin_giving(self, rank: int, order: MoveParts) -> Giving:
        """Return what is given so that the homes of ``rank`` become those of the living."""
        self._workers[rank] = self._worker(rank).without_staged()
        before = self._worker(rank).homes
        return Giving(before, self._registry.after(before, self._members), order.restores)

    def _save_and_stop(self, rank: int) -> Event:
        if self._engine.homes is not None and self._registry.is_lost(self._worker(rank).homes, self._members):
            msg = f"part missing: {rank} saves, and nobody holds {self._worker(rank).parts}"
            raise Violation(msg)
        self._set(rank, saved=True)
        return Done()

    def _gives_parts(self, rank: int) -> Parts:
        worker = self._worker(rank)
        if worker.group:
            msg = f"wrong state is given: {rank} gives its parts in the middle of a step"
            raise Violation(msg)
        return Parts(worker.parts)

    def _is_given_parts(self, rank: int, giving: Giving, brought: Sequence[tuple[int, Payload]]) -> None:
        worker, gave = self._worker(rank), dict(brought)
        staged = list(worker.staged)
        for gift in self._registry.gifts(giving, self._members):
            if gift.taker == rank:
                theirs = gave[gift.giver]
                assert isinstance(theirs, Parts)
                staged[gift.part] = theirs.steps[gift.part]
                if staged[gift.part] == ABSENT:
                    staged[gift.part] = worker.steps + RESTORED * (1 + gift.giver)
                if _steps_of(staged[gift.part]) != worker.steps:
                    msg = f"wrong state is given: {gift.giver} gives part {gift.part} of step {staged[gift.part]} to {rank}, who is at step {worker.steps}"
                    raise Violation(msg)
        self._set(rank, staged=tuple(staged), next_homes=giving.after)
        if Lapse.SETTLES_AT_ONCE in self._engine.world.lapses:
            self._settle(rank)

    def _settle(self, rank: int) -> Event:
        worker = self._worker(rank)
        if worker.next_homes != UNKNOWN:
            have = (
                mine if mine != ABSENT else theirs for mine, theirs in zip(worker.parts, worker.staged, strict=True)
            )
            self._set_homes(rank, worker.next_homes, tuple(have))
        self._check_has_its_parts(rank, "settles")
        return Done()

    def _set_homes(self, rank: int, homes: int, have: tuple[int, ...]) -> None:
        held = self._registry.held_by(homes, rank)
        self._set(rank, homes=homes, parts=tuple(there if part in held else ABSENT for part, there in enumerate(have)))
        self._workers[rank] = self._worker(rank).without_staged()

    def _says_lost(self, rank: int) -> bool:
        """Return whether ``rank`` says that nobody among the members holds some part."""
        lapses = self._engine.world.lapses
        if self._engine.homes is None or Lapse.NOBODY_SAYS_LOST in lapses:
            return False
        knowing = [other for other in ranks(self._members) if self._knows_homes(other)]
        says = [*knowing[-1:]] if Lapse.ONE_SAYS_LOST in lapses else knowing
        return rank in says and self._registry.is_lost(self._worker(rank).homes, self._members)

    def _knows_homes(self, rank: int) -> bool:
        worker = self._workers[rank]
        return worker is not None and worker.homes != UNKNOWN


def _steps_of(part: int) -> int:
    """Return the steps in the weights of a part, whoever may have restored it."""
    return part if part == ABSENT else part % RESTORED


def _is_sent(rank: int, order: Exchange) -> bool:
    return isinstance(order, Transfer) and order.giver == rank
