"""Exit status of a job: whether to restart it, its exit code and its message. Pure: no clock, process or file."""

from __future__ import annotations

from holdfast.errors import STOPPED
from holdfast.launch.command_line import resume_command
from holdfast.launch.job import Job
from holdfast.launch.job_state import JobBroken, JobCompleted, JobLost, JobState, NodeDeparted, Verdict
from holdfast.records.types import CheckpointSaved, ScriptFailed


def explain(job: Job, verdict: Verdict, state: JobState) -> tuple[int, str, str]:
    """Return exit code, message and traceback, as in :class:`~holdfast.launch.job.JobOutcome`."""
    workers = len(state.workers_alive()) or 1
    match verdict:
        case JobCompleted(finished=finished) if finished.outcome == "done":
            why = state.differing()
            return int(bool(why)), why, ""
        case NodeDeparted():
            return job.left_code, f"the workers of node {job.node_rank} have left as requested; the job continues", ""
        case JobCompleted(finished=finished):
            return _explain_early_end(job, finished.outcome, finished.checkpoint, finished.step, workers)
        case JobBroken(exit_code=2):
            return 2, verdict.message, verdict.traceback
        case JobBroken():
            code = job.no_requeue_code if verdict.is_final else verdict.exit_code
            return code, f"{verdict.message}{_saved(job, state.saved, workers)}", verdict.traceback
    raise AssertionError(verdict)


def _explain_early_end(job: Job, outcome: str, checkpoint: str, step: int, workers: int) -> tuple[int, str, str]:
    if outcome == "stopped":
        why = f"stopped on request before step {step}"
    else:
        why = f"too few workers are left to continue at step {step} (--min-workers {job.settings.min_workers})"
    if not checkpoint:
        return 1, f"{why}; nothing was saved, because there is no --checkpoint-dir", ""
    code = STOPPED if outcome == "stopped" else 1
    return code, f"{why}. {_go_on(job, step, checkpoint, workers)}", ""


def _saved(job: Job, saved: CheckpointSaved | None, workers: int) -> str:
    """Return a sentence about the newest checkpoint to append, or ""."""
    return "" if saved is None else f". {_go_on(job, saved.step, saved.path, workers)}"


def _go_on(job: Job, step: int, checkpoint: str, workers: int) -> str:
    parent, _, name = checkpoint.rpartition("/")
    folder = job.settings.checkpoint_dir or (parent if name.startswith("step-") else checkpoint)
    return f"The state before step {step} is saved in {checkpoint}; resume with: {resume_command(job, workers, folder)}"


def why_not_again(
    job: Job,
    lost: JobLost,
    restarts: int,
    workers: int,
    *,
    in_vain: int,
    stopping: bool,
    distributed: bool,
    could_not_connect: bool = False,
) -> JobBroken | None:
    """Return the verdict if a lost job must not be restarted, None if it may be.

    ``restarts`` counts the restarts so far, ``in_vain`` those since a step was committed for the first time, ``workers``
    the workers of the next start; ``distributed``: the script uses ``torch.distributed``; ``could_not_connect``: no worker
    of the last start was connected to the others, which another try, or a working network, may change.
    """
    if stopping and distributed:
        return JobBroken(f"stopped on request: {lost.reason}")
    if stopping:
        return JobBroken(f"stopped on request, but the workers died before they could save: {lost.reason}")
    if 0 < job.max_no_progress <= in_vain:
        message = f"no new step was committed since {in_vain} restarts (--max-no-progress {job.max_no_progress})"
        is_final = lost.is_final and not could_not_connect
        return JobBroken(f"{message}: {lost.reason}", unexplained=True, is_final=is_final)
    if restarts >= job.max_restarts:
        times = {1: "once", 2: "twice"}.get(restarts + 1, f"{restarts + 1} times")
        message = f"the job was lost {times}, and --max-restarts is {job.max_restarts}: {lost.reason}"
        return JobBroken(message, unexplained=True)
    if workers < job.settings.min_workers:
        least = f"fewer than --min-workers {job.settings.min_workers}"
        return JobBroken(f"{workers} workers are left, {least}: {lost.reason}")
    return None


def unsaid(broken: JobBroken) -> ScriptFailed:
    """Return the record of why the run failed, if no worker has written one."""
    rank, step, message = broken.rank, broken.step, broken.message
    return ScriptFailed(rank=rank, step=step, exit_code=1, message=message, traceback="", is_bug=broken.is_final)
