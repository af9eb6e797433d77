"""The position in the data: the plan, how much of it has been consumed, and which samples are in the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from holdfast.data.ledger import Ledger, SampleCounts, StreamLedger
from holdfast.data.loader import DataSource
from holdfast.data.plan import BatchCutter, MiniBatch, PlanCursor, SamplePlan
from holdfast.data.sample_digest import sample_digest
from holdfast.data.stream import Stream, StreamMark
from holdfast.errors import ConfigError

_MUST_NOT_CHANGE = ("slices", "seed", "batch_size", "num_samples", "shuffle", "drop_last")


class DataPosition:
    """Cuts mini-batches one after another, and keeps the ledger."""

    _ledger: Ledger | StreamLedger

    def __init__(self, plan: SamplePlan, changes: Mapping[str, Any], source: DataSource | None = None) -> None:
        self._base_plan, self._source = plan, source
        self.samples = -1
        """A digest of some samples of the dataset, -1 if it is not known; see :meth:`read_samples`."""
        self.stream: Stream | None = plan.stream if isinstance(plan.stream, Stream) else None
        self._is_ended = False
        self.change(changes)
        self._begin_again()
        if self.stream is not None and self._cursor.offset:
            self.stream.seek(self._cursor.epoch, self._cursor.offset, StreamMark())

    def change(self, changes: Mapping[str, Any]) -> None:
        """Apply changes, as plain JSON, to the script's values for all following mini-batches.

        They replace earlier changes: another ``batch_size``, number of ``workers`` that share the work, or their ``speeds``.
        """
        values = dict(changes)
        if "speeds" in values:
            values["speeds"] = {int(rank): speed for rank, speed in values["speeds"].items()}
        self.plan = dataclasses.replace(self._base_plan, **values, given_batch_size=self._base_plan.batch_size)
        self._batches, self._ahead = BatchCutter(self.plan), BatchCutter(self.plan)

    def align(self, *, in_tree: bool) -> None:
        """Assign slices as fits the order in which gradients are added."""
        if in_tree != self.plan.in_tree:
            self._base_plan, self.plan = (
                dataclasses.replace(plan, in_tree=in_tree) for plan in (self._base_plan, self.plan)
            )
            self._batches, self._ahead = BatchCutter(self.plan), BatchCutter(self.plan)

    def _begin_again(self) -> None:
        self._batches, self._ahead = BatchCutter(self.plan), BatchCutter(self.plan)
        self._cursor = self.plan.start
        begun = self._cursor.epoch, self._cursor.offset
        self._ledger = Ledger(self.plan) if self.stream is None else StreamLedger(*begun)

    def next_batch(self, step: int, members: Sequence[int]) -> MiniBatch | None:
        """Return the mini-batch of ``step`` for ``members``; None at the end of the plan."""
        return None if self._is_ended else self._batches.mini_batch(step, self._cursor, members)

    def ahead(self, batch: MiniBatch, members: Sequence[int]) -> Iterator[MiniBatch]:
        """Yield the mini-batches after ``batch`` for ``members``, provided that these do not change."""
        batches = self._ahead  # separate, because it caches the order of one epoch
        following = batches.mini_batch(batch.step + 1, batch.after, members)
        while following is not None:
            yield following
            following = batches.mini_batch(following.step + 1, following.after, members)

    @property
    def must_seek(self) -> bool:
        """Whether the next mini-batch must first be found in a stream, which may take long; see :meth:`find`."""
        return self.stream is not None and self.stream.must_seek

    def find(self) -> None:
        """Find the next mini-batch in a stream.

        Raises:
            ConfigError: if the stream is not the one that was read before.
        """
        self.digest()

    def close(self) -> None:
        """Stop reading ahead."""
        if self.stream is not None:
            self.stream.close()

    def end(self) -> None:
        """Leave out the rest of the plan: the last committed mini-batch was the last one."""
        self._is_ended = True

    @property
    def has_more(self) -> bool:
        """Whether the plan has mini-batches that were not committed."""
        return self._cursor.epoch < self.plan.first_epoch + self.plan.epochs

    def is_last(self, batch: MiniBatch) -> bool:
        """Return whether ``batch`` is the last one of the plan."""
        return batch.after.epoch >= self.plan.first_epoch + self.plan.epochs

    def commit(self, batch: MiniBatch, lost: Collection[int]) -> int:
        """Count ``batch`` as committed except for its ``lost`` slices; return the number of committed samples."""
        committed = [batch.slices[number] for number in batch.owners if number not in lost]
        self._ledger.commit(batch.epoch, np.concatenate([*committed, batch.ids[:0]]))
        if self.stream is not None and isinstance(self._ledger, StreamLedger):
            if batch.after.epoch > batch.epoch:
                self._ledger.end_epoch(self.plan.stream_end(self.stream, self._cursor, len(batch.ids)))
            self.stream.forget(batch.after.epoch, batch.after.offset)
        self._cursor = batch.after
        return sum(map(len, committed))

    def account(self) -> SampleCounts:
        """Return the account of all samples so far."""
        return self._ledger.account(self._cursor)

    def info(self) -> dict[str, Any]:
        """Return the metadata for a checkpoint."""
        return {
            **{name: getattr(self._base_plan, name) for name in _MUST_NOT_CHANGE},
            "epoch": self._cursor.epoch,
            "offset": self._cursor.offset,
            **self._place(),
        }

    def _place(self) -> dict[str, Any]:
        """Return what finds the same data again: a digest of a sampler's order, or a place in a stream."""
        epoch, offset = self._cursor.epoch, self._cursor.offset
        if self.stream is not None:
            if offset == 0 and epoch < self.plan.first_epoch + self.plan.epochs and not self._is_ended:
                self.stream.limit(epoch, 1)  # what begins an epoch shows whether it is the same when it is read again
            return {"stream": dataclasses.asdict(self.stream.mark(epoch, offset))}
        return {} if self.plan.sampler is None else {"data": self.digest()}

    def digest(self, batch: MiniBatch | None = None) -> int | None:
        """Return a digest of the data from here, or from ``batch`` on, which must be equal at all workers; None if it cannot differ.

        It is of the order that a sampler of the script gives, or of the next samples of a stream; 0 at the end of the plan.
        """
        plan = self.plan
        if plan.sampler is None and self.stream is None:
            return None
        epoch = (self._cursor if batch is None or self.stream is not None else batch.after).epoch
        if epoch >= plan.first_epoch + plan.epochs or self._is_ended:
            return 0
        if self.stream is not None:
            end = plan.stream_end(self.stream, self._cursor, plan.batch_size)
            return self.stream.digest(self._cursor.offset, end)
        return None if plan.sampler is None else plan.sampler.digest(epoch)

    def read_samples(self) -> None:
        """Find :attr:`samples`, unless it is known; see :mod:`.sample_digest`."""
        if self.samples < 0 and self._source is not None:
            self.samples = sample_digest(self._source, self._base_plan.num_samples)

    def digest_differs(self, then: int) -> bool:
        """Return whether the sampler gives another order than the one that had the digest ``then``; 0: at the end of a plan."""
        return self.plan.sampler is not None and then != 0 and self.digest() not in (then, 0)

    def why_differs(self) -> str:
        """Return the message for workers whose :meth:`digest` differ."""
        if self.stream is not None:
            return (
                f"workers read different samples from the stream, after sample {self._cursor.offset} of epoch"
                f" {self._cursor.epoch}: every worker must read the whole stream, not a part by its rank, and its order must"
                " depend on nothing but its arguments, the epoch and random numbers, not on time or a process"
            )
        return (
            f"the sampler gives workers different orders of epoch {self._cursor.epoch}: it must give the whole order, and"
            " depend on nothing but its arguments and random numbers, not on the rank"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger's state."""
        return self._ledger.state_dict()

    def restore(self, info: dict[str, Any], ledger: dict[str, Any], *, keep_slices: bool) -> None:
        """Restore from :meth:`info` and :meth:`state_dict`; ``keep_slices`` keeps this run's number of slices.

        Raises:
            ConfigError: if the checkpoint was made by a run with other values.
        """
        if not keep_slices:
            self.plan = dataclasses.replace(self.plan, slices=info["slices"])
            self._base_plan = dataclasses.replace(self._base_plan, slices=info["slices"])
        if (info["num_samples"] < 0) != (self.stream is not None):
            kinds = "a dataset with a length", "a stream"
            then, now = kinds if self.stream is not None else reversed(kinds)
            raise ConfigError(
                f"the checkpoint was made with {then} and this run has {now}: start in an empty directory"
            )
        for name in _MUST_NOT_CHANGE:
            if info[name] != getattr(self._base_plan, name):
                raise ConfigError(
                    f"the checkpoint was made with {name}={info[name]} and this run has {getattr(self._base_plan, name)}: "
                    "the run would not be the same; give the old value, or start again in an empty directory"
                )
        self._begin_again()
        self._ledger.load_state_dict(ledger)
        self._cursor = PlanCursor(epoch=info["epoch"], offset=info["offset"])
        if self.stream is not None:
            self.stream.seek(info["epoch"], info["offset"], StreamMark(**info["stream"]))
        if (self.plan.sampler is not None) != ("data" in info) or self.digest_differs(info.get("data", 0)):
            raise ConfigError(
                f"the sampler gives another order of epoch {info['epoch']} than when the checkpoint was made: the run would"
                " not be the same; it must depend on nothing but its arguments and random numbers"
            )
