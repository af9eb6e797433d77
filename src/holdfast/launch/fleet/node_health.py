"""Whether this machine is fit to take part in a job: the command of ``--health-check`` says it, before the machine joins.

It runs beside everything else that starts, in a process group of its own, so that a command that hangs, on a dead disk
for instance, is a machine that is unfit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time

from holdfast.base.phases import Phase
from holdfast.errors import JobError, StoreLost
from holdfast.launch.job import Job
from holdfast.membership import Store

_LINE = 200
"""Characters of the command's last line that are shown."""


class NodeCheck:
    """The check of this machine; it begins at once, and :meth:`admit` waits for it.

    Args:
        command: A command for the shell that ends with 0 if the machine is fit; "": nothing is checked.
        limit_s: Seconds until a command that has not ended counts as failed.
    """

    def __init__(self, command: str, limit_s: float = Phase.NODE_CHECK.value.fixed_s) -> None:
        self._limit_s = limit_s
        self._ends_s = time.monotonic() + limit_s
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - close() closes it
        self._process = self._start(command) if command else None

    @classmethod
    def of_job(cls, job: Job) -> NodeCheck:
        """Return the check that a job asks for; none where mpirun starts its workers on other machines."""
        return cls("" if job.is_virtual or job.hosts else job.health_check)

    def _start(self, command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that close() reaches what the command has started
        )

    def why_unfit(self) -> str:
        """Wait for the command; return why the machine is unfit, or ""."""
        if self._process is None:
            return ""
        try:
            code = self._process.wait(max(0.0, self._ends_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"the command did not end within {self._limit_s:g} s"
        if code == 0:
            return ""
        ended = f"the command ended with {code}" if code > 0 else f"the command was killed by signal {-code}"
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return f"{ended}: {lines[-1][:_LINE]}" if lines else ended

    def admit(self, store: Store | None = None, node: int = 0) -> None:
        """Wait for the command; does nothing the second time.

        Args:
            store: The store of the launchers; None if there is one node. An unfit node is noted in it.
            node: Rank of this node.

        Raises:
            JobError: if this machine is unfit; the message says why.
        """
        why = self.why_unfit()
        self.close()
        if why:
            if store is not None:
                with contextlib.suppress(StoreLost):
                    store.put(f"unfit/{node}", why)
            raise JobError(f"node {node} stays out of the job, because it is unfit: {why} (--health-check)")
        if store is not None:
            store.delete(f"unfit/{node}")

    def close(self) -> None:
        """End the command, if it still runs."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # A process that waits for a dead disk cannot be killed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
        self._output.close()
