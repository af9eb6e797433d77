"""Overlap with the backward pass: a bucket's all-reduce begins once this worker's last slice has computed the bucket.

::

    backward pass    last layers      ...      first layers
                          │            │            │
    AllReduceThread       └ bucket 0 ──┴ bucket 1 ──┴── ...     one at a time, in order
    ReduceBucket                                        wait 0, wait 1, ..., then the last bucket, which has the figures

The protocol does not see it: an all-reduce is *begun* in the backward pass, and *counted* when the protocol asks for it.
One that has failed raises the same failure there, as late as without overlap. Workers need not agree on what they begin
early, because the order of the buckets is the same; each decides for itself, and a worker without slices begins none.

A begun all-reduce reads gradients. If one of them changes afterwards (the script clips the gradients of a slice, a second
backward pass adds to them, the slice is computed again for want of memory), all workers must discard the step. So the
first step of a training loop only *looks* whether that happens, and if so the overlap stays off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from holdfast.comm import OrderedAllReduce
from holdfast.comm.base import ThreadChange
from holdfast.comm.reduce_thread import AllReduceThread
from holdfast.config import Settings
from holdfast.errors import PeerFailed
from holdfast.models.gradients import SliceGradients
from holdfast.models.part import ModelPart
from holdfast.models.trainable import ReducedBucket
from holdfast.recovery.registry import strategy_class
from holdfast.state.context import JobContext

Reduce = Callable[[int], ReducedBucket]
"""All-reduces a bucket; called in another thread."""


def why_never(job: JobContext, part: ModelPart) -> str:
    """Return why no step of a job can overlap its all-reduces with the backward pass; "" if some can."""
    if job.settings.overlap == "off":
        return "it is off"
    if not isinstance(job.comm, ThreadChange):
        return "the fabric cannot exchange gradients in another thread (--fabric gloo can)"
    if part.device.type != "cpu":
        return f"the model is on {part.device}"
    if len(part.buckets) == 1:
        return (
            "all gradients fit into one bucket, which is complete only after the backward pass (HOLDFAST_BUCKET_BYTES)"
        )
    if job.settings.guard == "heal":
        return "--guard heal compares gradients before they are all-reduced"
    if job.faults.alters("gradients") or job.faults.alters("message"):
        return "planned flips alter gradients before they are all-reduced"
    return ""


def pays(settings: Settings, total: OrderedAllReduce) -> bool:
    """Return whether overlap is expected to shorten a step.

    Through shared memory an all-reduce takes the cores on which the backward pass runs; messages mostly wait.
    """
    return settings.overlap == "on" or total.uses_messages


class BackwardOverlap:
    """Begins all-reduces during the backward pass of this worker's last slice.

    Args:
        job: The job context.
        total: The all-reduce over all workers.
        part: Its gradients are all-reduced.
    """

    def __init__(self, job: JobContext, total: OrderedAllReduce, part: ModelPart) -> None:
        self._job = job
        self._total = total
        self._buckets = part.buckets
        assert isinstance(job.comm, ThreadChange), why_never(job, part)
        self._thread = AllReduceThread(job.comm)
        self._buckets.has_versions = True
        self._why_off = ""
        self._has_looked = False
        self._watches = self._begins = False
        self._reduce: Reduce | None = None
        self._terms: SliceGradients | None = None
        self._missing: list[set[int]] = []
        self._versions: list[list[int]] = []
        self._changed = False

    @property
    def begins(self) -> bool:
        """Whether all-reduces of this step may begin early, and not only once they are counted."""
        return self._begins

    def begin_step(self) -> None:
        """Begin an attempt at a step, when nothing is under way."""
        self._versions, self._changed, self._terms = [], False, None
        is_known = self._total.is_set_up
        self._watches = (
            not self._why_off
            and (not is_known or pays(self._job.settings, self._total))
            and _repeats_steps(self._job.live.strategy)
        )
        self._begins = self._watches and self._has_looked and is_known

    @contextlib.contextmanager
    def watching(self, terms: SliceGradients, reduce: Reduce) -> Iterator[None]:
        """Within this context the only backward pass of the last slice runs, whose gradients go to ``terms``."""
        if not self._watches:
            yield
            return
        self._changed = self._changed or bool(self._versions)  # the slice is computed once more
        self._terms, self._reduce = terms, reduce
        self._missing = [set(range(len(layout.places))) for layout in self._buckets.layouts[:-1]]
        self._buckets.tells = self._note  # gradients are told of in this pass alone
        self._buckets.aim(terms)
        try:
            yield
        finally:
            self._missing, self._reduce, self._buckets.tells = [], None, None

    def _note(self, bucket: int, i: int) -> None:
        """Note that a gradient is complete; begin the buckets that are, in order."""
        if bucket < len(self._versions):
            self._changed = True
        elif bucket < len(self._missing):
            self._missing[bucket].discard(i)
            while len(self._versions) < len(self._missing) and not self._missing[len(self._versions)]:
                self._begin(len(self._versions))

    def _begin(self, bucket: int) -> None:
        assert self._reduce is not None
        assert self._terms is not None
        self._versions.append(self._terms.versions(bucket))
        if self._begins and not self._changed:
            self._buckets.note_presence(self._terms, bucket)
            reduce = self._reduce
            self._thread.begin(lambda: reduce(bucket))

    def end_slice(self) -> int:
        """Return how many buckets are begun at the end of the last slice, before its gradients are collected."""
        terms, self._terms = self._terms, None
        if terms is not None:
            self._changed = self._changed or any(
                self._buckets.has_changed(terms, bucket, versions) for bucket, versions in enumerate(self._versions)
            )
        if self._begins:
            return self._thread.num_begun
        if self._versions:
            self._has_looked = True
            self._stay_off(self._changed)
        return 0

    def finish(self, bucket: int) -> ReducedBucket | None:
        """Return the result of a bucket, the next one, once it is known; None if it was not begun.

        Raises:
            PeerFailed: if its all-reduce has failed, or all workers must discard the step.
        """
        if self._thread.num_begun:
            result: ReducedBucket = self._thread.finish()
            return result
        if self._changed and self._begins:
            self._stay_off(True)
            raise PeerFailed(f"gradients of step {self._job.step} changed after their all-reduce had begun")
        return None

    def close(self) -> None:
        """End the thread: the training loop is over, or was left."""
        self._thread.close()

    def _stay_off(self, changed: bool) -> None:
        if changed:
            self._why_off = "gradients change after the backward pass has completed them"


def _repeats_steps(strategy: str) -> bool:
    """Return whether a failure costs the step in progress and no more, and nothing of it is used."""
    cls = strategy_class(strategy)
    return cls.exact and not (cls.continues_steps or cls.needs_checkpoint or cls.rebuilds)
