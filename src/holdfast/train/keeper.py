"""When a checkpoint is taken, who writes it, and when it may count: only once its step is stable."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.checkpoint import Checkpoints, Loaded, take
from holdfast.checkpoint.interval import Adaptive
from holdfast.checkpoint.retain import to_remove
from holdfast.checkpoint.writer import Outcome, Writer
from holdfast.errors import CheckpointCorrupt, ConfigError
from holdfast.settings import Settings

DEFAULT_DIR = "holdfast-checkpoint"
"""Where a state is saved that must be saved although no place was named."""

_SHARED_BYTES = 32 << 20
"""Several workers share the writing of a state that is larger: a part each. Of a smaller one the lead writes all."""


class Keeper:
    """Takes checkpoints, beside the training loop where workers are real processes.

    All workers are asked the same, in the same order, and know the same; so they agree on who writes without a message.

    Args:
        settings: Where and how often.
        background: Write beside the loop.
    """

    def __init__(self, settings: Settings, *, background: bool) -> None:
        self._settings = settings
        self._background = background
        self._named = bool(settings.checkpoint_dir)
        self._every = settings.checkpoint_every if self._named else 0
        self.adaptive = Adaptive(settings.mtbf_s) if self._named and settings.checkpoint_auto else None
        self._token = 0
        self._begun = (-1, -1)
        self._writers: tuple[int, ...] = ()
        self._found: Loaded | None = None
        self._open(settings.checkpoint_dir or DEFAULT_DIR)

    def _open(self, url: str) -> None:
        self._checkpoints = Checkpoints(url, self._settings.checkpoint_format)
        self._writer = Writer(self._checkpoints, background=self._background, after_commit=self._prune)

    @property
    def named(self) -> bool:
        """Whether the user named a place."""
        return self._named

    @property
    def url(self) -> str:
        """Where checkpoints are."""
        return self._checkpoints.url

    @property
    def step(self) -> int | None:
        """The step whose checkpoint is being written, or waits to be completed."""
        return self._writer.step

    def check_empty(self, *, ours: bool) -> None:
        """Make sure that a new run does not mix its checkpoints with those of an older one.

        Args:
            ours: What is there was written by this run.

        Raises:
            ConfigError: if there are complete checkpoints.
        """
        old = self._checkpoints.steps() if self._named and not ours else []
        if old:
            msg = (
                f"checkpoint_dir {self.url} already holds a run up to step {max(old)}: "
                "go on with it (--resume), or name an empty directory"
            )
            raise ConfigError(msg)

    def is_due(self, step: int) -> bool:
        """Return whether the state before ``step`` is to be saved, by the number of steps."""
        return self._every > 0 and step > 0 and step % self._every == 0

    # -- writing

    def use_token(self, token: int) -> None:
        """Hear a number that all workers have, and that no other job, and no earlier beginning of this one, had."""
        self._token = token

    def begin(
        self,
        step: int,
        state: dict[str, Any],
        info: dict[str, Any],
        writers: Sequence[tuple[int, ...]],
        me: tuple[int, ...],
        generation: int,
    ) -> None:
        """Take the state before ``step``; it does not count yet.

        Args:
            step: Steps that the state has behind it.
            state: The same at all workers.
            info: The same.
            writers: The processes that are alive, by the workers that they are; the first is the lead.
            me: This one.
            generation: Of the communicator.
        """
        if self._begun == (step, generation) and self._writer.step == step:
            return
        self._begun = (step, generation)
        if self.adaptive is not None:
            self.adaptive.began(time.monotonic())
        self._writer.abandon()
        content = take(state)
        shares = content.size_bytes > _SHARED_BYTES and self._settings.checkpoint_format != "dcp"
        part, parts = (writers.index(me), len(writers)) if shares else (0, 1)
        if parts == 1 and me != writers[0]:
            return
        if not self._named and self._checkpoints.steps():
            self._open(f"{DEFAULT_DIR}-{time.time_ns() // 1_000_000_000}")
        self._writers = tuple(ranks[0] for ranks in writers[:parts])
        self._writer.begin(
            step, content if parts == 1 else take(state, part, parts), info, f"{self._token:x}-{generation}"
        )

    def publish(self, stable_step: int, generation: int, members: Sequence[int], *, is_lead: bool) -> None:
        """Let the pending checkpoint count as soon as it is written, if the step before it is stable."""
        step = self._writer.step
        if step is None or step > stable_step + 1:
            return
        if is_lead:
            # A part that somebody had not written when it died will never be: there is nothing to wait for.
            self._writer.commit(generation, all_alive=set(self._writers) <= set(members))
        else:
            self._writer.leave()

    def poll(self) -> list[Outcome]:
        """Return what has become of checkpoints since the last call."""
        outcomes = self._writer.poll()
        for outcome in outcomes:
            if self.adaptive is not None and outcome.saved is not None:
                self.adaptive.cost(outcome.held_s)
        return outcomes

    def finish(self) -> list[Outcome]:
        """Wait for what counts, and return what has become of it.

        Raises:
            CheckpointError: if it takes too long.
        """
        self._writer.wait()
        return self.poll()

    def drop(self) -> None:
        """Forget what does not count yet."""
        self._writer.abandon()

    def _prune(self) -> None:
        """Remove what need not be kept; called beside the loop, when another checkpoint is complete."""
        settings = self._settings
        for step in to_remove(self._checkpoints.steps(), settings.keep_last, settings.keep_every):
            self._checkpoints.remove(step)

    # -- reading

    def newest(self, on_damaged: Callable[[int, CheckpointCorrupt], None]) -> int:
        """Return the newest step whose every byte is intact, or -1."""
        self._writer.wait()
        self._found = self._checkpoints.load_newest(on_damaged) if self._named else None
        return -1 if self._found is None else self._found.step

    def load(self, step: int) -> Loaded:
        """Return the state before ``step``."""
        found, self._found = self._found, None
        return found if found is not None and found.step == step else self._checkpoints.load(step)

    def info(self, step: int) -> dict[str, Any]:
        """Return what was written down beside the state before ``step``."""
        if self._found is not None and self._found.step == step:
            return self._found.info
        return self._checkpoints.load(step).info
