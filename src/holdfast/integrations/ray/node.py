"""The node side: an actor of Ray, whose process is the launcher of a node of the job.

So the launcher ends with the actor, and its workers end with the launcher, as those of ``holdfast run`` do: they finish
their step and leave the job, and are killed if they do not within the grace period.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.integrations.ray.function import PackedFunction, kept_in_file
from holdfast.launch.job import Job
from holdfast.launch.launcher import launch
from holdfast.launch.target import module_file
from holdfast.observe.terminal.views import PlainView
from holdfast.records.types import CheckpointSaved


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOutcome:
    """How a node's part in the job ended; see :class:`~holdfast.launch.job.JobOutcome`. ``checkpoint``: the last, or ""."""

    exit_code: int
    message: str = ""
    traceback: str = ""
    checkpoint: str = ""
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether the job is done, and not only this node's part in it."""
        return self.exit_code == 0 and self.report.get("outcome") == "done"


class WorkerOutputView(PlainView):
    """Prints what the workers of this node print, and no events: another node prints those of the whole job."""

    def print_line(self, line: str) -> None:
        """Print nothing."""


class NodeActor:
    """Runs the launcher of one node."""

    def place(self) -> str:
        """Return where this process is, once Ray has started it."""
        return f"process {os.getpid()} on {socket.gethostname()}"

    def run(self, job: Job, function: PackedFunction | None, env: Mapping[str, str], folder: str) -> NodeOutcome:
        """Take part in the job until it ends.

        Args:
            job: The job, with the rank of this node.
            function: What the workers call; None if the job has a script.
            env: Variables of the workers.
            folder: Where a script is that is not in this process's directory, which Ray may have filled.
        """
        os.environ.update(env)
        os.environ["PYTHONPATH"] = os.pathsep.join(_import_path())
        with contextlib.ExitStack() as stack:
            if function is None:
                job = dataclasses.replace(job, script=job.script if job.script.is_file() else Path(folder, job.script))
            else:
                os.environ.update(stack.enter_context(kept_in_file(function)))
                job = dataclasses.replace(job, script=module_file(job.module))
            try:
                outcome = launch(job, PlainView() if job.node_rank == 0 else WorkerOutputView())
            except ConfigError as error:
                return NodeOutcome(exit_code=2, message=str(error))
        saved = [record.path for record in outcome.records if isinstance(record, CheckpointSaved)]
        return NodeOutcome(
            exit_code=outcome.exit_code,
            message=outcome.message,
            traceback=outcome.traceback,
            checkpoint=saved[-1] if saved else "",
            report=outcome.report,
        )


def _import_path() -> list[str]:
    """Return where Ray lets this process find modules besides those that are installed, such as the driver's directory."""
    installed = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return [entry for entry in sys.path if entry and not entry.startswith(installed)]
