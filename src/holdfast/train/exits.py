"""How a worker must end when no launcher watches it (``mpirun --with-ft ulfm -n 4 python train.py``).

Open MPI tells the others of a worker that is killed, and does not tell them of one that ends with an exit code other
than 0, such as by an exception; they would wait for it for ever. So every end before training is over is made a kill.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from holdfast.errors import ScriptError


def kill_self() -> NoReturn:
    """End this process the way that all peers notice."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(1)  # never reached: nobody outlives SIGKILL


def end_so_that_others_notice(check: Callable[[], None]) -> None:
    """From now on, die of SIGKILL on an exception, and at the end of the script if training is not over.

    Args:
        check: Raises :class:`ScriptError` if training is not over.
    """
    show = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        show(kind, error, traceback)
        kill_self()

    def on_exit() -> None:
        try:
            check()
        except ScriptError as error:
            sys.stderr.write(f"error: {error}\n")
            kill_self()

    sys.excepthook = on_exception
    atexit.register(on_exit)
