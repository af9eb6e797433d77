"""When a checkpoint is taken, who writes it, and when it may count: only once its step is stable.

What the workers know of it, and what makes them agree without a message:

- All ask :meth:`Keeper.begin` for the same steps, in the same order, and the members of a generation are the same for all.
  So who writes which part is known to all, as long as all began in the same generation.
- A step that was begun and is still in progress after a failure is begun again, by the survivors (:meth:`Keeper.is_outdated`):
  the dead may have held a part, and some may have begun before the failure and some, who caught up, after it.
- Whoever leads completes a checkpoint, and only when its step is stable. Nobody removes what another may be completing.
- No wait is without an end. A checkpoint that does not come off costs a warning, and the next one is tried.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from holdfast.checkpoint import Checkpoints, Content, Loaded, take
from holdfast.checkpoint.interval import Adaptive
from holdfast.checkpoint.parts import Wanted, pick
from holdfast.checkpoint.retention import to_remove
from holdfast.checkpoint.writer import Outcome, Writer
from holdfast.config import Settings
from holdfast.errors import CheckpointCorrupt, CheckpointError, ConfigError

DEFAULT_DIR = "holdfast-checkpoint"
"""Where a state is saved that must be saved although no place was named."""

SHARED_BYTES = 32 << 20
"""Several workers share the writing of a state that is larger: a part each. Of a smaller one the lead writes all."""


class Keeper:
    """Takes checkpoints, in the ``background`` of the training loop where workers are real processes."""

    def __init__(self, settings: Settings, *, background: bool) -> None:
        self._settings = settings
        self._background = background
        self._named = bool(settings.checkpoint_dir)
        self._every = settings.checkpoint_every if self._named else 0
        self.adaptive = Adaptive(settings.mtbf_s) if self._named and settings.checkpoint_auto else None
        self._token = 0
        self._begun = (-1, -1)
        self._writers: tuple[int, ...] = ()
        self._alive: frozenset[int] = frozenset()
        self._found: Loaded | None = None
        self._damaged: set[int] = set()
        self._failed: list[Outcome] = []
        self._open(settings.checkpoint_dir or DEFAULT_DIR)

    def _open(self, url: str) -> None:
        self._checkpoints = Checkpoints(url, self._settings.checkpoint_format)
        self._writer = Writer(self._checkpoints, background=self._background, after_commit=self._prune)

    @property
    def url(self) -> str:
        """Where checkpoints are."""
        return self._checkpoints.url

    @property
    def step(self) -> int | None:
        """The step whose checkpoint is being written here, or waits to be completed."""
        return self._writer.step

    @property
    def is_completing(self) -> bool:
        """Whether it was decided what becomes of that checkpoint, and it has not become that yet."""
        return self._writer.is_completing

    @property
    def token(self) -> int:
        """A number that all workers have, and no other job, and no earlier beginning of this one, had."""
        return self._token

    def check_empty(self, *, ours: bool) -> None:
        """Make sure that a new run does not mix its checkpoints with those of an older one; what is ``ours`` may be there.

        Raises:
            ConfigError: if there are complete checkpoints.
        """
        old = self._checkpoints.steps() if self._named and not ours else []
        if old:
            raise ConfigError(
                f"checkpoint_dir {self.url} already holds a run up to step {max(old)}: "
                "go on with it (--resume), or name an empty directory"
            )

    # -- when

    def is_due(self, step: int) -> bool:
        """Return whether the state before ``step`` is to be saved, by the number of steps."""
        return self._every > 0 and step > 0 and step % self._every == 0

    def is_due_now(self) -> bool:
        """Return whether one is to be saved by the clock of this worker; not as long as it is busy with the last one."""
        return self.adaptive is not None and self.adaptive.is_due(time.monotonic()) and self.step is None

    def interval_s(self) -> float:
        """Return how long after a checkpoint the next is due by the clock; 0 if they do not go by it."""
        return 0.0 if self.adaptive is None else self.adaptive.interval_s(time.monotonic())

    def note_failure(self) -> None:
        """Hear that workers were lost."""
        if self.adaptive is not None:
            self.adaptive.failed()

    # -- writing

    def choose_fallback(self) -> int:
        """Return a number that tells a place of our own from others, if none was named and the usual one is taken; else 0."""
        return 0 if self._named or not self._checkpoints.steps() else time.time_ns() // 1_000_000_000

    def start_over(self, token: int, fallback: int) -> None:
        """Forget what was begun; go on with another :attr:`token`, and what :meth:`choose_fallback` returned at the lead."""
        self._token, self._begun = token, (-1, -1)
        if fallback:
            self._open(f"{DEFAULT_DIR}-{fallback}")

    def state(self) -> dict[str, Any]:
        """Return what a newcomer must know; plain JSON."""
        return {"token": self._token, "url": self.url, "begun": self._begun[0]}

    def take_over(self, state: dict[str, Any]) -> None:
        """Be as far as the others, as a newcomer."""
        if state["url"] != self.url:
            self._open(state["url"])
        # What was begun is begun again for want of this worker, by all alike.
        self._token, self._begun = state["token"], (state["begun"], -1)

    def set_interval(self, steps: int, *, automatic: bool) -> None:
        """Save every so many steps from now on, or as often as pays."""
        self._every = steps if self._named else 0
        if not (automatic and self._named):
            self.adaptive = None
        elif self.adaptive is None:
            self.adaptive = Adaptive(self._settings.mtbf_s)

    def note_alive(self, members: Collection[int]) -> None:
        """Hear who is left: nobody waits for the parts of the dead."""
        self._alive = frozenset(members)

    def put_off(self, step: int) -> None:
        """Hear that the state before ``step`` is to be saved, but not yet: it counts as begun and outdated."""
        self._begun = (step, -1)

    def is_outdated(self, step: int, generation: int) -> bool:
        """Return whether the state before ``step`` was begun with workers that are no longer all there."""
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
        """Take the state before ``step``; it does not count yet.

        Args:
            step: Steps that the state has behind it.
            state: The same at all workers, but for strings and numbers in it: those of the lead are saved.
            info: That of the lead is saved.
            writers: The processes that are alive, by the workers that they are; the first is the lead.
            me: This one.
            generation: Of the communicator.
            distinct: Each of the writers, whatever the size, gives a part that no other gives, the lead also what all
                have; see :func:`~holdfast.checkpoint.take`. Who is not among them gives nothing.

        Raises:
            CheckpointError: if the state holds something that cannot be saved. What the storage does not take is left to
                :meth:`poll`.
            ConfigError: if several writers are to give distinct parts in a format that has one writer only.
        """
        if self._begun == (step, generation):
            return
        if distinct and len(writers) > 1 and self._settings.checkpoint_format == "dcp":
            raise ConfigError(
                "checkpoint_format dcp can be written by one worker only, and the parts of this model are held by "
                f"{len(writers)}; choose safetensors, npz or hdf5"
            )
        self._begun = (step, generation)
        if self.adaptive is not None:
            self.adaptive.began(time.monotonic())
        self._writer.abandon()
        content = self._content(state, writers, me, distinct=distinct)
        if content is None:
            return
        try:
            self._writer.begin(step, content, info, f"{self._token:x}-{generation}")
        except CheckpointError as error:
            self._fail(step, error)
            return
        self._writers = tuple(ranks[0] for ranks in writers[: content.parts])
        self._alive = frozenset(self._writers)

    def _content(
        self, state: dict[str, Any], writers: Sequence[tuple[int, ...]], me: tuple[int, ...], *, distinct: bool
    ) -> Content | None:
        """Return what this process writes, None if nothing."""
        if distinct:
            return take(state, writers.index(me), len(writers), distinct=True) if me in writers else None
        content = take(state)
        if len(writers) > 1 and content.size_bytes > SHARED_BYTES and self._settings.checkpoint_format != "dcp":
            return take(state, writers.index(me), len(writers))
        return content if me == writers[0] else None

    def publish(self, stable_step: int, generation: int, *, is_lead: bool) -> None:
        """Let the pending checkpoint count as soon as it is written, if the step before it is stable."""
        step, writers = self._writer.step, self._writers
        if step is None or step > stable_step + 1:
            return
        if is_lead:
            self._writer.commit(generation, may_come=lambda part: writers[part] in self._alive)
        else:
            self._writer.leave()

    def poll(self) -> list[Outcome]:
        """Return what has become of checkpoints since the last call."""
        outcomes, self._failed = [*self._failed, *self._writer.poll()], []
        for outcome in outcomes:
            if self.adaptive is not None and (outcome.saved is not None or outcome.error is not None):
                self.adaptive.cost(outcome.held_s)
        return outcomes

    def finish(self) -> list[Outcome]:
        """Wait for what counts, but not for ever, and return what has become of it."""
        try:
            self._writer.wait()
        except CheckpointError as error:
            self._fail(self._writer.step or 0, error)
        return self.poll()

    def has(self, step: int) -> bool:
        """Return whether a checkpoint of ``step`` or a later one is complete."""
        return max(self._checkpoints.steps(), default=-1) >= step

    def drop(self) -> None:
        """Forget what does not count yet."""
        self._writer.abandon()

    def take_back(self, newest: int) -> None:
        """Remove the checkpoints of later steps than ``newest``: what is in them is not right.

        Raises:
            CheckpointError: if they cannot be removed.
        """
        self._writer.wait()
        for step in self._checkpoints.steps() if self._named else ():
            if step > newest and step not in self._damaged:
                self._checkpoints.remove(step)

    def _fail(self, step: int, error: CheckpointError) -> None:
        self._failed.append(Outcome(step=step, saved=None, error=error, held_s=0.0, written_s=0.0))

    def _prune(self) -> None:
        """Remove what need not be kept; called beside the loop, when another checkpoint is complete."""
        settings = self._settings
        self._damaged.discard(self._writer.step or 0)  # it was saved again
        if not settings.keep_last:
            return
        # What was found damaged is no reason to remove anything, and somebody may want to look at it.
        good = [step for step in self._checkpoints.steps_to_prune() if step not in self._damaged]
        for step in to_remove(good, settings.keep_last, settings.keep_every):
            self._checkpoints.remove(step)

    # -- reading

    def newest(self, on_damaged: Callable[[int, CheckpointCorrupt], None], *, keep: bool = True) -> int:
        """Return the newest step whose every byte is intact, or -1.

        Args:
            on_damaged: Is told of each damaged checkpoint that is passed over, newest first.
            keep: Keep the state in memory for :meth:`load`, which then need not read it again. Without it, a few blocks
                are held at a time: the states of split models are larger than the memory of one worker.
        """

        def note(step: int, damage: CheckpointCorrupt) -> None:
            self._damaged.add(step)
            on_damaged(step, damage)

        self._writer.wait()
        self._found = None
        if not self._named:
            return -1
        if keep:
            self._found = self._checkpoints.load_newest(note)
            return -1 if self._found is None else self._found.step
        step = self._checkpoints.newest_intact(note)
        return -1 if step is None else step

    def load(self, step: int, only: Wanted | None = None) -> Loaded:
        """Return the state before ``step``, or what ``only`` wants of it; see :func:`~holdfast.checkpoint.loading.load`."""
        found, self._found = self._found, None
        if found is None or found.step != step:
            return self._checkpoints.load(step, only=only)
        return found if only is None else dataclasses.replace(found, state=pick(found.state, only))

    def info(self, step: int) -> dict[str, Any]:
        """Return what was written down beside the state before ``step``."""
        if self._found is not None and self._found.step == step:
            return self._found.info
        return self._checkpoints.info(step)
