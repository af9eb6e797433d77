"""The output of a training loop: its records, and its messages to the user."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from holdfast.base.orders import base_of
from holdfast.base.side_work import say
from holdfast.checkpoint.writer import WriteResult
from holdfast.comm.launchers import chosen
from holdfast.data.ledger import SampleCounts
from holdfast.data.plan import MiniBatch, SamplePlan
from holdfast.records.certified import ChainLink, HashedState
from holdfast.records.paths import media_dir, media_elsewhere_path
from holdfast.records.types import (
    CheckpointSaved,
    CorruptionFound,
    CorruptionHealed,
    FailureSeen,
    Finished,
    Record,
    Recovered,
    Reinitialised,
    RunStarted,
    SamplesLost,
    StateHashed,
    StepCommitted,
)
from holdfast.setting_choices import AUTO
from holdfast.state.context import JobContext, RebuildInfo, RecoveryContext

_WRONG = {
    "replicas": "replicas differ",
    "range": "a value is far out of range",
    "message": "a message was altered in transit",
}
"""Readable descriptions of what the guard found, by ``what`` of :class:`CorruptionFound`."""


class Media(Protocol):
    """An image or a histogram that a script logs; see :mod:`holdfast.models.media`."""

    def record(self, name: str, file: Path | None) -> Record:
        """Return its record, without stamps; an image is written to ``file``, None: nowhere."""
        ...


class RunLog:
    """Makes the records of a training loop and passes them to the job's logger.

    Args:
        job: The job context that the records describe.
    """

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._phase = "start"
        self._last_step: list[Record] = []
        self._num_media = 0
        self._has_warned_of_media = False

    def mark(self, phase: str) -> None:
        """Mark the phase that this worker is in."""
        self._phase = phase
        self._job.beacon.mark(phase, self._job.step)

    def write(self, record: Record) -> None:
        """Write a record with this worker's stamps."""
        self._job.log.write(record)

    def started(self, plan: SamplePlan, num_buckets: int, parameters: int) -> None:
        """Training begins or resumes."""
        job, settings = self._job, self._job.settings
        if settings.order == AUTO and base_of(job.loops.order) != "fold" and not job.loops.finished:
            self.print_line(
                f"gradients of this run are added in order {job.loops.order}, also when it is resumed (--order)"
            )
        self.write(
            RunStarted(
                fabric=chosen(settings.fabric),
                strategy=job.live.strategy,
                seed=plan.seed,
                workers=len(job.comm.members),
                slices=plan.slices,
                order=job.loops.order,
                split=plan.split,
                batch=plan.batch,
                rescale=settings.rescale,
                overlap_optimizer=settings.overlap_optimizer,
                steps_planned=job.loops.first_step + plan.num_steps if plan.stream is None else 0,
                samples_planned=plan.epochs * plan.epoch_samples,
                num_buckets=num_buckets,
                parameters=parameters,
                link=job.committed.link,
                platform=job.platform.properties,
                given_up=job.platform.given_up,
            )
        )

    # -- steps

    def committed(
        self,
        batch: MiniBatch,
        samples: int,
        workers: int,
        lost: dict[int, tuple[int, ...]],
        link: ChainLink | None = None,
    ) -> None:
        """The optimizer step was applied.

        Args:
            batch: The mini-batch of the step.
            samples: Samples that contributed to the weights.
            workers: Workers that took part.
            lost: By slice, the buckets that lack it.
            link: The link of the hash chain, if there is a certificate.
        """
        job = self._job
        place: dict[str, Any] = {"rank": min(job.comm.local_ranks), "step": batch.step, "epoch": batch.epoch}
        committed = StepCommitted(
            **place, samples=samples, workers=workers, metrics=job.committed.metrics, **_certified(link)
        )
        losses = [
            SamplesLost(**place, ids=tuple(int(i) for i in batch.slices[number]), buckets=buckets)
            for number, buckets in lost.items()
        ]
        self._last_step = [job.log.stamped(record) for record in (committed, *losses)]
        if link is not None and link.whole:
            self._whole_hashed(batch.step, link)
        self.write_last_step()

    def _whole_hashed(self, step: int, link: ChainLink) -> None:
        """The whole state was hashed. In a split model each worker writes its parts, otherwise the lead writes."""
        if all(hashed.parts for hashed in link.tensors):
            self.hashed(step, link.before, link.tensors)
            return
        self._last_step += [self._job.log.stamped(_state_hashed(hashed, step, link.before)) for hashed in link.tensors]
        if not self._job.is_lead:
            none = [dataclasses.replace(hashed, tensors={}) for hashed in link.tensors]
            self.hashed(step, link.before, none)

    def hashed(self, step: int, link: str, tensors: Sequence[HashedState]) -> None:
        """All of the state before ``step`` was hashed; see :class:`StateHashed`."""
        for each in tensors:
            self.write(_state_hashed(each, step, link))

    def write_last_step(self) -> None:
        """Write the record of the last step if this worker has become the lead since."""
        if self._job.is_lead:
            for record in self._last_step:
                self.write(record)
            self._last_step = []

    def media(self, step: int, name: str, media: Media) -> None:
        """The script logged an image or a histogram; recorded before the commit vote, so that a committed step has it."""
        if not self._job.settings.run_dir:
            return
        run_dir, file = Path(self._job.settings.run_dir), None
        if (folder := media_dir(run_dir)).is_dir():
            self._num_media += 1
            file = folder / f"{step}-{self._job.comm.local_ranks[0]}-{self._num_media}.png"
        elif not media_elsewhere_path(run_dir).exists():
            return
        try:
            self.write(dataclasses.replace(media.record(name, file), step=step))
        except OSError as error:
            if not self._has_warned_of_media:
                self.warn(f"{name} of step {step} is not logged, and maybe more: {error.strerror}")
            self._has_warned_of_media = True

    # -- failures

    def failure_seen(self) -> None:
        """A collective failed, in the phase that was marked last."""
        dead, local_ranks = self._job.comm.failed(), self._job.comm.local_ranks
        self.write(
            FailureSeen(
                rank=next((rank for rank in local_ranks if rank not in dead), local_ranks[0]), phase=self._phase
            )
        )

    def recovered(self, recovery: RecoveryContext, held_s: float) -> None:
        """The survivors resume, with newcomers if there are any; ``held_s`` is how long the newcomers delayed them."""
        job, members, before = self._job, self._job.comm.members, recovery.before
        lost = tuple(r for r in before if r not in members)
        joined = tuple(r for r in members if before and r not in before)
        self.write_last_step()  # the lead that should have written it may have just died
        for rank in job.comm.local_ranks:
            self.write(
                Recovered(
                    rank=rank,
                    lost=lost,
                    survivors=members,
                    decision=recovery.decision,
                    redone_steps=recovery.redone_steps,
                    generation=job.comm.generation,
                    joined=joined,
                    held_s=held_s,
                    orders=dict(recovery.orders),
                    times_s=dict(recovery.times_s),
                )
            )
        self.print_line(f"lost {list(lost)} at step {job.step}; {len(members)} workers resume ({recovery.decision})")

    def reinitialised(self, rebuilding: RebuildInfo) -> None:
        """The application was rebuilt and resumes."""
        job = self._job
        for rank in job.comm.local_ranks:
            self.write(
                Reinitialised(
                    rank=rank,
                    generation=job.comm.generation,
                    source="checkpoint" if job.rebuilds.snapshot is None else job.settings.reinit_from,
                    form="replaced" if len(job.comm.members) >= job.settings.workers else "survivors",
                    snapshot_s=rebuilding.snapshot_s,
                    rebuild_s=rebuilding.connected_s - rebuilding.unwound_s,
                    load_s=rebuilding.loaded_s - rebuilding.connected_s,
                )
            )

    def corruption_found(self, what: str, where: Sequence[str], ranks: Sequence[int]) -> None:
        """The guard found corruption; the arguments are those of :class:`CorruptionFound`."""
        job = self._job
        policy = job.settings.guard
        self.write(CorruptionFound(what=what, where=tuple(where), ranks=tuple(ranks), policy=policy))
        whose = f" (worker {', '.join(map(str, ranks))})" if ranks else ""
        self.warn(f"corruption found in step {job.step}: {_WRONG[what]}{whose} in {_some(where)}")

    def corruption_healed(
        self, ranks: Sequence[int], found_at: int, step: int, source: str, *, is_training: bool
    ) -> None:
        """All workers are past the step in which corruption was found; see :class:`CorruptionHealed`."""
        self.write(
            CorruptionHealed(
                ranks=tuple(ranks), found_at=found_at, went_back_to=step, source=source, is_training=is_training
            )
        )
        if is_training:
            self.warn(f"step {found_at} gave the same bits again: the values found come from the training itself")

    # -- checkpoints, the end

    def saved(self, outcome: WriteResult) -> None:
        """A checkpoint was committed, or could not be written."""
        job, kept = self._job, outcome.saved
        if outcome.error is not None:
            what = "is not complete" if kept is None else "is complete, but an error followed"
            self.warn(f"the checkpoint of step {outcome.step} {what}: {outcome.error}")
        if kept is None:
            return
        self.write(
            CheckpointSaved(
                rank=job.comm.members[0],
                step=kept.step,
                path=kept.path,
                size_bytes=kept.size_bytes,
                seconds=outcome.held_s,
                interval_s=job.checkpoints.interval_s(),
                new_bytes=kept.new_bytes,
            )
        )

    def finished(self, outcome: str, sha256s: Mapping[int, tuple[str, str]], account: SampleCounts) -> None:
        """This worker passed the final gate; the job context keeps the records. The arguments are those of :meth:`ends`."""
        job = self._job
        job.loops.finished = [job.log.write(record) for record in self.ends(outcome, sha256s, account)]

    def ends(self, outcome: str, sha256s: Mapping[int, tuple[str, str]], account: SampleCounts) -> list[Finished]:
        """Return the records of the end of a loop, without stamps.

        Args:
            outcome: See :class:`Finished`.
            sha256s: For each rank of this process, the hash of its model, and the hash including the optimizer state.
            account: The account of the samples.
        """
        job = self._job
        return [
            Finished(
                rank=rank,
                outcome=outcome,
                sha256=sha256s[rank][0],
                state_sha256=sha256s[rank][1],
                planned=account.planned,
                committed=account.committed,
                lost=account.lost,
                repeated=account.repeated,
                metrics=job.committed.metrics,
                checkpoint="" if outcome == "done" else str(job.checkpoints.url),
                link=job.committed.link,
            )
            for rank in job.comm.local_ranks
        ]

    # -- messages to the user

    def warn(self, text: str) -> None:
        """Report a problem that does not end training."""
        self._job.warn(text)

    def print_line(self, text: str) -> None:
        """Report progress to the user; under the launcher, the records do that."""
        if self._job.is_lead and not self._job.settings.run_dir:
            say(text)


def _certified(link: ChainLink | None) -> dict[str, Any]:
    """Return the fields of a step's record that describe its hash-chain link."""
    if link is None:
        return {}
    names = ("link", "ids", "figures", "state", "whole", "where")
    return {name: getattr(link, name) for name in names}


def _state_hashed(hashed: HashedState, step: int, link: str) -> StateHashed:
    return StateHashed(
        rank=hashed.rank, step=step, link=link, tensors=hashed.tensors, part=hashed.part, parts=hashed.parts
    )


def _some(names: Sequence[str]) -> str:
    """Return the first few of many names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
