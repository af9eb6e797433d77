"""``holdfast status``: says how a run goes, or how it went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from holdfast.base.formatting import DASH
from holdfast.cli.tables import count, print_json, say, table
from holdfast.errors import STOPPED, ConfigError

if TYPE_CHECKING:
    from holdfast.launch.control import RunningJob
    from holdfast.observe.monitor.observed import ObservedJob, ObservedWorker

_NOTHING_RUNS = 1
_EVENTS = 5
_MOST_WORKERS = 40


def status(
    directory: Annotated[
        Path | None, Argument(metavar="DIR", help="Report directory of a run, which may still be running.")
    ] = None,
    *,
    job: Annotated[
        int | None, Option("--job", metavar="NUMBER", help="PID of its launcher, if several jobs run.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of text.")] = False,
) -> int:
    """Say how a run goes, or how it went.

    Without DIR, shows the job of this user that runs on this machine; if there are several, lists them. Exits with 0 if
    a job runs, or the run has ended well; with 4 if it was stopped with its state saved; with 1 if it failed, or if no
    job runs.

    Example: holdfast status out
    """
    from holdfast.launch.control import running_jobs

    jobs = list(running_jobs())
    if directory is not None:
        if job is not None:
            raise ConfigError(f"give either DIR or --job, got {directory} and --job {job}")
        running = next((one for one in jobs if _reports_to(one, directory)), None)
        return _show_folder(directory, as_json=as_json) if running is None else _show_job(running, as_json=as_json)
    if job is not None:
        from holdfast.launch.control import find

        return _show_job(find(job), as_json=as_json)
    if not jobs:
        print_json([]) if as_json else say("no job of yours runs on this machine")
        return _NOTHING_RUNS
    if len(jobs) == 1:
        return _show_job(jobs[0], as_json=as_json)
    return _list(jobs, as_json=as_json)


def _reports_to(job: RunningJob, directory: Path) -> bool:
    return bool(job.report_dir) and Path(job.report_dir).resolve() == directory.resolve()


def _show_job(running: RunningJob, *, as_json: bool) -> int:
    from holdfast.observe.monitor.observed import ObservedJob

    job = ObservedJob(running)
    job.poll()
    if as_json:
        print_json(_state(job))
    else:
        show(job)
    return 0


def show(job: ObservedJob) -> None:
    """Print a running job."""
    running = job.running
    where = f" in {running.folder}" if running.folder and not running.is_from_here else ""
    say(f"{running.script}: job {running.pid}{where}", "bold")
    _show(_state(job), job.workers)


def _state(job: ObservedJob) -> dict[str, Any]:
    return job.live.full(job.now_s()) | {"waits_for": job.waits_for}


def _show_folder(directory: Path, *, as_json: bool) -> int:
    from holdfast.observe.monitor.followed import FollowedFolder
    from holdfast.summary.files import load_report

    run = FollowedFolder(directory, directory.resolve().name)
    has_ended = (directory / "report.json").is_file()
    if not run.has_records:
        what = (
            "events.jsonl has no records" if has_ended else "there is no report.json, and no records of a running job"
        )
        raise ConfigError(f"{directory} has no run: {what}; give the directory of holdfast run --report")
    state = run.live.full(run.now_s()) | {"waits_for": ""}
    if as_json:
        print_json(state)
    else:
        say(f"{state['run']['script']}: {directory}", "bold")
        _show(state, {})
    return _exit_code(load_report(directory)) if has_ended else 0


def _exit_code(report: dict[str, Any]) -> int:
    """Return the exit code of the run as far as its report tells: 1 stands for every failure."""
    if report["outcome"] == "stopped":
        return STOPPED if report.get("checkpoint") else 1
    return 0 if report["outcome"] == "done" else 1


def _show(state: dict[str, Any], workers: dict[int, ObservedWorker]) -> None:
    from holdfast.cli.run_text import WORKER_COLUMNS, event_lines, facts, shown_workers, worker_cells

    entries = facts(state, state.get("waits_for", ""))
    say(entries[0][1])
    if entries[1:]:
        table(("", ""), entries[1:])
    say("")
    shown = shown_workers(state, _MOST_WORKERS)
    table(*_without_empty(WORKER_COLUMNS, [worker_cells(state, row, workers) for row in shown]))
    if left_out := len(state["workers"]) - len(shown):
        say(f"... and {count(left_out, 'more worker')}; --json has all of them", "dim")
    if lines := event_lines(state, _EVENTS):
        say("")
        for line in lines:
            say(line)


def _without_empty(heads: Sequence[str], rows: list[tuple[str, ...]]) -> tuple[list[str], list[list[str]]]:
    """Return the columns in which a row says something."""
    kept = [place for place in range(len(heads)) if any(row[place] not in ("", DASH) for row in rows)]
    return [heads[place] for place in kept], [[row[place] for place in kept] for row in rows]


def _list(running: list[RunningJob], *, as_json: bool) -> int:
    from holdfast.base.formatting import rough
    from holdfast.observe.monitor.observed import ObservedJob

    jobs = [ObservedJob(one) for one in running]
    for job in jobs:
        job.poll()
    states = [_state(job) for job in jobs]
    if as_json:
        print_json(states)
        return 0
    rows = [
        (job.running.pid, job.running.script, rough(state["now_s"]), state["state"]["sentence"])
        for job, state in zip(jobs, states, strict=True)
    ]
    table(("job>", "script", "for>", "state"), rows)
    say(f"holdfast status --job {running[0].pid} shows one of them")
    return 0
