"""What the system refused a command, in one line: a limit of the machine is no bug, and needs no traceback."""

from __future__ import annotations

import errno
import os
import traceback

_PROCESSES = "raise the limit of processes: ulimit -u, or pids.max of the control group"
_FILES = "raise the limit of open files: ulimit -n"
_MEMORY = "give the job more memory, or start fewer workers"
_THREADS = "can't start new thread"
"""What CPython says, without an error number."""
_STARTS = {"_execute_child", "_fork_exec", "fork"}
"""Functions in which EAGAIN means that there are too many processes."""


def refused_by_system(error: BaseException) -> str:
    """Return what the system refused and what to do about it; "" if the error has another reason."""
    if isinstance(error, MemoryError):
        return f"there is no memory left: {_MEMORY}"
    if isinstance(error, RuntimeError) and str(error) == _THREADS:
        return f"the system refused to start another thread: {_PROCESSES}"
    if not isinstance(error, OSError):
        return ""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"the system refused to open another file: {os.strerror(error.errno)}; {_FILES}"
    if error.errno == errno.ENOMEM:
        return f"the system refused memory: {os.strerror(error.errno)}; {_MEMORY}"
    if error.errno == errno.EAGAIN and _raised_in(error) in _STARTS:
        return f"the system refused to start another process: {os.strerror(error.errno)}; {_PROCESSES}"
    return ""


def _raised_in(error: BaseException) -> str:
    """Return the name of the function that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].name if frames else ""
