"""The session: the entry point of a training script."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from torch import nn, optim
from torch.optim.swa_utils import AveragedModel

from holdfast.base import notice
from holdfast.base.side_work import say
from holdfast.comm import Communicator
from holdfast.config import MOST_WORKERS, Settings
from holdfast.data.source import DataOptions, open_source
from holdfast.engine.injection import check_faults
from holdfast.engine.loop import Pause, TrainingLoop
from holdfast.engine.reinit_context import application, note_session, take_over
from holdfast.errors import ConfigError, InternalError, ScriptError
from holdfast.models.buffers import BufferChoices
from holdfast.models.loss import check_name
from holdfast.models.part import Stateful
from holdfast.models.specs import Pipeline, Sharded
from holdfast.models.step import Step
from holdfast.models.trainables import make_trainable
from holdfast.records.types import WriterDeclared
from holdfast.session import gradient_hook
from holdfast.session.connecting import check_device, connect_job
from holdfast.session.launched import as_launched
from holdfast.session.opened import OpenedLoop, choose_job_slices, plan_of
from holdfast.session.owned_loops import OwnedLoops
from holdfast.session.saving import model_state, save_atomically
from holdfast.session.script_end import (
    check_and_save,
    forget_job,
    forget_jobs,
    note_job,
    note_stop,
    on_sigterm,
    passed_line,
    save_at_end,
    stop_if_asked,
)
from holdfast.session.script_epochs import begin_loop, epochs_left, loading_loop
from holdfast.state.context import JobContext
from holdfast.state.platform_check import compare_with_others, platform_of_worker, promise_line

_sessions: list[Session] = []
"""Sessions with an open loop: one that was left early must be found at exit even if the script has dropped it."""


class Session(OwnedLoops):
    """Fault-tolerant training: every step is committed on all workers or on none.

    ::

        session = holdfast.Session(model, optimizer)
        for step in session.steps(dataset, batch_size=128, epochs=3):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))

    The constructor only stores its arguments. The first call of :meth:`steps` connects to the other workers and makes
    all models equal to that of the lowest rank. Under ``python train.py`` there is one worker.

    Args:
        model: A module, replicated on every worker, or a :class:`~holdfast.Pipeline` or :class:`~holdfast.Sharded`. The
            set of parameters, and which of them are trained, must not change later.
        optimizer: Optimizer of the model's parameters. Runs when the loop requests the next step. For a Pipeline or
            Sharded
            model: a function that returns one for the parameters of a part.
        scheduler: A learning-rate scheduler; the session steps it after the optimizer. For a Pipeline or Sharded model:
            a function that returns one for an optimizer.
        schedule: Whether the scheduler is stepped every ``"step"`` or every ``"epoch"``. With ``"script"`` neither it nor
            the average is: the script does that, see :func:`holdfast.prepare`.
        scaler: A ``torch.amp.GradScaler``. A Pipeline or Sharded model uses one for all parts, which skip together.
        average: A ``torch.optim.swa_utils.AveragedModel`` of the model; the session updates it after each optimizer
            step. For a Pipeline or Sharded model: a function that returns one for the module of a part; the complete
            average is in :attr:`Pipeline.averaged` or :attr:`Sharded.averaged` after training.
        clip_grad_norm: Maximum norm of the mean gradient; for a Pipeline it is the norm of the norms of its stages.
        buffers: How the changes that slices make to a buffer of the model are combined, by its name or a pattern such as
            ``"*.queue"``: ``"mean"``, the mean over the slices (integers: the mean change, rounded); ``"sum"``, all their
            changes; or ``"first"``, the value after the first slice of the mini-batch. The default is the mean, with a
            line that names the buffers that torch's normalisation layers do not own. One of more than 65,536 elements
            may change only by choice.
        total_steps: Number of steps of the whole script, for scripts that call :meth:`steps` more than once; it only
            serves to reject a planned fault that could never strike.
        **settings: Fields of :class:`holdfast.Settings`; they take precedence over the environment. And ``comm``: a
            communicator to use instead of that of the configured fabric.

    Raises:
        ConfigError: if an argument or a setting is not allowed, or the model has a SyncBatchNorm layer.
    """

    def __init__(
        self,
        model: nn.Module | Pipeline | Sharded,
        optimizer: optim.Optimizer | Callable[[Any], optim.Optimizer],
        *,
        scheduler: Any = None,
        schedule: str = "step",
        scaler: Any = None,
        average: AveragedModel | Callable[[nn.Module], AveragedModel] | None = None,
        clip_grad_norm: float | None = None,
        buffers: BufferChoices | None = None,
        total_steps: int | None = None,
        **settings: Any,
    ) -> None:
        if schedule not in ("step", "epoch", "script"):
            raise ConfigError(f"schedule must be 'step', 'epoch' or 'script', got {schedule!r}")
        self._given_comm: Communicator | None = settings.pop("comm", None)
        self._settings = Settings.from_env(**settings)
        if self._given_comm is None:
            self._settings = as_launched(self._settings)
        self._trainable = make_trainable(
            model,
            optimizer,
            self._settings,
            scheduler=scheduler,
            schedule=schedule,
            scaler=scaler,
            average=average,
            clip_grad_norm=clip_grad_norm,
            buffers=buffers or {},
        )
        application.makes_sessions = True
        if (backend := sys.modules.get("holdfast.distributed.comm_thread")) is not None:
            backend.check_session()
        note_session(self._settings, is_replicated=self._trainable.is_replicated)
        self._model: Any = model
        self._declared: list[WriterDeclared] = []
        self._total_steps = total_steps
        self._job: JobContext | None = None
        self._training = False
        self._said: set[str] = set()
        self.ends_loop: Callable[[], None] | None = None
        """Ends a prepared loop that the script has left."""
        self.in_framework = False
        """Whether a framework trains, which reports its own phases to :meth:`reach`."""

    def register(self, **things: Stateful) -> None:
        """Save the state of ``things`` with the model: in checkpoints, and restored when a step is retried.

        Args:
            **things: Anything with ``state_dict`` and ``load_state_dict``, such as an average of the weights.

        Raises:
            ConfigError: if an object lacks these methods.
        """
        for name, thing in things.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise ConfigError(f"{name} must have state_dict and load_state_dict, got {type(thing).__name__}")
            self._trainable.registered[name] = thing

    def steps(
        self,
        dataset: Any,
        batch_size: int | None = None,
        epochs: int = 1,
        *,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
    ) -> Iterator[Step]:
        """Yield one mini-batch after another; requesting the next one commits the step, on all workers or on none.

        After a failure the same step is yielded again, with more slices for each survivor.

        Args:
            dataset: The same on every worker: anything with ``len`` and ``[]``; a stream, which is an ``IterableDataset``,
                another iterable or a function that returns one; or a ``torch.utils.data.DataLoader`` of either. A
                DataLoader is taken apart: its mini-batch is that of the job, over all workers, and all other arguments
                but ``epochs`` are its own. A stream is read in order, by every worker, until it ends.
            batch_size: Samples per step, over all workers, ``>= 1``.
            epochs: Passes over the dataset, ``>= 1``.
            shuffle: Shuffle in an order that depends only on the seed and the epoch; default: True, and False for a
                stream, which can only shuffle itself.
            drop_last: Drop the short mini-batch at the end of an epoch; default: False.
            collate: Builds a batch from a list of samples; default: torch's.
            num_workers: Processes per worker that load slices ahead of time, like those of a ``DataLoader``; 0, the
                default: the worker loads them itself. The bits are the same. A stream is read by one process at most.
            prefetch_factor: Slices that each of these processes loads ahead, ``>= 1``; default: 2.

        Raises:
            ConfigError: if an argument is not allowed, or a planned fault lies outside the run.
            ScriptError: if the previous loop was left before its end; or a Pipeline or Sharded model is trained again.
            TooFewWorkers: if fewer than ``min_workers`` survived; the state is saved.
            SystemExit: with code 4, after SIGTERM; the state is saved.
        """
        loop = self._open(
            dataset,
            batch_size,
            epochs,
            shuffle=shuffle,
            drop_last=drop_last,
            collate=collate,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
        )
        if application.looks is not None:
            return application.looks(self._trainable, loop.plan, loop.source.dataset, loop.source.collate)
        return cast("Iterator[Step]", self._train(loop))

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left to train: 0 to ``count - 1``, or after a resume those from the checkpoint's on.

        ::

            for epoch in session.epochs(12):
                for step in session.steps(dataset, batch_size=128):
                    ...
                evaluate(model)

        After ``--resume``, and after a restart of the job, model, optimizer and what is registered are those of the
        checkpoint before the first number is returned. A worker that joins a running job begins at the epoch in
        progress, and gets the state in its first loop. After the last epoch the state is saved, if there is a directory.

        Args:
            count: Epochs of the script, ``>= 1``.

        Raises:
            ConfigError: if ``count`` is not allowed.
            ScriptError: if the previous loop was left before its end, or the checkpoint does not say which epoch it is of.
        """
        if count < 1:
            raise ConfigError(f"epochs must be at least 1, got {count}")
        self._end_loop()
        job = self._connect()
        if (loading := loading_loop(job)) is not None:
            for _ in self._train(loading):
                raise InternalError("a loop without a step has begun one")
        yield from epochs_left(job, count, self._end_loop)
        save_at_end(job)
        stop_if_asked(job)

    def _end_loop(self) -> None:
        """End a prepared loop that the script has left."""
        if self.ends_loop is not None:
            self.ends_loop()
        self.check_finished()

    def _open(self, dataset: Any, batch_size: int | None = None, epochs: int = 1, **options: Any) -> OpenedLoop:
        """Check the arguments of :meth:`steps`, connect to the other workers, and return what a training loop needs.

        ``options`` are its other arguments; None or left out: the default.
        """
        if epochs < 1:
            raise ConfigError(f"epochs must be at least 1, got {epochs}")
        opened = open_source(dataset, DataOptions(batch_size=batch_size, **options), seed=self._settings.seed)
        self.check_finished()
        if not self._trainable.is_replicated and self._job is not None and self._job.loop > 0:
            raise ScriptError(
                "a Pipeline or Sharded model is trained in one call of session.steps, after which every worker has the"
                " complete model: request all epochs in one call"
            )
        if self._settings.slices > max(opened.batch_size, MOST_WORKERS):
            raise ConfigError(
                f"slices must be at most {MOST_WORKERS}, or batch_size if that is more, got {self._settings.slices}"
            )
        check_device(self._trainable.device, self._settings)
        job = self._connect()
        self._say_once(job, *opened.notes)
        if opened.stream is not None:
            opened.stream.say = functools.partial(self._say_once, job)
        job.loops.slices = job.loops.slices or choose_job_slices(job, opened.batch_size)
        plan = plan_of(job, opened, epochs)
        if plan.stream is None and not plan.epoch_samples:
            raise ConfigError(
                f"drop_last leaves no batch: batch_size must be at most len(dataset) ({opened.num_samples}), got"
                f" {opened.batch_size}"
            )
        if self._settings.faults and application.looks is None:
            end = job.step + plan.num_steps if plan.stream is None else sys.maxsize
            is_whole = bool(self._total_steps) or not self._trainable.is_replicated  # others may have further loops
            later = check_faults(
                self._settings.faults,
                self._trainable,
                self._total_steps or end,
                is_whole=is_whole,
                in_framework=self.in_framework,
            )
            self._say_once(job, *later)
        return OpenedLoop(job, plan, opened.source)

    def _say_once(self, job: JobContext, *notes: str) -> None:
        """Print lines for the user, at the lead, and each of them once."""
        for note in notes:
            if note not in self._said and job.comm.members and job.is_lead:
                say(note)
        self._said.update(notes)

    def _train(self, loop: OpenedLoop, *, pauses: bool = False) -> Iterator[Step | Pause]:
        job, plan = loop.job, loop.plan
        begin_loop(job.loops)
        if job.loops.loaded is not None and job.loop < job.loops.loaded.info["loop"]:
            self._pass(job, plan.epochs, pauses=pauses)
            return
        job.platform.properties = platform_of_worker(self._trainable.device)
        is_newcomer = not job.comm.members
        if line := promise_line(job):
            self._say_once(job, line)
        if is_newcomer:
            compare_with_others(job)
        if is_newcomer and not job.comm.join(job.loop):
            job.loops.has_missed = True
            job.loops.end(plan.epochs)
            return
        self._training = True
        self._declared.clear()
        _sessions.append(self)
        job.loops.first_step = job.step
        run = loop.run = TrainingLoop(job, self._trainable, plan, loop.source, is_newcomer=is_newcomer, pauses=pauses)
        after = functools.partial(_on_sigterm_outside, job) if job.loops.may_save_outside else None
        with notice.answered(lambda: on_sigterm(job), after):
            note_stop(job)
            try:
                yield from run.drive()
            except SystemExit:  # this worker has left, or all have stopped: training ends here
                forget_job(job)
                self._close_loop()
                raise
        job.loops.totals = run.account()
        self._pass(job, plan.epochs, pauses=pauses)
        loop.is_over = True
        self._close_loop()

    def _pass(self, job: JobContext, epochs: int, *, pauses: bool) -> None:
        """Advance to the next loop; say what a loop means that was trained before the checkpoint."""
        if job.loops.loaded is not None and job.loop >= 0 and not self.in_framework:
            self._say_once(job, passed_line(job, "loader" if pauses else "session"))
        job.loops.end(epochs)

    def _close_loop(self) -> None:
        self._training = False
        if self in _sessions:
            _sessions.remove(self)

    def log(self, **metrics: float) -> None:
        """Add metrics to the run's report, such as the accuracy on a test set, after training.

        Raises:
            ScriptError: during training; use ``step.log`` there.
            ConfigError: if a name cannot be encoded.
        """
        if self._training or self._job is None:
            raise ScriptError("session.log is for after training; inside the loop over the slices use step.log")
        for name in metrics:
            check_name(name)
        job = self._job
        values = {name: float(value) for name, value in metrics.items()}
        job.loops.finished = [
            job.log.write(dataclasses.replace(record, t_s=job.clock.now_s(), metrics={**record.metrics, **values}))
            for record in job.loops.finished
        ]

    def save(self, path: str | Path, obj: Any = None) -> None:
        """Write a file that is complete or not there at all, whichever worker dies while it is written.

        Call it on every worker, not under ``is_lead``. Each writes a temporary file, which replaces ``path`` once it is
        complete; replicas are equal, so all write the same. Each worker spends the time to write the object.

        Args:
            path: The file; with the suffix ``.safetensors`` it has that format, otherwise that of ``torch.save``.
            obj: What to save, equal on all workers, such as a dict; default: the ``state_dict`` of the model. Of a
                Pipeline or Sharded model it is complete after training only.

        Raises:
            CheckpointError: if the file cannot be written.
        """
        self._declare("save")
        save_atomically(model_state(self._model) if obj is None else obj, Path(path), self.rank)

    def _declare(self, how: str) -> None:
        """Record which worker writes what the script writes, as far as this call says; each answer once."""
        job = self._connect()
        record = WriterDeclared(how=how, is_lead=job.is_lead, in_loop=self._training)
        if record not in self._declared:
            self._declared.append(record)
            job.log.write(record)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Tell the health monitor that the code inside may take long, so that this worker does not count as stuck.

        For work on one worker while the others wait for it, such as an evaluation by the lead alone.
        """
        beacon = self._connect().beacon
        beacon.publish_busy(busy=True)
        try:
            yield
        finally:
            beacon.publish_busy(busy=False)

    @property
    def rank(self) -> int:
        """This worker's rank, constant for life; with virtual workers the lowest one."""
        return self._connect().comm.local_ranks[0]

    @property
    def world_size(self) -> int:
        """Number of surviving workers, as far as this one knows."""
        return len(self._connect().comm.members)

    @property
    def is_lead(self) -> bool:
        """Whether this is the lowest surviving rank, which prints and writes output that is needed once."""
        self._declare("is_lead")
        return self._connect().is_lead

    @property
    def step(self) -> int:
        """Number of committed steps."""
        return 0 if self._job is None else self._job.step

    @property
    def metrics(self) -> dict[str, float]:
        """Means over the samples of the last committed step, the same on every worker that logged them."""
        return {} if self._job is None else dict(self._job.committed.metrics)

    def check_finished(self) -> None:
        """Check that no loop was left before its end.

        Raises:
            ScriptError: if one was.
        """
        if self._training:
            raise ScriptError(f"training was left at step {self.step} before its end; to end it early call step.stop()")

    # -- setup

    def _connect(self) -> JobContext:
        if self._job is None:
            self._job = take_over()
            if self._job is None:
                self._job = connect_job(self._settings, self._given_comm, at_exit)
                self._settings = self._job.settings
            note_job(self._job)
        return self._job


def at_exit() -> None:
    """When the script has ended, check that no session was left in the middle of training."""
    for session in _sessions:  # ending a loop removes it
        if session.ends_loop is not None:
            session.ends_loop()
        session.check_finished()
    check_and_save()


def _on_sigterm_outside(job: JobContext, has_own: bool) -> None:
    on_sigterm(job, is_outside=True, has_own=has_own)


def has_taken_over() -> bool:
    """Return whether a session in training computes more than it began with, because workers have failed."""
    jobs = [(session._trainable, session._job) for session in _sessions if session._job is not None]
    return any(
        job.load.has_grown or (not trainable.is_replicated and len(job.comm.members) < len(job.first_members))
        for trainable, job in jobs
    )


def forget_sessions() -> None:
    """Forget the sessions of an application that was torn down: their loops are open, and will not be continued."""
    _sessions.clear()
    forget_jobs()
    gradient_hook.forget()
