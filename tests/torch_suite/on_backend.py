"""PyTorch's own tests of ``torch.distributed``, as the wheel contains them: ``python on_backend.py BACKEND TEST ...``.

Each test runs in three new processes, which are forked from this one. For the backend ``holdfast`` they are workers of
the gloo fabric, whose membership store is a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import unittest
from collections.abc import Iterator
from typing import Any

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


def make_case(backend: str) -> type[unittest.TestCase]:
    """Return the class of all of torch's tests, over a backend."""
    os.environ.update(
        BACKEND="gloo", WORLD_SIZE=str(WORLD_SIZE), MASTER_ADDR="127.0.0.1"
    )  # what to skip is as for Gloo
    import torch
    from torch.testing._internal.distributed import distributed_test as theirs

    if backend == "holdfast":
        import holdfast.distributed  # noqa: F401 - registers the backend

        theirs.BACKEND = _LikeGloo(backend)
        theirs.PROFILING_SUPPORTED_BACKENDS.append(backend)
        theirs.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(backend)
    base: Any = theirs.DistributedTest._DistTestBase

    class Suite(theirs.TestDistBackend, base):  # type: ignore[misc]
        """The tests, each in three new processes."""

        def setUp(self) -> None:
            super().setUp()
            os.environ["MASTER_PORT"] = str(_free_port())
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank: int, test_name: str, *args: Any, **kwargs: Any) -> None:
            if store := os.environ.get("SUITE_STORE"):
                ranks = ",".join(map(str, range(WORLD_SIZE)))
                ours = {"FABRIC": "gloo", "WORKERS": str(WORLD_SIZE), "RANKS": ranks, "RANK": str(rank)}
                ours |= {"STORE": f"holdfast://{store}/{test_name}-{os.getppid()}"}
                os.environ.update({f"HOLDFAST_{name}": value for name, value in ours.items()})
            super()._run(rank, test_name, *args, **kwargs)

    return Suite


_HUB = """
import sys
from holdfast.membership import Hub
with Hub(sys.argv[1], "127.0.0.1") as hub:
    print(hub.address, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def _membership_store() -> Iterator[None]:
    """Host the membership store in a process of its own: a process with threads must not be forked."""
    token = secrets.token_hex(16)
    command = [sys.executable, "-c", _HUB, token]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as hub:
        assert hub.stdin is not None
        assert hub.stdout is not None
        os.environ.update(SUITE_STORE=hub.stdout.readline().strip(), HOLDFAST_TOKEN=token)
        try:
            yield
        finally:
            hub.stdin.close()


class _Lines(unittest.TextTestResult):
    """Prints a line of JSON for each test that has ended: its name, its outcome, and why it was skipped."""

    def _say(self, test: unittest.TestCase, outcome: str, why: str = "") -> None:
        name = test.id().rpartition(".")[2]
        print(json.dumps({"test": name, "outcome": outcome, "why": why}), flush=True)

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


def main() -> int:
    """Run tests by name, or list all of them."""
    backend, *names = sys.argv[1:]
    case = make_case(backend)
    if not names:
        print("\n".join(unittest.defaultTestLoader.getTestCaseNames(case)))
        return 0
    suite = unittest.TestSuite(case(name) for name in names)
    with _membership_store() if backend == "holdfast" else contextlib.nullcontext():
        runner = unittest.TextTestRunner(resultclass=_Lines, verbosity=0)
        return 0 if runner.run(suite).wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
