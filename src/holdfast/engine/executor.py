"""Executes steps: begins every attempt at a step, and holds the state of the attempt in progress."""

from __future__ import annotations

from holdfast.comm import OrderedAllReduce
from holdfast.data.loader import DataSource, SliceLoader
from holdfast.data.plan import MiniBatch
from holdfast.data.position import DataPosition
from holdfast.engine.injection import FaultPoints
from holdfast.models.runner import StepContext
from holdfast.models.step import Step
from holdfast.models.trainable import Trainable
from holdfast.state.context import JobContext
from holdfast.state.run_log import RunLog


class StepExecutor:
    """Begins the step in progress, once for each attempt, and holds its state.

    Args:
        job: The job context.
        trainable: The model that computes.
        position: The position in the data, which decides the seeds.
        log: Records what the runner measures.
        points: Marks the phase of this worker and triggers planned faults.
        total: The gradient all-reduce.
        source: Where inputs come from.
    """

    def __init__(
        self,
        job: JobContext,
        trainable: Trainable,
        position: DataPosition,
        log: RunLog,
        points: FaultPoints,
        total: OrderedAllReduce,
        source: DataSource,
    ) -> None:
        self._job = job
        self._trainable = trainable
        self._points = points
        self._sum = total
        self._loading = SliceLoader(source, lambda batch: position.ahead(batch, job.comm.members), self._slices)
        context = StepContext(job, position, log, total, source, self._loading, points.enter, points.reach_in_sum)
        self._runner = trainable.runner(context)
        self.batch: MiniBatch | None = None
        """The mini-batch of the step in progress."""
        self._count = (-1, 0)

    @property
    def names(self) -> list[str]:
        """Names of the metrics that the script logs."""
        return list(self._runner.names)

    def begin(self, batch: MiniBatch) -> Step:
        """Return the next attempt at a step, for the script to compute.

        Raises:
            PeerFailed: if a peer died and workers need each other to begin a step.
        """
        self.batch = batch
        number, times = self._count
        self._count = (batch.step, times + 1 if number == batch.step else 0)
        self._points.alter_state(self._trainable, batch.step)
        # Before anything that can fail: a rollback returns to this point.
        self._trainable.begin_step(self._points.enter)
        self._sum.begin()
        if not self._trainable.num_buckets:
            self._sum.open()  # without buckets, no all-reduce before the commit vote would open it
        self._points.enter("forward")
        self._runner.between_slices(batch)
        slices = self._slices(batch)
        self._job.load.note(len(slices))
        return self._runner.step(batch, slices, self._count[1])

    def give_nothing(self) -> None:
        """Complete this worker's slices of the step in progress without computing them: no worker will commit it."""
        self._runner.give_nothing(self.in_progress(), self._slices(self.in_progress()))

    def _slices(self, batch: MiniBatch) -> list[int]:
        return self._trainable.slices(batch, self._job.comm.local_ranks)

    def close(self) -> None:
        """Stop the prefetching of inputs, and what the runner has started."""
        self._loading.close()
        self._runner.close()

    def finish(self, attempt: Step) -> None:
        """Complete the computation of a step; see :meth:`Runner.finish`.

        Raises:
            PeerFailed: if a peer died.
        """
        self._runner.finish(self.in_progress(), attempt)

    def in_progress(self) -> MiniBatch:
        """Return the mini-batch of the step in progress; there must be one."""
        assert self.batch is not None, "no step is in progress"
        return self.batch

    def sum_bucket(self, bucket: int) -> None:
        """All-reduce the gradients of a bucket over all workers.

        Raises:
            PeerFailed: if the all-reduce did not complete here.
        """
        self._runner.sum_bucket(self.in_progress(), bucket)

    def send_bucket(self, bucket: int, source: int) -> None:
        """Send a reduced bucket, and the list of slices it contains, from ``source`` to the workers that lack it.

        Raises:
            PeerFailed: if the transfer did not complete here.
        """
        self._runner.send_bucket(self.in_progress(), bucket, source)
