"""The guard in a training loop: what it says in the vote, the states that it keeps, and going back to one of them.

A difference between replicas stays. So a state that was kept before a whole rotation of the fingerprints passed without
one is *verified*: it was right. Two states are kept, the verified one and its successor. When something is found, nobody
closes the step; all meet (see :mod:`holdfast.recovery.protocol`), go back to the verified state, and do the steps since then
again. A step is a function of the state before it, so what comes out has the bits of a run that was never disturbed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.checkpoint import Loaded
from holdfast.data.plan import MiniBatch
from holdfast.engine.context import World
from holdfast.engine.run_log import RunLog
from holdfast.engine.vote import GuardVote, Spread
from holdfast.errors import ReplicasDiffer
from holdfast.integrity.checksums import Checking
from holdfast.integrity.fingerprint import HALVES
from holdfast.integrity.range_check import Ranging
from holdfast.integrity.recompute_check import Computed
from holdfast.integrity.state_hashes import Fingerprint
from holdfast.models.part import Part

_SHORTEST_ROTATION = 32
"""Steps between two states that are kept, at least: of a small model it would cost more to copy than to train."""
_NOBODY = 1 << 30
"""Larger than any rank."""
_MOST_TIMES_BACK = 3
"""Going back so often to one state, without getting past it for good, is no soft error."""

Keep = Callable[[Loaded | None], Loaded]
"""Copies the state before the step in progress, into the memory of an older copy if one is given."""


@dataclass(frozen=True, slots=True)
class WayBack:
    """Where all go back to."""

    kept: Loaded | None  # the state that all have kept; None: it is that of a checkpoint, or of the beginning
    newest: int  # the newest step whose state is known to have been right, -1 for none


class Watch:
    """Compares replicas, as :attr:`Settings.guard` says; ``whole`` is None where workers hold parts."""

    def __init__(self, world: World, whole: Part | None, fingerprint: Fingerprint, log: RunLog) -> None:
        self._world = world
        self._whole = whole
        self._fingerprint = fingerprint
        self._log = log
        self._policy = world.settings.guard
        self._heals = self._policy == "heal"
        self._ranging: Ranging | None = None
        self._digest = fingerprint.digest
        if self._whole is not None and self._digest is not None and self._policy in ("warn", "heal"):
            self._ranging = Ranging(world, self._whole, self._digest, log)
        self._checking = Checking(world, log)
        self._warned: set[tuple[str, ...]] = set()
        self.corrupt = False
        """Whether somebody's state was found to be corrupt, and this worker has not gone back yet."""
        self._candidate: Loaded | None = None
        self._verified: Loaded | None = None
        self._trusted = -1
        self._passed = 0
        self._version = 0
        self._computed = Computed()
        self._found_at = -1
        self._differed_at = -1
        self._went_back_to = -1
        self._source = ""
        self._times_back = 0
        self._verdict: tuple[int, ...] | None = None
        self._odd: set[int] = set()

    @property
    def altered(self) -> bool:
        """Whether a message of the step in progress was altered, and this worker has not taken it back yet."""
        return self._checking.altered

    # -- in a step

    def note_computed(self, batch: MiniBatch) -> None:
        """Hear that the slices of a step are computed here."""
        if not self._heals or self._whole is None:
            return
        for number, given in self._whole.gradients.given():
            if self._computed.note(batch.step, number, given) and self._verdict is None:
                self._odd.add(batch.owners[number])

    def fill(self, step: int, *, is_last: bool) -> GuardVote:
        """Return what this worker says as a step closes, all sums of which are known; if it ``is_last``, all there is is compared."""
        if is_last and self._policy != "off":
            self._fingerprint.compare_all()
        return GuardVote(
            altered=self._checking.found(),
            replicas=self._fingerprint.replicas,
            ranges=None if self._ranging is None else self._ranging.look(step),
            odd=None if self._ranging is None else Spread(max(self._odd, default=-1), min(self._odd, default=_NOBODY)),
        )

    def read(self, step: int, said: GuardVote) -> bool:
        """Hear what all say; return whether the step is not closed, and all go back or do it again.

        Raises:
            PeerFailed: if somebody died before all had heard more; who raises this knows that all go back, if they do.
            ReplicasDiffer: if training ends for it.
            MessageAltered: if training ends for that.
        """
        differ = said.replicas is not None and said.replicas.differs
        is_redone = said.altered is not None and self._checking.read(step, altered=said.altered)
        if is_redone and not differ:
            return True  # what else is odd in this step comes of it
        return said.replicas is not None and self._read_compared(step, said, differ=differ)

    def _read_compared(self, step: int, said: GuardVote, *, differ: bool) -> bool:
        if differ and self._policy == "stop":
            raise ReplicasDiffer(
                f"the replicas differ before step {step}: a worker computed wrong bits, or its weights were changed by hand"
            )
        if said.odd is not None and said.odd.largest >= 0 and self._verdict is None:
            # Several had the same wrong state, or one of them made all wrong: that tells nobody who it was.
            self._verdict = () if said.odd.differs else (said.odd.largest,)
            self._odd.clear()
        found = self._ranging is not None and said.ranges is not None and self._ranging.read(said.ranges)
        if self._heals and differ:
            self._check_is_soft(step)
        if self._heals and (differ or found):
            self.corrupt, self._found_at = True, step
        if differ:
            self._say_who_differs(step)
        elif self._warned:
            self._warned -= {self._fingerprint.compared(step, half) for half in HALVES}
        return self.corrupt

    def _check_is_soft(self, step: int) -> None:
        self._times_back += 1
        if step == self._differed_at or self._times_back > _MOST_TIMES_BACK:
            raise ReplicasDiffer(
                f"the replicas differ before step {step}, once more after all had gone back to step {self._went_back_to}: that is no soft "
                "error; look for a worker that computes otherwise than the others"
            )
        self._differed_at = step

    def _say_who_differs(self, step: int) -> None:
        """Find out what differs, and at whom, and write it down."""
        found: dict[tuple[str, ...], tuple[int, ...]] = {self._fingerprint.compared(step): ()}
        try:
            of_halves = self._minorities(self._fingerprint.of_halves(step))
            named = {self._fingerprint.compared(step, half): ranks for half, ranks in of_halves.items()}
            found = named or found
        finally:  # somebody may die meanwhile
            new = [where for where in found if self._heals or where not in self._warned]
            if self._fingerprint.is_of_all and self._warned:
                new = []
            if new and self._world.is_lead:
                ranks = sorted({rank for where in new for rank in found[where]})
                self._log.corruption_found("replicas", [name for where in new for name in where], ranks)
            self._warned |= set() if self._heals else set(found)

    def _minorities(self, mine: dict[str, dict[int, int]]) -> dict[str, tuple[int, ...]]:
        """Return which halves of what was compared differ, and the workers whose digest is not that of more than half.

        ``mine`` are the digests, by half and by worker that is played here.
        """
        if not mine:
            return {}
        members = self._world.comm.members
        told = self._world.comm.maximum([numbers.get(rank, -1) for numbers in mine.values() for rank in members])
        found = {}
        for i, half in enumerate(mine):
            numbers = dict(zip(members, told[i * len(members) :], strict=False))
            number, times = Counter(numbers.values()).most_common(1)[0]
            if times < len(numbers):
                minority = tuple(rank for rank in numbers if numbers[rank] != number)
                found[half] = minority if 2 * times > len(numbers) else ()
        return found

    # -- states that are kept

    def begin(self, keep: Keep) -> None:
        """Hear that all have the same state, that was loaded: it is right, as far as anybody can know."""
        if self._heals:
            self._begin_again(keep)
            self._verified = self._candidate
            self._trusted = self._world.step
            self._computed.forget()
        self.corrupt = False

    def newcomers_came(self, keep: Keep) -> None:
        """Hear that newcomers go on from what others gave them; they have kept nothing, so nobody has."""
        if self._heals:
            self._begin_again(keep)
            self._verified = None

    def _begin_again(self, keep: Keep) -> None:
        assert self._digest is not None
        room = self._candidate if self._candidate is not self._verified else None
        self._candidate = keep(room)
        self._passed, self._version = 0, self._digest.version

    def taken_back(self) -> None:
        """Hear that the step in progress is taken back."""
        self._checking.taken_back()

    def applied(self, keep: Keep) -> None:
        """Hear that a step is in the weights."""
        self._checking.applied()
        if not self._heals:
            return
        assert self._digest is not None
        step = self._world.step
        if 0 <= self._found_at < step and self._source:
            self._say_healed()
        rotation = max(_SHORTEST_ROTATION, self._digest.rotation)
        self._passed += 1
        if self._version != self._digest.version:  # there is more to compare than when the rotation began
            self._passed, self._version = 0, self._digest.version
        if self._passed < rotation:
            return
        assert self._candidate is not None
        room = self._verified if self._verified is not self._candidate else None
        self._verified = self._candidate
        self._trusted, self._passed = self._verified.step, 0
        self._times_back, self._differed_at = 0, -1
        if self._ranging is not None:
            self._ranging.passed()
        self._candidate = keep(room)
        self._computed.forget(self._trusted)

    def _say_healed(self) -> None:
        is_training = self._ranging is not None and self._ranging.is_training
        if self._world.is_lead:
            self._log.corruption_healed(
                self._verdict or (), self._found_at, self._went_back_to, self._source, is_training=is_training
            )
        self._source, self._verdict = "", None
        self._odd.clear()

    # -- going back

    def share(self) -> WayBack | None:
        """Hear, as everybody does who loads, whether all go back to what is known to be right; None if they do not."""
        if not self._heals:
            return None
        kept = -1 if self._verified is None else self._verified.step
        mine = (self._found_at if self.corrupt else -1, kept, ~kept, self._trusted)
        found_at, high, low, trusted = self._world.comm.maximum(mine)
        if found_at < 0:
            return None
        self.corrupt, self._found_at = True, found_at
        if high == ~low and high >= 0:
            return WayBack(self._verified, high)
        return WayBack(None, trusted)

    def went_back(self, way: WayBack, keep: Keep, source: str) -> None:
        """Hear that all have gone back, and from here on do the same again."""
        assert self._digest is not None
        step = self._world.step
        self._went_back_to, self._source = step, source
        self._verdict = None
        self._odd.clear()
        self._computed.go_back(step)
        if self._ranging is not None:
            self._ranging.went_back(self._found_at)
        if way.kept is None:
            self._begin_again(keep)
            self._verified, self._trusted = self._candidate, step
        else:
            self._candidate = self._verified
            self._passed, self._version = 0, self._digest.version
        self.corrupt = False

    def nothing_to_go_back_to(self) -> ReplicasDiffer:
        """Return what ends training where neither memory nor a checkpoint holds a state that is known to be right."""
        msg = (
            f"the replicas differ before step {self._found_at}, and there is nothing to go back to that is known to be right: "
            "workers have joined since, and no checkpoint is old enough; save more often (checkpoint_every)"
        )
        return ReplicasDiffer(msg)
