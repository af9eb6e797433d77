"""What happens outside of training loops: SIGTERM between two of them, and the end of the script."""

from __future__ import annotations

import atexit
import os
from pathlib import Path

from holdfast.comm import VirtualCommunicator
from holdfast.errors import STOPPED, CheckpointError, ScriptError
from holdfast.records.paths import stop_path
from holdfast.state.context import JobContext
from holdfast.state.loop_end import save_end, stop_at_end
from holdfast.state.run_log import RunLog

_stopped: list[JobContext] = []
"""The job whose state was saved between two loops on SIGTERM."""
_jobs: list[JobContext] = []
"""Jobs of this process that the end of the script must find complete, and saved."""


def note_job(job: JobContext) -> None:
    """From now on, save this job at the end of the script; with a launcher, or other workers, check it, too."""
    is_alone = not job.settings.run_dir and isinstance(job.comm, VirtualCommunicator)
    job.loops.may_save_outside = not is_alone or job.checkpoints.is_named
    if is_alone and job.loops.may_save_outside and not _jobs:
        atexit.register(_save_here, os.getpid())
    if job.loops.may_save_outside:
        _jobs.append(job)


def forget_job(job: JobContext) -> None:
    """Forget a job that this worker has left, or that has stopped: SIGTERM and the end of the script change nothing more."""
    _jobs[:] = [one for one in _jobs if one is not job]


def forget_jobs() -> None:
    """Forget jobs whose application was torn down; the next session notes its own."""
    for job in _take_jobs():  # first: SIGTERM looks for the end of a job that is noted
        job.loops.at_end = None


def on_sigterm(job: JobContext, *, is_outside: bool = False, has_own: bool = False) -> None:
    """Handle SIGTERM: all workers stop if the launcher requests it or there is none; else only this one leaves.

    Within a loop, the next commit vote stops all workers, or lets this one leave. Outside, the state at the end of the
    last loop is saved now, whatever the script is doing, and this worker ends.

    Args:
        job: The job context.
        is_outside: The last loop has ended. A loop that the script has left with ``break`` has not.
        has_own: The script has a handler of its own, which decides what happens next.

    Raises:
        SystemExit: outside of a loop, once the state is saved, unless the script has its own handler.
        CheckpointError: if it could not be saved.
    """
    run_dir = job.settings.run_dir
    if run_dir and not isinstance(job.comm, VirtualCommunicator) and not stop_path(Path(run_dir)).exists():
        job.pending.leaves = True
        return
    is_rebuilt = job.rebuilds.current is not None  # the vote in its next loop says so
    if job.loops.is_saving_end or (job.loops.at_end is None and (is_rebuilt or not is_outside)):
        if not has_own:
            job.pending.stops_all = True
    elif not is_outside or any(job is one for one in _jobs):
        _stop(job, has_own=has_own)


def stop_if_asked(job: JobContext) -> None:
    """Stop outside of a loop if SIGTERM arrived while the end of the last one was being saved.

    Raises:
        SystemExit: if so.
    """
    if job.pending.stops_all and job.loops.at_end is not None:
        _stop(job, has_own=False)


def _stop(job: JobContext, *, has_own: bool) -> None:
    if job.loops.at_end is None and not has_own:
        raise CheckpointError(
            "SIGTERM has ended this script outside of a training loop, and the state after it was not kept"
        )
    stop_at_end(job)
    _stopped[:] = [job]
    if not has_own:
        raise SystemExit(exit_code())


def exit_code() -> int:
    """Return the exit code of a script that has ended in order: 4 if it was stopped between two loops.

    Other workers may be in the next loop already, and wait. Membership stores report to them a process that does not end
    with 0; Open MPI reports one that does.
    """
    return STOPPED if _stopped and _stopped[0].comm.has_store else 0


def note_stop(job: JobContext) -> None:
    """At the start of a loop, find out whether all workers are to stop: a handler of the script may have taken the signal."""
    if job.settings.run_dir and stop_path(Path(job.settings.run_dir)).exists():
        job.pending.stops_all = True


def check_and_save() -> None:
    """At the end of the script, check that training is complete, and save its end.

    Raises:
        ScriptError: if the script has ended before the loop of the checkpoint, or of the workers that it was to join.
    """
    for job in _take_jobs():
        _check_reached(job)
        save_at_end(job)


def _take_jobs() -> list[JobContext]:
    """Return the jobs of this process, for which SIGTERM changes nothing any more: the script has ended."""
    jobs = list(_jobs)
    _jobs.clear()
    return jobs


def save_at_end(job: JobContext) -> None:
    """Save the state at the end of training, if the job has a directory for checkpoints; a failure is a warning."""
    if not job.checkpoints.is_named:
        return
    try:
        save_end(job)
    except CheckpointError:
        pass  # a warning says so, as of any checkpoint that could not be written
    except Exception as error:  # whatever it is, other workers wait for this one to end in order
        RunLog(job).warn(f"the state at the end of training could not be saved: {error!r}")


def _save_here(pid: int) -> None:
    """Save the ends of all jobs of a process that trains alone; no other worker asks whether they are complete."""
    if os.getpid() == pid:  # not one that the script has forked
        for job in _take_jobs():
            save_at_end(job)


def _check_reached(job: JobContext) -> None:
    loops = job.loops
    if not job.comm.members:
        if loops.has_missed:
            raise ScriptError(
                "the script ended before it had joined the other workers, in loops that are over: it decides what to train"
                f" by values that a new worker does not have. {_advice(job)}"
            )
        return
    if loops.loaded is None:
        return
    at = loops.loaded.info.get("script_epoch")
    where = f"epoch {at['number']}" if at else f"training loop {loops.loaded.info['loop']}"
    raise ScriptError(
        f"the script ended after {loops.number} training loops, before {where}, to which the checkpoint of step"
        f" {loops.loaded.step} belongs: nothing was trained. {_advice(job)}"
    )


def _advice(job: JobContext) -> str:
    if job.loops.calls:
        return "Ask for at least as many epochs as before"
    return 'What stands between loops, such as early stopping, runs in epochs that are over; use "for epoch in loader.epochs(N)", or session.epochs'


def passed_line(job: JobContext, name: str) -> str:
    """Return a line about a loop that was trained before the loaded checkpoint; ``name``: what has ``epochs``."""
    assert job.loops.loaded is not None
    line = (
        f"this loop was done before the checkpoint (step {job.loops.loaded.step}): it yields nothing, and what stands around"
        " it (evaluation, scheduler, best model) runs on the checkpoint's model"
    )
    return line if job.loops.script_epoch is not None else f'{line}; use "for epoch in {name}.epochs(N)"'
