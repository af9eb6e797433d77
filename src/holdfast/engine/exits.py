"""How a worker must end when no launcher watches it (``mpirun --with-ft ulfm -n 4 python train.py``).

Open MPI tells the others of a worker that is killed, and does not tell them of one that ends with an exit code other
than 0, such as by an exception; they would wait for it for ever. And an exception is a bug of the script, not a failure
to survive, so it ends the job. ``MPI_Abort`` does not: with fault tolerance it was seen to hang.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from holdfast.errors import ScriptError

_DAEMONS = ("prterun", "prted", "mpirun")
"""Names of Open MPI's processes that start workers."""
_LET_OUTPUT_THROUGH_S = 0.3
_END_WITHIN_S = 10.0


def kill_self() -> NoReturn:
    """End this process the way that all peers notice."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(1)  # never reached: nobody outlives SIGKILL


def end_job() -> NoReturn:
    """End all workers, by asking the process of Open MPI that started this one; ``mpirun`` then exits with 1."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getppid()
    if Path("/proc", str(parent), "comm").read_text().strip() in _DAEMONS:
        time.sleep(_LET_OUTPUT_THROUGH_S)
        os.kill(parent, signal.SIGTERM)
        time.sleep(_END_WITHIN_S)
    kill_self()


def end_job_on_errors(check: Callable[[], None]) -> None:
    """From now on, end the job on an exception, and at the end of the script if training is not over.

    Args:
        check: Raises :class:`ScriptError` if training is not over.
    """
    show = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        show(kind, error, traceback)
        end_job()

    def on_exit() -> None:
        try:
            check()
        except ScriptError as error:
            sys.stderr.write(f"error: {error}\n")
            end_job()

    sys.excepthook = on_exception
    atexit.register(on_exit)
