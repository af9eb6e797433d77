"""Writing a checkpoint in the background of the training loop.

The loop is blocked while this worker's part is copied, but not while it is digested and written. There is one such copy
at a time: a loop that begins the next checkpoint before the last one is written waits, because the disk is slower than
the loop.

::

    begin      copies, possibly after waiting for the last one    the loop is blocked
               writes the tensors                                 in the background
    commit     the step is durable: writes the manifest           in the background
    abandon    the step will not become durable
    poll       returns the outcomes
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.base.side_work import run_aside
from holdfast.checkpoint.reuse import BlockReuse
from holdfast.checkpoint.save import PendingCheckpoint, SavedCheckpoint
from holdfast.checkpoint.snapshot import SnapshotBuffer, in_host_memory
from holdfast.checkpoint.store import CheckpointStore
from holdfast.checkpoint.write_plan import WritePlan
from holdfast.errors import CheckpointError

logger = logging.getLogger(__name__)

_LIMIT_S = 600.0
"""Time limit for the storage to take a checkpoint."""

_PART_WAIT_S = 10.0
_PART_PATIENCE = 5.0
"""Time limit for other writers' parts: this many seconds, plus this multiple of the local writing time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """The outcome of a checkpoint."""

    step: int  # Its step
    saved: SavedCheckpoint | None  # The complete checkpoint; None if it failed, or this worker wrote only a part
    error: Exception | None  # Why it is not complete, or an error after completion; None if there was none
    held_s: float  # Seconds that the loop was blocked
    written_s: float  # Seconds of digesting and writing


@dataclass(slots=True)
class _Job:
    step: int
    content: WritePlan
    info: dict[str, Any]
    token: str
    background: bool
    held_s: float = 0.0
    written_s: float = 0.0
    saved: SavedCheckpoint | None = None
    error: Exception | None = None
    pending: PendingCheckpoint | None = None
    finish: Callable[[PendingCheckpoint], SavedCheckpoint | None] | None = None
    decided: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    abandoned: bool = False
    overdue: bool = False


class CheckpointWriter:
    """Writes checkpoints one after another, and calls ``after_commit`` with the step of each that is complete.

    With ``background`` it does so in a thread, otherwise before :meth:`begin` and :meth:`commit` return; so it does if the
    system refuses the thread. If it is
    ``incremental`` and the storage has links, blocks that an earlier checkpoint of this writer holds are not written again.
    """

    def __init__(
        self,
        checkpoints: CheckpointStore,
        *,
        background: bool,
        incremental: bool = False,
        after_commit: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._checkpoints = checkpoints
        self._background = background
        self._after_commit = after_commit
        self._reuse = BlockReuse() if incremental and checkpoints.storage.has_links else None
        self._snapshot = SnapshotBuffer()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._job: _Job | None = None
        self._outcomes: list[WriteResult] = []

    @property
    def step(self) -> int | None:
        """The step whose checkpoint is being written, or waits to be committed."""
        return None if self._job is None else self._job.step

    @property
    def is_completing(self) -> bool:
        """Whether commit or removal of a checkpoint was decided and is still in progress."""
        return self._job is not None and self._job.decided.is_set() and not self._job.done.is_set()

    def begin(self, step: int, content: WritePlan, info: dict[str, Any], token: str = "") -> None:
        """Write a checkpoint; an undecided one is abandoned. ``content`` may change once this returns.

        Raises:
            CheckpointError: if the storage has not taken the last one within ten minutes, or there is no memory for a copy.
        """
        start_s = time.monotonic()
        self.abandon()
        self.wait()
        background = self._background and self._has_thread()
        own = self._copy(step, content) if background else in_host_memory(content)
        self._job = job = _Job(step, own, info, token, background)
        if not background:
            self._write(job)
        job.held_s = time.monotonic() - start_s
        if background:
            self._jobs.put(job)

    def _copy(self, step: int, content: WritePlan) -> WritePlan:
        try:
            return self._snapshot.copy(content)
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(
                f"there is no memory for a copy of the {content.size_bytes} bytes that are saved of step {step}: {error}"
            ) from error

    def commit(self, generation: int, *, may_come: Callable[[int], bool] = lambda part: True) -> None:
        """Complete the checkpoint once it is written; see :meth:`PendingCheckpoint.commit`.

        Args:
            generation: Generation of the communicator.
            may_come: Returns whether the writer of a part is alive, so that the part may still arrive. Called in the background.
        """
        job = self._job

        def complete(pending: PendingCheckpoint) -> SavedCheckpoint:
            assert job is not None
            return pending.commit(generation, _PART_WAIT_S + _PART_PATIENCE * job.written_s, may_come)

        self._decide(complete)

    def leave(self) -> None:
        """Let another writer complete the checkpoint, once this worker's part is written."""
        self._decide(lambda _: None)

    def abandon(self) -> None:
        """Remove what was written, unless keeping it was decided.

        The writer of any part but part 0 leaves its files: another worker may be about to complete the checkpoint.
        """

        def abandon(pending: PendingCheckpoint) -> None:
            if pending.part == 0:
                pending.abandon()

        if self._job is not None and not self._job.decided.is_set():
            self._job.abandoned = True
        self._decide(abandon)

    def poll(self) -> list[WriteResult]:
        """Return the outcomes of checkpoints since the last call; does not wait."""
        self._collect()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _collect(self) -> None:
        job = self._job
        if job is not None and job.done.is_set():
            self._job = None
            self._outcomes.append(
                WriteResult(step=job.step, saved=job.saved, error=job.error, held_s=job.held_s, written_s=job.written_s)
            )

    def wait(self) -> None:
        """Wait until the decided checkpoint is finished, successfully or not.

        Raises:
            CheckpointError: if that takes more than ten minutes; later calls raise it immediately.
        """
        job = self._job
        if job is None or not job.decided.is_set():
            return
        if not job.done.wait(0.0 if job.overdue else _LIMIT_S):
            job.overdue = True
            raise CheckpointError(
                f"the checkpoint of step {job.step} was not written to {self._checkpoints.url} within {_LIMIT_S:g} s; check that storage"
            )
        self._collect()

    def close(self, within_s: float = 0.0) -> None:
        """Abandon an undecided checkpoint and end the thread; wait for that up to ``within_s`` seconds."""
        self.abandon()
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(within_s)
        self._snapshot.close()

    def _decide(self, finish: Callable[[PendingCheckpoint], SavedCheckpoint | None]) -> None:
        job = self._job
        if job is None or job.decided.is_set():
            return
        job.finish = finish  # first: the thread reads it as soon as it is decided
        job.decided.set()
        if not job.background:
            start_s = time.monotonic()
            self._complete(job)
            job.held_s += time.monotonic() - start_s

    # -- the thread

    def _has_thread(self) -> bool:
        """Start the thread if it does not run; return whether it does."""
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name="holdfast-checkpoint", daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError) as error:
                logger.warning("a checkpoint is written while training waits for it: %s", error)
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._write(job)
            job.decided.wait()
            self._complete(job)

    def _write(self, job: _Job) -> None:
        start_s = time.monotonic()
        try:
            job.pending = self._checkpoints.write(job.step, job.content, job.info, job.token, self._reuse)
        except Exception as error:
            job.error = error
        job.written_s = time.monotonic() - start_s
        if job.pending is not None and self._reuse is not None:
            # Now, because in the background this thread has nothing to do until the step is durable.
            try:
                self._reuse.remember(job.pending.manifest, job.content)
            except Exception as error:  # it only makes the next checkpoint cheaper
                self._reuse = BlockReuse()
                text = "the blocks of checkpoint %d were not remembered, the next one is full: %s: %s"
                why = type(error).__name__, error
                run_aside("logging of checkpoints", lambda: logger.warning(text, job.step, *why), None)

    def _complete(self, job: _Job) -> None:
        start_s = time.monotonic()
        try:
            if job.pending is not None and job.finish is not None:
                job.saved = job.finish(job.pending)
            if job.saved is not None:
                self._after_commit(job.step)
        except Exception as error:
            job.error = error
        if job.abandoned:
            job.error = None  # the checkpoint was abandoned
            if self._reuse is not None:
                self._reuse.forget(job.step)
        elif job.error is not None and job.saved is None:
            run_aside("removing an incomplete checkpoint", lambda: self._clear_away(job), None)
        job.written_s += time.monotonic() - start_s
        job.done.set()

    def _clear_away(self, job: _Job) -> None:
        """Free space: the files of a checkpoint that cannot be completed might fill the disk."""
        if job.error is not None and isinstance(job.error.__cause__, TimeoutError):
            return  # the manifest may still arrive, and the files that it names must exist then
        if job.token and job.content.part == 0:
            try:
                self._checkpoints.discard(job.step, job.token)
            except CheckpointError as error:
                job.error = CheckpointError(f"{job.error}; and what was written could not be removed: {error}")
