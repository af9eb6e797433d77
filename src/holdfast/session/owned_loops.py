"""What prepared loops and frameworks need of a session: they own the loop, and the session is driven by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from holdfast.config import Settings
from holdfast.engine.loop import Pause
from holdfast.engine.reinit_context import application
from holdfast.errors import ConfigError
from holdfast.models.part import ModelPart
from holdfast.models.step import Step
from holdfast.models.trainable import Trainable
from holdfast.session.opened import OpenedLoop
from holdfast.state.context import JobContext


class OwnedLoops:
    """The part of a session for loops that the script, or a framework, owns; see :mod:`holdfast.session.prepared`."""

    _settings: Settings
    _trainable: Trainable

    def _connect(self) -> JobContext:
        raise NotImplementedError

    def _open(self, dataset: Any, batch_size: int | None = None, epochs: int = 1, **options: Any) -> OpenedLoop:
        raise NotImplementedError

    def _train(self, loop: OpenedLoop, *, pauses: bool = False) -> Iterator[Step | Pause]:
        raise NotImplementedError

    def part_of_script(self) -> ModelPart:
        """Return the model with its optimizer, which the script's loop steps.

        Raises:
            ConfigError: if a setting needs the session to run the optimizer.
        """
        if self._settings.overlap_optimizer:
            raise ConfigError(
                "--overlap-optimizer cannot be used with holdfast.prepare, where the loop itself runs the optimizer; leave"
                " it out"
            )
        assert self._trainable.whole is not None
        return self._trainable.whole

    def open_loop(self, loader: Any) -> OpenedLoop:
        """Connect to the other workers, and return one pass over a loader; for the errors see :meth:`steps`."""
        if application.looks is not None:
            raise ConfigError("holdfast doctor cannot inspect a loop of holdfast.prepare; it inspects session.steps")
        return self._open(loader)

    def begin_at(
        self,
        step: int,
        epoch: int,
        offset: int,
        *,
        slices: int = 0,
        order: str = "",
        describe: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """Let the next loop continue a job of which a framework has loaded the state.

        Args:
            step: Steps that it had committed.
            epoch: Number of the next loop's epoch.
            offset: Samples of that epoch that committed steps have consumed.
            slices: Its number of slices, which this job takes over unless its settings have one.
            order: Its order of additions, likewise; "" if that is unknown.
            describe: Returns the framework's state as plain JSON; it is saved with each checkpoint.
        """
        job = self._connect()
        job.committed.step, job.loops.epoch, job.loops.offset = step, epoch, offset
        job.loops.slices = job.loops.slices or slices
        job.loops.order = job.loops.order or order
        job.loops.describe = describe

    @property
    def loop_numbers(self) -> tuple[int, int]:
        """Number of the current loop, and of its first epoch."""
        loops = self._connect().loops
        return loops.number, loops.epoch

    @property
    def job_name(self) -> str:
        """A name of this run that no other has; "" without a launcher."""
        return f"{self._settings.run_dir} {self._settings.origin_s}" if self._settings.run_dir else ""

    @property
    def num_slices(self) -> int:
        """Number of slices of a mini-batch, once a loop has begun."""
        return self._connect().loops.slices

    def position(self, loop: OpenedLoop) -> dict[str, Any]:
        """Return where the job is after the last committed step, as plain JSON, and the settings that this depends on.

        Args:
            loop: The current or last loop, which has begun.
        """
        assert loop.run is not None
        ended = {"epoch": loop.job.loops.epoch, "offset": 0} if loop.is_over else {}
        return {"step": loop.job.step, **loop.run.position(), **ended}

    def drive(self, loop: OpenedLoop) -> Iterator[Step | Pause]:
        """Yield the steps of a pass, and its pauses."""
        return self._train(loop, pauses=True)

    def note_busy(self, *, busy: bool) -> None:
        """Tell the health monitor that the script's own work begins or ends; see :meth:`busy`."""
        self._connect().beacon.publish_busy(busy=busy)

    def reach(self, phase: str) -> None:
        """Report that a framework is in one of :data:`holdfast.faults.kinds.SCRIPT_PHASES`, where a planned fault may strike."""
        job = self._connect()
        for rank in job.comm.local_ranks:
            job.faults.reach(phase, job.step, rank)
