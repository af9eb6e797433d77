"""One line for an error with which the system refuses a process what it needs: files, memory, processes, space."""

from __future__ import annotations

import errno
import resource

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
_OTHERS = (errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def refusal(error: BaseException) -> str:
    """Return in one line what the system refused and what to do, "" if ``error`` is none of these errors."""
    if isinstance(error, MemoryError):
        error = OSError(errno.ENOMEM, "Cannot allocate memory")
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        error = OSError(errno.EAGAIN, "Cannot start a thread")
    if not isinstance(error, OSError) or error.errno not in (*_REFUSED, *_OTHERS):
        return ""
    place = "" if error.filename is None else f" ({error.filename})"
    what = f"{error.strerror}{place}"
    if error.errno not in _REFUSED:
        return what
    said, kind, cure = _REFUSED[error.errno]
    limit = resource.getrlimit(kind)[0]
    return what if limit == resource.RLIM_INFINITY else f"{what}: {said.format(limit)}; {cure}"


def is_limit(error: OSError) -> bool:
    """Return whether a limit of this process is the likely cause, as opposed to the place that it wrote to."""
    return error.errno in _REFUSED
