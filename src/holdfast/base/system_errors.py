"""One line for an error with which the system refuses a process what it needs: files, memory, processes, space."""

from __future__ import annotations

import errno
import os
import re
import resource
import sys

_REFUSED = {
    errno.EMFILE: ("this process may open only {} files", resource.RLIMIT_NOFILE, "raise the limit (ulimit -n)"),
    errno.EAGAIN: ("this user may run only {} processes", resource.RLIMIT_NPROC, "raise the limit (ulimit -u)"),
    errno.EFBIG: (
        "this process may write files of only {} bytes",
        resource.RLIMIT_FSIZE,
        "raise the limit (ulimit -f)",
    ),
    errno.ENOMEM: ("this process may use only {} bytes of memory", resource.RLIMIT_AS, "give it more (ulimit -v)"),
}
"""What is refused, the limit that may be the cause, and what to do."""
_OTHERS = (errno.EACCES, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EBADF)
KINDS = (OSError, MemoryError, RuntimeError, ImportError, LookupError, SystemError)
"""Kinds of the errors of which :func:`refusal` may say something."""


_OF_TORCH = (
    (
        re.compile(r"DataLoader worker .*(killed by signal: Killed|exited unexpectedly)", re.DOTALL),
        errno.ENOMEM,
        "A process that loads data was killed, most often for want of memory; give the job more, or set num_workers lower",
    ),
    (
        re.compile(
            r"unable to (allocate|resize|mmap|open|write).*(No space left on device|\(28\))|killed by signal: Bus error",
            re.DOTALL,
        ),
        errno.ENOSPC,
        "Shared memory is full (/dev/shm); make it larger (docker run --shm-size), or set num_workers lower",
    ),
)
"""What torch says of an error of the system in a RuntimeError of its own."""


def refusal(error: BaseException) -> str:
    """Return in one line what the system refused and what to do, "" if ``error`` is none of these errors."""
    error = _as_os_error(error)
    if isinstance(error, OSError) and error.filename == sys.executable:
        return f"cannot start {sys.executable}: {error.strerror}; it may have been replaced while this process ran"
    if not isinstance(error, OSError) or error.errno not in (*_REFUSED, *_OTHERS):
        return ""
    place = "" if error.filename is None else f" ({error.filename})"
    what = f"{error.strerror}{place}"
    if error.errno == errno.EBADF:
        return f"{what}: a file or socket of Holdfast was closed by other code, such as the script"
    if error.errno not in _REFUSED:
        return what
    template, kind, cure = _REFUSED[error.errno]
    return f"{what}: {template.format(resource.getrlimit(kind)[0])}; {cure}" if is_limited(kind) else what


def _as_os_error(error: BaseException) -> BaseException:
    """Return the OSError that Python, or the loader of libraries, replaced by one of another kind."""
    text = str(error)
    if isinstance(error, MemoryError) or (isinstance(error, ImportError | OSError) and "failed to map segment" in text):
        return OSError(errno.ENOMEM, "Cannot allocate memory")
    if isinstance(error, SystemError) and "without" in text and is_limited(resource.RLIMIT_AS):
        # "error return without exception set": there was no memory for the exception itself
        return OSError(errno.ENOMEM, "Cannot allocate memory")
    if isinstance(error, ImportError) and "Too many open files" in text:
        return OSError(errno.EMFILE, "Too many open files")
    if isinstance(error, ModuleNotFoundError):  # also if its folder could not be opened
        return error_of_a_new_file() or error
    if isinstance(error, RuntimeError) and "can't start new thread" in text:
        return OSError(errno.EAGAIN, "Cannot start a thread")
    if (refused := refusal_to_torch(error)) is not None:
        return refused
    if isinstance(error, LookupError) and text.startswith("unknown encoding: "):  # Python could not load its module
        return OSError(errno.ENOMEM, f"Cannot load Python's encoding {text.removeprefix('unknown encoding: ')}")
    return error


def refusal_to_torch(error: BaseException) -> OSError | None:
    """Return what the system refused, if torch raised ``error`` and only its text, or that of its cause, says so."""
    text = f"{error}\n{error.__cause__ or ''}" if isinstance(error, RuntimeError) else ""
    if "exited unexpectedly with exit code" in text:  # the process has raised, and nothing ended it from outside
        return None
    return next((OSError(number, what) for pattern, number, what in _OF_TORCH if pattern.search(text)), None)


def error_of_a_new_file() -> OSError | None:
    """Return the error that this process gets if it opens another file, None if it gets none."""
    try:
        os.close(os.open("/", os.O_RDONLY | os.O_DIRECTORY))
    except OSError as error:
        return OSError(error.errno, error.strerror)
    return None


def is_limited(kind: int) -> bool:
    """Return whether this process has a limit of this kind, one of ``resource.RLIMIT_*``."""
    return resource.getrlimit(kind)[0] != resource.RLIM_INFINITY


def is_limit(error: OSError) -> bool:
    """Return whether a limit of this process is the likely cause, as opposed to the place that it wrote to."""
    return error.errno in _REFUSED
