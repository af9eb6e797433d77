"""Checkpoint schedule, writers and retention. A checkpoint counts only once its step is durable.

How the workers agree without messages:

- All workers call :meth:`CheckpointManager.begin` for the same steps in the same order, and all members of a generation know the same members.
  So every worker knows which worker writes which part, provided that all began in the same generation.
- If a failure interrupts a checkpoint, the survivors begin it again (:meth:`CheckpointManager.is_outdated`): a failed
  worker may have held a part, and some workers may have begun before the failure and some after catching up.
- The lead completes a checkpoint, and only once its step is durable. No worker removes what another may be completing.
- Every wait is bounded. A checkpoint that fails costs a warning, and the next one is tried.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Sequence
from typing import Any

from holdfast.checkpoint import CheckpointStore, LoadedCheckpoint, WritePlan, take
from holdfast.checkpoint.files.registry import make_writer
from holdfast.checkpoint.interval import AdaptiveInterval
from holdfast.checkpoint.loading import OnDamaged
from holdfast.checkpoint.parts import Wanted, pick
from holdfast.checkpoint.retention import to_remove
from holdfast.checkpoint.writer import CheckpointWriter, WriteResult
from holdfast.config import Settings
from holdfast.errors import CheckpointCorrupt, CheckpointError, ConfigError

DEFAULT_DIR = "holdfast-checkpoint"
"""The default directory for a state that must be saved although no ``checkpoint_dir`` was given."""

SHARED_BYTES = 32 << 20
"""A larger state is written in parts by several workers; the lead alone writes a smaller one."""

_MOST_WRITERS = 128
"""Each part of a checkpoint is a file or object, with a description that the lead reads before it publishes."""


class CheckpointManager:
    """Takes checkpoints, in the ``background`` of the training loop if workers are separate processes."""

    def __init__(self, settings: Settings, *, background: bool) -> None:
        self._settings = settings
        self._background = background
        self.is_named = bool(settings.checkpoint_dir)
        """Whether the job has a directory for checkpoints."""
        self._every = settings.checkpoint_every if self.is_named else 0
        self.adaptive = AdaptiveInterval(settings.mtbf_s) if self.is_named and settings.checkpoint_auto else None
        self._is_requested = False
        self.token = 0
        """A number that all workers of this job share; unique among jobs and among (re)starts of this job."""
        self._begun = (-1, -1)
        self._writers: tuple[int, ...] = ()
        self._alive: frozenset[int] = frozenset()
        self._newest_intact: LoadedCheckpoint | None = None
        self._damaged: set[int] = set()
        self._failed: list[WriteResult] = []
        self._open(settings.checkpoint_dir or DEFAULT_DIR)

    def _open(self, url: str) -> None:
        format = self._settings.checkpoint_format
        self._one_writer = make_writer(format).one_writer
        self._checkpoints = CheckpointStore(url, format, self._settings.launch_dir)
        self._writer = CheckpointWriter(
            self._checkpoints,
            background=self._background,
            incremental=self._settings.incremental_checkpoints and not self._one_writer,
            after_commit=self._prune,
        )

    @property
    def url(self) -> str:
        """The directory or URL of the checkpoints."""
        return self._checkpoints.url

    @property
    def step(self) -> int | None:
        """The step whose checkpoint is being written here, or waits to be committed."""
        return self._writer.step

    @property
    def is_completing(self) -> bool:
        """Whether the commit or removal of that checkpoint was decided and is still in progress."""
        return self._writer.is_completing

    def check_empty(self) -> None:
        """Check that a new run does not mix its checkpoints with those of an older one.

        Raises:
            ConfigError: if there are complete checkpoints.
        """
        if old := self._checkpoints.steps() if self.is_named else []:
            raise ConfigError(
                f"checkpoint_dir {self.url} already holds a run up to step {max(old)}: "
                "resume it (--resume), or choose an empty directory"
            )

    # -- schedule

    def is_due(self, step: int) -> bool:
        """Return whether the state before ``step`` must be saved according to ``checkpoint_every``, or on request."""
        return step > 0 and (self._is_requested or (self._every > 0 and step % self._every == 0))

    def request(self) -> None:
        """Make a checkpoint due after the step in progress, if the job has a directory for it."""
        self._is_requested = self.is_named

    def is_due_now(self) -> bool:
        """Return whether a checkpoint is due by this worker's clock; False while the last one is still in progress."""
        return self.adaptive is not None and self.adaptive.is_due(time.monotonic()) and self.step is None

    def interval_s(self) -> float:
        """Return the seconds between checkpoints if they are scheduled by the clock, else 0."""
        return 0.0 if self.adaptive is None else self.adaptive.interval_s(time.monotonic())

    def note_failure(self) -> None:
        """Record that workers failed."""
        if self.adaptive is not None:
            self.adaptive.failed()

    # -- writing

    def choose_fallback(self) -> int:
        """Return a unique number for the directory if none was given and the default one is in use; else 0."""
        return 0 if self.is_named or not self._checkpoints.steps() else time.time_ns() // 1_000_000_000

    def start_over(self, token: int, fallback: int) -> None:
        """Forget checkpoints in progress; use a new :attr:`token`, and what :meth:`choose_fallback` returned at the lead."""
        self.token, self._begun = token, (-1, -1)
        if fallback:
            self._open(f"{DEFAULT_DIR}-{fallback}")

    def state(self) -> dict[str, Any]:
        """Return what a newcomer must know, as plain JSON."""
        return {
            "token": self.token,
            "url": self.url,
            "begun": self._begun[0],
            "requested": self._is_requested,
            "damaged": sorted(self._damaged),
        }

    def adopt(self, state: dict[str, Any]) -> None:
        """Adopt the survivors' :meth:`state`, as a newcomer."""
        if state["url"] != self.url:
            self._open(state["url"])
        # All workers begin the checkpoint in progress again, because this worker's part is missing.
        self.token, self._begun = state["token"], (state["begun"], -1)
        self._is_requested = state.get("requested", False)
        self._damaged.update(state.get("damaged", ()))

    def set_interval(self, steps: int, *, automatic: bool) -> None:
        """Save every ``steps`` steps from now on, or at the optimal interval if ``automatic``."""
        self._every = steps if self.is_named else 0
        if not (automatic and self.is_named):
            self.adaptive = None
        elif self.adaptive is None:
            self.adaptive = AdaptiveInterval(self._settings.mtbf_s)

    def note_alive(self, members: Collection[int]) -> None:
        """Set the surviving members: the parts of failed workers are no longer awaited."""
        self._alive = frozenset(members)

    def put_off(self, step: int) -> None:
        """Postpone saving the state before ``step``: its checkpoint counts as begun and outdated."""
        self._begun = (step, -1)

    def is_outdated(self, step: int, generation: int) -> bool:
        """Return whether the checkpoint of the state before ``step`` was begun by workers that are not all alive any more."""
        return self._begun[0] == step and self._begun[1] != generation

    def begin(
        self,
        step: int,
        state: dict[str, Any],
        info: dict[str, Any],
        writers: Sequence[tuple[int, ...]],
        me: tuple[int, ...],
        generation: int,
        *,
        distinct: bool = False,
    ) -> None:
        """Take a checkpoint of the state before ``step``; it does not count until it is committed.

        Args:
            step: Number of steps that the state contains.
            state: The same at all workers, except for strings and numbers: those of the lead are saved.
            info: Metadata; the lead's is saved.
            writers: The live processes, each as a tuple of its ranks; the first is the lead.
            me: The ranks of this process.
            generation: Generation of the communicator.
            distinct: Each writer, whatever the size, saves a part that no other writer has, and the lead also the common
                state; see :func:`~holdfast.checkpoint.take`. Processes not in ``writers`` save nothing.

        Raises:
            CheckpointError: if the state contains something that cannot be saved. Errors of the storage are returned by
                :meth:`poll` instead.
            ConfigError: if several writers save distinct parts in a format that supports one writer only.
        """
        if self._begun == (step, generation):
            return
        if distinct and len(writers) > 1 and self._one_writer:
            raise ConfigError(
                f"checkpoint_format {self._settings.checkpoint_format} can be written by one worker only, and the parts of this "
                f"model are held by {len(writers)}; choose safetensors, npz or hdf5"
            )
        self._begun, self._is_requested = (step, generation), False
        if self.adaptive is not None:
            self.adaptive.began(time.monotonic())
        self._writer.abandon()
        writers = writers if distinct else spread(writers)
        content = self._content(state, writers, me, distinct=distinct)
        if content is None:
            return
        try:
            self._writer.begin(step, content, info, f"{self.token:x}-{generation}")
        except CheckpointError as error:
            self._fail(step, error)
            return
        self._writers = tuple(ranks[0] for ranks in writers[: content.parts])
        self._alive = frozenset(self._writers)

    def _content(
        self, state: dict[str, Any], writers: Sequence[tuple[int, ...]], me: tuple[int, ...], *, distinct: bool
    ) -> WritePlan | None:
        """Return what this process writes, or None."""
        if me not in writers:
            return None
        part, parts = writers.index(me), len(writers)
        content = take(state, part, parts, distinct=True) if distinct else take(state)
        if not distinct and parts > 1 and content.size_bytes > SHARED_BYTES and not self._one_writer:
            return take(state, part, parts)
        return content if distinct or part == 0 else None

    def publish(self, stable_step: int, generation: int, *, is_lead: bool) -> None:
        """Commit the pending checkpoint once it is written, if the step before it is durable."""
        step, writers = self._writer.step, self._writers
        if step is None or step > stable_step + 1:
            return
        if is_lead:
            self._writer.commit(generation, may_come=lambda part: writers[part] in self._alive)
        else:
            self._writer.leave()

    def save_alone(self, step: int, content: WritePlan, info: dict[str, Any], attempt: int) -> WriteResult:
        """Write and complete a checkpoint by this worker alone, now.

        Args:
            step: Number of steps that the state contains; all of them must be durable.
            content: The whole state.
            info: Metadata.
            attempt: A number that no other worker uses for this step, ``>= 0``.
        """
        writer = CheckpointWriter(self._checkpoints, background=False, after_commit=self._prune)
        writer.begin(step, content, info, f"{self.token:x}-{attempt}")
        writer.commit(attempt)
        (outcome,) = writer.poll()
        return outcome

    def poll(self) -> list[WriteResult]:
        """Return the outcomes of checkpoints since the last call."""
        outcomes, self._failed = [*self._failed, *self._writer.poll()], []
        for outcome in outcomes:
            if self.adaptive is not None and (outcome.saved is not None or outcome.error is not None):
                self.adaptive.cost(outcome.held_s)
        return outcomes

    def finish(self) -> list[WriteResult]:
        """Wait, with a timeout, for checkpoints that are being committed, and return their outcomes."""
        try:
            self._writer.wait()
        except CheckpointError as error:
            self._fail(self._writer.step or 0, error)
        return self.poll()

    def last(self) -> int:
        """Return the step of the last complete checkpoint that is not known to be damaged, or -1."""
        return max((step for step in self._checkpoints.steps() if step not in self._damaged), default=-1)

    def drop(self) -> None:
        """Abandon the checkpoint that is not committed yet."""
        self._writer.abandon()

    def remove_after(self, newest: int) -> None:
        """Remove the checkpoints of steps after ``newest``, because they contain corrupt state.

        Raises:
            CheckpointError: if they cannot be removed.
        """
        self._writer.wait()
        for step in self._checkpoints.steps() if self.is_named else ():
            if step > newest and step not in self._damaged:
                self._checkpoints.remove(step)

    def _fail(self, step: int, error: CheckpointError) -> None:
        self._failed.append(WriteResult(step=step, saved=None, error=error, held_s=0.0, written_s=0.0))

    def _prune(self, saved: int) -> None:
        """Apply the retention policy; called outside the loop's thread when the checkpoint of a step has been completed."""
        settings, checkpoints = self._settings, self._checkpoints
        self._damaged.discard(saved)  # it has been saved again
        if not settings.keep_last:
            return
        # Damaged checkpoints do not count towards retention, and stay for inspection.
        good = [step for step in checkpoints.steps(checkpoints.clean) if step not in self._damaged]
        for step in to_remove(good, settings.keep_last, settings.keep_every):
            checkpoints.remove(step)

    # -- reading

    def newest(self, on_damaged: OnDamaged, *, keep: bool = True) -> int | None:
        """Return the newest step whose checkpoint is intact in every byte, or None.

        Args:
            on_damaged: Called with each damaged checkpoint that is skipped, newest first.
            keep: Keep the state in memory for :meth:`load`, which then need not read it again. Otherwise only a few blocks
                are held at a time: the state of a pipeline or sharded model may exceed one worker's memory.
        """

        def note(step: int, damage: CheckpointCorrupt) -> None:
            self._damaged.add(step)
            on_damaged(step, damage)

        self._writer.wait()
        self._newest_intact = None
        if not self.is_named:
            return None
        if not keep:
            return self._checkpoints.newest_intact(note)
        self._newest_intact = self._checkpoints.load_newest(note)
        return None if self._newest_intact is None else self._newest_intact.step

    def load(self, step: int, only: Wanted | None = None) -> LoadedCheckpoint:
        """Return the state before ``step``, or the part selected by ``only``; see :func:`~holdfast.checkpoint.loading.load`."""
        # the newest intact one, which the lead has chosen: any worker may have to know whether a later one counts
        self._damaged.update(later for later in self._checkpoints.steps() if later > step)
        checkpoint, self._newest_intact = self._newest_intact, None
        if checkpoint is None or checkpoint.step != step:
            return self._checkpoints.load(step, only=only)
        return checkpoint if only is None else dataclasses.replace(checkpoint, state=pick(checkpoint.state, only))

    def info(self, step: int) -> dict[str, Any]:
        """Return the metadata saved with the state before ``step``."""
        if self._newest_intact is not None and self._newest_intact.step == step:
            return self._newest_intact.info
        return self._checkpoints.info(step)


def spread(processes: Sequence[tuple[int, ...]]) -> Sequence[tuple[int, ...]]:
    """Return the processes that write a state which all of them have: at most :data:`_MOST_WRITERS`, the lead first.

    They are evenly spread over the ranks, so that each node writes about as much as any other.
    """
    return processes[:: -(-len(processes) // _MOST_WRITERS)]
