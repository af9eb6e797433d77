"""Runs PyTorch's own tests of ``torch.distributed`` over a backend, in processes of their own; reads what they gave."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).parent / "on_backend.py"
RANKS = 3
_END_WITHIN_S = 10.0
_GRACE_S = 30.0
"""Over the limit of a test, which the harness of torch enforces by itself where it forks the ranks."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a test gave.

    Args:
        outcome: ``passed``, ``failed`` or ``skipped``.
        why: The first reason that a rank gave; "" if it passed.
    """

    outcome: str
    why: str = ""


def run(
    backend: str, tests: Sequence[str], limit_s: float = 120, show: Callable[[str], object] = lambda name: None
) -> dict[str, Result]:
    """Return what the tests gave on a backend, by name.

    Args:
        backend: ``gloo``, ``holdfast-gloo`` or ``holdfast-ulfm``.
        tests: Their names.
        limit_s: Seconds that one test may take.
        show: Called with the name of each test that has ended.
    """
    found: dict[str, Result] = {}
    left = list(tests)
    while left:  # more than once only where a test that has failed ends the others
        for name, result in _run_some(backend, left, limit_s):
            found[name] = result
            show(name)
        if left[0] not in found:
            found[left[0]] = Result("failed", f"no result within {limit_s:g} s")
        left = [name for name in left if name not in found]
    return found


def _run_some(backend: str, tests: list[str], limit_s: float) -> Iterator[tuple[str, Result]]:
    """Yield the result of each test that has ended, until one has failed if ranks run one test after the other."""
    by_ranks = backend == "holdfast-ulfm"
    passed: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, _processes(backend, tests, limit_s, folder) as process:
        for line in _lines(process, limit_s + _GRACE_S):
            told = json.loads(line)
            name, result = told["test"], Result(told["outcome"], told["why"])
            passed[name] += 1
            if by_ranks and result.outcome == "passed" and passed[name] < RANKS:
                continue
            yield name, result
            if by_ranks and result.outcome == "failed":
                return


@contextlib.contextmanager
def _processes(backend: str, tests: list[str], limit_s: float, folder: str) -> Iterator[subprocess.Popen[str]]:
    """Start the processes that run the tests, and end them."""
    command = [sys.executable, str(SCRIPT), backend, *tests]
    env = os.environ | {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": f"{limit_s:g}", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if backend == "holdfast-ulfm":
        from holdfast.comm.fabrics.ulfm import mpirun_command

        command = [*mpirun_command(RANKS), *command]
        env |= _shared_by_ranks(folder)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1, env=env
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _shared_by_ranks(folder: str) -> Mapping[str, str]:
    """Return what the harness of torch sets where it forks the ranks: their folder, and where they meet."""
    for name in ("barrier", "test_dir"):
        Path(folder, name).mkdir()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return {"TEMP_DIR": folder, "MASTER_PORT": str(port)}


def _lines(process: subprocess.Popen[str], limit_s: float) -> Iterator[str]:
    """Yield the lines of JSON that a process prints, until it ends or prints none for ``limit_s``."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(limit_s) and (line := process.stdout.readline()):
            if (begin := line.find('{"test"')) >= 0:
                yield line[begin:]
