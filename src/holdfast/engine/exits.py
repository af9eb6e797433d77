"""How a worker must end when no launcher watches it (``mpirun --with-ft ulfm -n 4 python train.py``).

Open MPI reports a killed process to its peers. It does not report one that ends with a non-zero exit code, such as
after an exception; the peers would wait for it forever. An exception is also a bug of the script and not a failure to
survive, so it ends the job. ``MPI_Abort`` cannot be used: with fault tolerance it was observed to hang.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from holdfast.base.device_errors import DeviceFailure, classify
from holdfast.base.side_work import run_aside
from holdfast.errors import ScriptError

_DAEMONS = ("prterun", "prted", "mpirun")
"""Names of the Open MPI processes that start workers."""
_LET_OUTPUT_THROUGH_S = 0.3
_END_WITHIN_S = 10.0
_SAY_S = 2.0
"""Before the stacks are printed, the process beside this one says for which ones it has waited."""


def kill_self() -> NoReturn:
    """End this process in the one way that all peers detect."""
    run_aside("writing the last output", _flush, None)
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(1)  # never reached: SIGKILL cannot be handled


def leave_quietly() -> NoReturn:
    """End this process, which no other waits for, with exit code 0, from any of its threads."""
    run_aside("writing the last output", _flush, None)
    os._exit(0)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


@contextlib.contextmanager
def stacks_and_exit_after(limit_s: float | None) -> Iterator[None]:
    """Print all stacks and exit with 1 if the block takes longer than ``limit_s``; None for no limit.

    Under mpirun another process says after 10 s, and again, for which ones this one waits: :mod:`holdfast.engine.mpi_start`.

    This works while a call into C keeps Python's lock, as ``MPI_Init`` does: no thread could raise then. A process has
    only one such timer: a limit replaces one that the script has set by ``faulthandler.dump_traceback_later``, and the
    end of the block cancels it.
    """
    if limit_s is None:
        yield
        return
    beside = None
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        # It gets the moment from which the limit counts: on a busy machine it starts late, and would speak too late.
        times = (str(limit_s), str(time.monotonic()))
        command = [sys.executable, "-S", "-E", str(Path(__file__).with_name("mpi_start.py")), *times]
        beside = run_aside(
            "the process that says for which ones this one waits",
            lambda: subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL),
            None,
        )
    faulthandler.dump_traceback_later(
        limit_s + _SAY_S, file=2, exit=True
    )  # sys.stderr may be no file, as in a notebook
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        if beside is not None:
            beside.kill()
            beside.wait()


def end_job() -> NoReturn:
    """End all workers by signalling the Open MPI process that started this one; ``mpirun`` then exits with 1."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getppid()
    if Path("/proc", str(parent), "comm").read_text().strip() in _DAEMONS:
        time.sleep(_LET_OUTPUT_THROUGH_S)
        os.kill(parent, signal.SIGTERM)
        time.sleep(_END_WITHIN_S)
    kill_self()


def end_job_on_errors(check: Callable[[], None]) -> None:
    """From this call on, end the job on an exception, and at the end of the script if training is not complete.

    Args:
        check: Raises :class:`ScriptError` if training is not complete.
    """
    show, worker = sys.excepthook, os.getpid()

    def on_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        show(kind, error, traceback)
        if os.getpid() != worker:
            return  # a process that the script has forked
        if classify(error) is DeviceFailure.LOST:
            kill_self()  # the other workers continue
        end_job()

    def on_exit() -> None:
        if os.getpid() != worker:
            return
        try:
            check()
        except ScriptError as error:
            sys.stderr.write(f"error: {error}\n")
            end_job()

    sys.excepthook = on_exception
    atexit.register(on_exit)
