"""What is known of the recovery in progress, until training goes on and it is written down."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.engine.context import Rebuilding, Recovery, World
from holdfast.engine.run_log import RunLog


class Recovering:
    """Begins a recovery when a failure is seen, or members change, and ends it when training goes on.

    Args:
        world: Who is there; with ``rebuilding``, the recovery that the application before this one began goes on.
        log: Writes it down.
    """

    def __init__(self, world: World, log: RunLog) -> None:
        self._world = world
        self._log = log
        self.now: Recovery | None = None
        """The recovery in progress."""
        if (before := world.rebuilds.current) is not None:
            self.now = Recovery(before.before, "reinit", orders=before.orders, times_s=before.times_s)

    @property
    def is_calm(self) -> bool:
        """Whether all meet because members change, and nobody has seen a failure."""
        return self.now is not None and self.now.decision == "grow"

    def meet(self) -> None:
        """Hear that nothing failed: all meet because members change."""
        if self.now is None:
            self.now = Recovery(self._world.comm.members, "grow", held_since_s=self._world.clock.now_s())
            self._log.mark("recovery")

    def expect(self, newcomers: Sequence[int]) -> None:
        """Hear who comes; a newcomer does, too, because those who were there may die before they write it down."""
        if self.now is None or self._world.comm.here[0] in newcomers:
            self.now = Recovery(tuple(rank for rank in self._world.comm.members if rank not in newcomers))
        self.now.decision = "grow"

    def see_corruption(self, *, redone_steps: int) -> None:
        """Hear that the guard found something: all meet, and do so many steps again, or find out how many."""
        if self.now is None:
            self.now = Recovery(self._world.comm.members, "heal", redone_steps)
            self._log.mark("recovery")

    def see_failure(self) -> None:
        """Hear that somebody died."""
        if self.now is None:
            self.now = Recovery(before=self._world.comm.members)
            self._log.failure_seen()
            self._log.mark("recovery")
        elif self.is_calm:
            self.now.decision = "continue"
            self._log.failure_seen()

    def decide(self, decision: str, redone_steps: int | None = None) -> None:
        """Hear what was decided, if this is a recovery; ``redone_steps`` where that says how many there are."""
        if self.now is not None:
            self.now.decision = decision
            if redone_steps is not None:
                self.now.redone_steps = redone_steps

    def take_back(self, *, was_computing: bool) -> None:
        """Hear that the step in progress is computed again, unless something else was decided."""
        if self.now is not None and self.now.decision == "continue":
            self.decide("redo", int(was_computing))

    def rebuilding(self, *, reached: int, began_s: float) -> Rebuilding:
        """Return what is handed to the application that is built next.

        Args:
            reached: Steps that this worker had begun.
            began_s: When it began to take the step in progress back; it is, and a snapshot is taken.
        """
        recovery, now_s = self.now or Recovery(self._world.comm.members), self._world.clock.now_s()
        return Rebuilding(
            before=recovery.before,
            reached=reached,
            orders=recovery.orders,
            times_s=recovery.times_s,
            snapshot_s=now_s - began_s,
            unwound_s=now_s,
        )

    def forget(self) -> None:
        """Write nothing down: nobody is left to recover with."""
        self.now = None

    def end(self) -> None:
        """Write down what was decided: training goes on."""
        world, recovery, self.now = self._world, self.now, None
        if recovery is not None:
            lost = any(rank not in world.comm.members for rank in recovery.before)
            if recovery.decision not in ("grow", "heal") or (recovery.decision == "heal" and lost):
                world.keeper.note_failure()
            held_s = world.clock.now_s() - recovery.held_since_s if recovery.held_since_s else 0.0
            self._log.recovered(recovery, held_s)
        if world.rebuilds.current is not None:
            self._log.reinitialised(world.rebuilds.current)
            world.rebuilds.current = None
