"""PyTorch's own tests of ``torch.distributed``, as the wheel contains them: ``python on_backend.py BACKEND TEST ...``.

Prints a line of JSON for each test that has ended. :data:`BACKENDS` lists the backends. Without a test, lists all.

Each test runs in three new processes, which are forked from this one. Over ``holdfast-gloo`` they are workers of the
gloo fabric: the membership store is in a process of its own, which also reports the ends of the three, as a launcher
does. Over ``holdfast-ulfm`` this process is itself one of the three, and runs one test after the other: mpirun starts
it, and Open MPI connects each of its processes once. The first test that does not pass ends the run, because its ranks
may be anywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BACKENDS = ("gloo", "holdfast-gloo", "holdfast-ulfm")
WORLD_SIZE = 3


class _LikeGloo(str):
    """A name of a backend of which the tests ask all that they ask of Gloo, and that torch gets as it is."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _job_of(file_name: str) -> str:
    """Return the name of the job of a test's ranks, in the membership store: that of the file which torch gave them."""
    return Path(file_name).name


def make_case(backend: str, report: Callable[[str], None]) -> type[unittest.TestCase]:
    """Return the class of all of torch's tests, over a backend.

    Args:
        backend: One of :data:`BACKENDS`.
        report: Called with a line for each rank that was forked: its job, its number and its pid.
    """
    os.environ.update(
        BACKEND="gloo", WORLD_SIZE=str(WORLD_SIZE), MASTER_ADDR="127.0.0.1"
    )  # what to skip is as for Gloo
    import torch
    from torch.testing._internal.distributed import distributed_test as theirs

    if backend != "gloo":
        import holdfast.distributed  # noqa: F401 - registers the backend

        theirs.BACKEND = _LikeGloo("holdfast")
        theirs.PROFILING_SUPPORTED_BACKENDS.append("holdfast")
        theirs.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append("holdfast")
    base: Any = theirs.DistributedTest._DistTestBase

    class Suite(theirs.TestDistBackend, base):  # type: ignore[misc]
        """The tests, each in three new processes."""

        def setUp(self) -> None:
            super().setUp()
            os.environ["MASTER_PORT"] = str(_free_port())
            self._start_processes(torch.multiprocessing.get_context("fork").Process)
            for rank, process in enumerate(self.processes):
                report(f"{_job_of(self.file_name)} {rank} {process.pid}\n")

        @classmethod
        def _run(cls, rank: int, test_name: str, file_name: str, *args: Any, **kwargs: Any) -> None:
            if store := os.environ.get("SUITE_STORE"):
                ranks = ",".join(map(str, range(WORLD_SIZE)))
                ours = {"FABRIC": "gloo", "WORKERS": str(WORLD_SIZE), "RANKS": ranks, "RANK": str(rank)}
                ours |= {"STORE": f"holdfast://{store}/{_job_of(file_name)}"}
                os.environ.update({f"HOLDFAST_{name}": value for name, value in ours.items()})
            super()._run(rank, test_name, file_name, *args, **kwargs)

    return Suite


@contextlib.contextmanager
def _membership_store() -> Iterator[Callable[[str], None]]:
    """Host the membership store in a process of its own: a process with threads must not be forked."""
    token = secrets.token_hex(16)
    command = [sys.executable, str(Path(__file__).with_name("membership_store.py")), token]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as hub:
        assert hub.stdin is not None
        assert hub.stdout is not None
        os.environ.update(SUITE_STORE=hub.stdout.readline().strip(), HOLDFAST_TOKEN=token)
        try:
            yield hub.stdin.write
        finally:
            hub.stdin.close()


def _say(name: str, outcome: str, why: str = "") -> None:
    print(json.dumps({"test": name, "outcome": outcome, "why": why}), flush=True)


class _Lines(unittest.TextTestResult):
    """Prints the line of each test that has ended."""

    def _say(self, test: unittest.TestCase, outcome: str, why: str = "") -> None:
        _say(test.id().rpartition(".")[2], outcome, why)

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self._say(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._say(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._say(test, "failed", str(err[1]).strip())

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self._say(test, "failed", str(err[1]).strip())


def _run_forked(backend: str, names: list[str]) -> int:
    """Run each test in processes that are forked for it."""
    with contextlib.ExitStack() as stack:
        report = stack.enter_context(_membership_store()) if backend == "holdfast-gloo" else lambda line: None
        case = make_case(backend, report)
        suite = unittest.TestSuite(case(name) for name in names)
        runner = unittest.TextTestRunner(resultclass=_Lines, verbosity=0)
        return 0 if runner.run(suite).wasSuccessful() else 1


def _why_not_passed(case: Any, *args: Any) -> str:
    """Run a rank's side of a test, which ends by ``sys.exit``; return "" if it passed."""
    try:
        case._run(*args)
    except SystemExit as ended:
        return "" if ended.code == 0 else f"exit code {ended.code}"
    except Exception as error:  # the harness of the test itself, such as its first barrier
        return repr(error)
    return "the test did not end"


def _run_as_rank(backend: str, names: list[str]) -> int:
    """Run this rank's side of each test, in this process; ``TEMP_DIR`` is a folder of all ranks."""
    import torch

    case: Any = make_case(backend, lambda line: None)
    folder, rank = Path(os.environ["TEMP_DIR"]), int(os.environ["OMPI_COMM_WORLD_RANK"])
    for name in names:
        ours, theirs = torch.multiprocessing.Pipe()
        if why := _why_not_passed(case, rank, name, str(folder / name), theirs):
            _say(name, "failed", f"rank {rank}: {why} {ours.recv().strip() if ours.poll() else ''}")
            signal.pause()  # the other ranks may be in the middle of the test: all are ended from outside
        _say(name, "passed")
    return 0


def main() -> int:
    """Run tests by name, or list all of them."""
    backend, *names = sys.argv[1:]
    if backend not in BACKENDS:
        sys.exit(f"error: the backend must be one of {', '.join(BACKENDS)}, got {backend}")
    if not names:
        case = make_case(backend, lambda line: None)
        print("\n".join(unittest.defaultTestLoader.getTestCaseNames(case)))
        return 0
    return (_run_as_rank if backend == "holdfast-ulfm" else _run_forked)(backend, names)


if __name__ == "__main__":
    sys.exit(main())
