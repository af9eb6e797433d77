"""``holdfast dashboard``: a server for runs of other launchers."""

from __future__ import annotations

import functools
import json
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.launch.control import RunningJob, request_changes, running_jobs
from holdfast.launch.supervise.processes import Process
from holdfast.observe.address import host_and_port
from holdfast.observe.monitor.dashboard import CHANGE_ACTIONS, check_names
from holdfast.observe.monitor.feed import Feed, Refused, run_id
from holdfast.observe.monitor.followed import FollowedFolder
from holdfast.observe.monitor.server import DashboardServer
from holdfast.observe.monitor.token import Token

_LOOK_S = 0.5
_ACTIONS = (*CHANGE_ACTIONS, "stop")
"""Actions on a job of another launcher on this machine."""


def serve_runs(directories: Sequence[Path], where: str, say: Callable[[str], None]) -> None:
    """Serve the runs in some directories until the process is interrupted; without directories, the jobs that run here.

    Args:
        directories: Report directories, or directories of running jobs.
        where: ``[HOST:]PORT``.
        say: Displays a line: the URL, with the token.

    Raises:
        ConfigError: if a directory has no run, or the port cannot be opened.
    """
    host, port = host_and_port(where, "--port")
    jobs = {job.run_dir.resolve(): job for job in running_jobs()}
    if not (directories or jobs):
        raise ConfigError("no job of yours runs on this machine: give the report directories of runs, such as out")
    runs: dict[str, FollowedFolder] = {}
    for directory in directories or sorted(jobs):
        job = jobs.get(directory.resolve())
        name = run_id(directory.resolve().name if job is None else f"{job.script}-{job.pid}", runs)
        act = None if job is None else functools.partial(_act, job)
        log_dir = Path(job.log_dir) if job is not None and job.log_dir else None
        runs[name] = FollowedFolder(directory, name, act, () if job is None else _ACTIONS, log_dir)
    with tempfile.TemporaryDirectory(prefix="holdfast-dashboard-") as folder:
        server = DashboardServer(host, port, Token.in_folder(Path(folder)), option="--port")
        try:
            server.feeds.update({name: Feed(run) for name, run in runs.items()})
            say(f"dashboard at {server.url}")
            for directory, run in zip(directories, runs.values(), strict=False):
                if not run.has_records:
                    say(f"{directory} has no records of a run yet; it is followed")
            while True:
                time.sleep(_LOOK_S)
                for run in runs.values():
                    run.poll()
        finally:
            server.close()


def _act(job: RunningJob, action: str, values: Mapping[str, Any]) -> str:
    """Request an action of a job of another launcher on this machine."""
    try:
        if action == "stop":
            check_names(action, values, ())
            launcher = Process.parse(job.process)
            if launcher is None or not launcher.send(signal.SIGTERM):
                raise Refused(f"job {job.pid} ({job.script}) has ended in the meantime")
            return "the job stops; its workers finish their step and save"
        check_names(action, values, CHANGE_ACTIONS[action])
        changes = {"save": True} if action == "save" else dict(values)
        request_changes(job, from_dashboard=True, **changes)
    except ConfigError as error:
        raise Refused(str(error)) from None
    return f"requested: {json.dumps(changes)}"
