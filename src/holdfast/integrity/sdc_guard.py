"""The silent-corruption guard in a training loop: its part of the commit vote, verified snapshots, and rollback to them.

A difference between replicas persists. So a snapshot is *verified* once a whole rotation of fingerprints has passed without
a difference. Two snapshots are kept: the verified one and its successor. On a finding, no worker
commits the step. All workers rendezvous (:mod:`holdfast.recovery.protocol`), roll back to the verified snapshot, and replay the steps
since then. A step is a function of the state before it, so the result is bit-identical to that of an undisturbed run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.checkpoint import LoadedCheckpoint
from holdfast.data.plan import MiniBatch
from holdfast.errors import ReplicasDiffer
from holdfast.integrity.checksums import MessageChecks
from holdfast.integrity.fingerprint import HALVES
from holdfast.integrity.guarded import GuardedModel
from holdfast.integrity.range_check import RangeCheck
from holdfast.integrity.recompute_check import RecomputeCheck
from holdfast.integrity.state_hashes import Fingerprint
from holdfast.recovery.vote import GuardVote, MinMax
from holdfast.state.context import JobContext
from holdfast.state.run_log import RunLog

_SHORTEST_ROTATION = 32
"""Minimum number of steps between two snapshots: copying a small model more often would cost more than training it."""
_UNSET = 1 << 30
"""No rank: larger than any."""
_MOST_TIMES_BACK = 3
"""More rollbacks to the same state than this, without lasting progress, are not a soft error."""

Keep = Callable[[LoadedCheckpoint | None], LoadedCheckpoint]
"""Takes a snapshot of the state before the step in progress, reusing the memory of an older snapshot if one is given."""


@dataclass(frozen=True, slots=True)
class HealSnapshot:
    """The target of a rollback."""

    kept: (
        LoadedCheckpoint | None
    )  # the snapshot that all workers have; None: the state of a checkpoint, or the initial one
    newest: int  # the newest step whose state is known to have been right, -1 for none


class SdcGuard:
    """Compares replicas under the policy :attr:`Settings.guard`; ``whole`` is None for pipeline and sharded models."""

    def __init__(self, job: JobContext, whole: GuardedModel | None, fingerprint: Fingerprint, log: RunLog) -> None:
        self._job = job
        self._whole = whole
        self._fingerprint = fingerprint
        self._log = log
        self._policy = job.settings.guard
        self._heals = self._policy == "heal"
        self._ranging: RangeCheck | None = None
        self._digest = fingerprint.digest
        if self._whole is not None and self._digest is not None and self._policy in ("warn", "heal"):
            self._ranging = RangeCheck(job, self._whole, self._digest, log)
        self._checking = MessageChecks(job, log)
        self._warned: set[tuple[str, ...]] = set()
        self.corrupt = False
        """Whether corruption was found, on any worker, and this worker has not rolled back yet."""
        self._candidate: LoadedCheckpoint | None = None
        self._verified: LoadedCheckpoint | None = None
        self._trusted = -1
        self._passed = 0
        self._version = 0
        self._computed = RecomputeCheck()
        self._found_at = -1
        self._differed_at = -1
        self._rolled_back_to = -1
        self._source = ""
        self._times_back = 0
        self._verdict: tuple[int, ...] | None = None
        self._odd: set[int] = set()
        self._is_alone = False

    @property
    def altered(self) -> bool:
        """Whether a message of the step in progress was altered, and this worker has not discarded the step yet."""
        return self._checking.altered

    # -- in a step

    def note_computed(self, batch: MiniBatch) -> None:
        """Store the digests of the slices of a step that were computed here."""
        if not self._heals or self._whole is None:
            return
        for number, data in self._whole.gradients.given():
            if self._computed.note(batch.step, number, data) and self._verdict is None:
                self._odd.add(batch.owners[number])

    def fill(self, step: int, *, is_last: bool) -> GuardVote:
        """Return this worker's vote on a step whose all-reduces are complete; if it ``is_last``, the whole state is compared."""
        if is_last and self._policy != "off":
            self._fingerprint.compare_all()
        self._warn_if_alone(step)
        return GuardVote(
            altered=self._checking.found(),
            replicas=self._fingerprint.replicas,
            ranges=None if self._ranging is None else self._ranging.check(step),
            odd=None if self._ranging is None else MinMax(max(self._odd, default=-1), min(self._odd, default=_UNSET)),
        )

    def _warn_if_alone(self, step: int) -> None:
        was_alone, self._is_alone = self._is_alone, len(self._job.comm.members) == 1
        if self._is_alone and not was_alone and self._policy in ("warn", "heal"):
            self._log.warn(
                f"trains alone from step {step} on: --guard {self._policy} has no replica to compare with, and finds only "
                "values far out of range"
            )

    def read(self, step: int, vote: GuardVote) -> bool:
        """Read the reduced votes; return whether the step is not committed and all workers roll back or redo it.

        Raises:
            PeerFailed: if a worker failed before all had the details; the caller knows whether all roll back.
            ReplicasDiffer: if the job stops because replicas differ.
            MessageAltered: if the job stops because of altered messages.
        """
        differ = vote.replicas is not None and vote.replicas.differs
        is_redone = vote.altered is not None and self._checking.read(step, altered=vote.altered)
        if is_redone and not differ:
            return True  # any other finding in this step is a consequence
        return vote.replicas is not None and self._read_compared(step, vote, differ=differ)

    def _read_compared(self, step: int, vote: GuardVote, *, differ: bool) -> bool:
        if differ and self._policy == "stop":
            names = self._fingerprint.compared(step)
            where = f"{', '.join(names[:3])}{f' or {len(names) - 3} others' if len(names) > 3 else ''}"
            raise ReplicasDiffer(
                f"the replicas differ before step {step}, in {where}: a worker computed wrong bits, or the script changed"
                " its model differently on each worker, such as once a slice in the forward pass, by random numbers of its"
                " own, or by hand"
            )
        if vote.odd is not None and vote.odd.largest >= 0 and self._verdict is None:
            # Several workers had the same wrong state, or one of them corrupted all: the culprit cannot be identified.
            self._verdict = () if vote.odd.differs else (vote.odd.largest,)
            self._odd.clear()
        is_out_of_range = self._ranging is not None and vote.ranges is not None and self._ranging.read(vote.ranges)
        if self._heals and differ:
            self._check_is_soft(step)
        if self._heals and (differ or is_out_of_range):
            self.corrupt, self._found_at = True, step
        if differ:
            self._report_difference(step)
        elif self._warned:
            self._warned -= {self._fingerprint.compared(step, half) for half in HALVES}
        return self.corrupt

    def _check_is_soft(self, step: int) -> None:
        self._times_back += 1
        if step == self._differed_at or self._times_back > _MOST_TIMES_BACK:
            raise ReplicasDiffer(
                f"the replicas differ before step {step}, again after a rollback to step {self._rolled_back_to}: this is not a soft "
                "error; look for a worker that computes different results than the others"
            )
        self._differed_at = step

    def _report_difference(self, step: int) -> None:
        """Find which tensors differ on which workers, and record it."""
        culprits: dict[tuple[str, ...], tuple[int, ...]] = {self._fingerprint.compared(step): ()}
        try:
            of_halves = self._minorities(self._fingerprint.of_halves(step))
            named = {self._fingerprint.compared(step, half): ranks for half, ranks in of_halves.items()}
            culprits = named or culprits
        finally:  # a worker may fail meanwhile
            new = [where for where in culprits if self._heals or where not in self._warned]
            if self._fingerprint.is_of_all and self._warned:
                new = []
            if new and self._job.is_lead:
                ranks = sorted({rank for where in new for rank in culprits[where]})
                self._log.corruption_found("replicas", [name for where in new for name in where], ranks)
            self._warned |= set() if self._heals else set(culprits)

    def _minorities(self, digests: dict[str, dict[int, int]]) -> dict[str, tuple[int, ...]]:
        """Return the halves that differ, each with the workers whose digest is not that of the majority.

        ``digests`` are given by half and by local rank.
        """
        if not digests:
            return {}
        members = self._job.comm.members
        maxima = self._job.comm.maximum([numbers.get(rank, -1) for numbers in digests.values() for rank in members])
        minorities = {}
        for i, half in enumerate(digests):
            numbers = dict(zip(members, maxima[i * len(members) :], strict=False))
            number, times = Counter(numbers.values()).most_common(1)[0]
            if times < len(numbers):
                minority = tuple(rank for rank in numbers if numbers[rank] != number)
                minorities[half] = minority if 2 * times > len(numbers) else ()
        return minorities

    # -- snapshots

    def begin(self, keep: Keep) -> None:
        """Start from a state that all workers loaded alike; it is taken to be right."""
        if self._heals:
            self._begin_again(keep)
            self._verified = self._candidate
            self._trusted = self._job.step
            self._computed.forget()
        self.corrupt = False

    def newcomers_joined(self, keep: Keep) -> None:
        """Restart the rotation after newcomers adopted the state: they have no snapshots, so there is no common one."""
        if self._heals:
            self._begin_again(keep)
            self._verified = None

    def _begin_again(self, keep: Keep) -> None:
        assert self._digest is not None
        room = self._candidate if self._candidate is not self._verified else None
        self._candidate = keep(room)
        self._passed, self._version = 0, self._digest.version

    def discarded(self) -> None:
        """Discard the findings of the step in progress."""
        self._checking.discarded()

    def applied(self, keep: Keep) -> None:
        """Update snapshots and counters after a step has been applied to the weights."""
        self._checking.applied()
        if not self._heals:
            return
        assert self._digest is not None
        step = self._job.step
        if 0 <= self._found_at < step and self._source:
            self._report_healed()
        rotation = max(_SHORTEST_ROTATION, self._digest.rotation)
        self._passed += 1
        if self._version != self._digest.version:  # the set of tensors has grown since the rotation began
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

    def _report_healed(self) -> None:
        is_training = self._ranging is not None and self._ranging.is_training
        if self._job.is_lead:
            self._log.corruption_healed(
                self._verdict or (), self._found_at, self._rolled_back_to, self._source, is_training=is_training
            )
        self._source, self._verdict = "", None
        self._odd.clear()

    # -- rollback

    def share_state(self) -> HealSnapshot | None:
        """Agree with all other workers on the rollback target, as each worker that loads must; None if there is no rollback."""
        if not self._heals:
            return None
        kept = -1 if self._verified is None else self._verified.step
        values = (self._found_at if self.corrupt else -1, kept, ~kept, self._trusted)
        found_at, high, low, trusted = self._job.comm.maximum(values)
        if found_at < 0:
            return None
        self.corrupt, self._found_at = True, found_at
        if high == ~low and high >= 0:
            return HealSnapshot(self._verified, high)
        return HealSnapshot(None, trusted)

    def rolled_back(self, way: HealSnapshot, keep: Keep, source: str) -> None:
        """Record that all workers have rolled back and replay from here."""
        assert self._digest is not None
        step = self._job.step
        self._rolled_back_to, self._source = step, source
        self._verdict = None
        self._odd.clear()
        self._computed.go_back(step)
        if self._ranging is not None:
            self._ranging.rolled_back(self._found_at)
        if way.kept is None:
            self._begin_again(keep)
            self._verified, self._trusted = self._candidate, step
        else:
            self._candidate = self._verified
            self._passed, self._version = 0, self._digest.version
        self.corrupt = False

    def nothing_to_go_back_to(self) -> ReplicasDiffer:
        """Return the error for corruption without any state, in memory or in a checkpoint, that is known to be right."""
        msg = (
            f"the replicas differ before step {self._found_at}, and no state to roll back to is known to be right: "
            "workers have joined since, and no checkpoint is old enough; save more often (checkpoint_every)"
        )
        return ReplicasDiffer(msg)
