"""Tells Open MPI's library in this process that another process has ended, before its runtime does.

MPI_Comm_agree and MPI_Comm_shrink wait for a failed process until the library knows of the failure. It learns of it as an
event of PMIx, which mpirun sends to every process. The same event can be raised here, for this process alone, through the
public interface of PMIx. The library then handles it as it handles the one from mpirun, which it later ignores.
"""

from __future__ import annotations

import ctypes
import os

_LIBRARY = "libpmix.so.2"
_ENDED = -200
"""PMIX_ERR_PROC_TERM_WO_SYNC; every Open MPI 5 takes it for a failure."""
_HERE_ONLY = 7
"""PMIX_RANGE_PROC_LOCAL."""
_BOOL, _PROC = 1, 22
"""PMIX_BOOL and PMIX_PROC."""


class _Proc(ctypes.Structure):
    """``pmix_proc_t``."""

    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Array(ctypes.Structure):
    """``pmix_data_array_t``."""

    _fields_ = (("type", ctypes.c_uint16), ("size", ctypes.c_size_t), ("array", ctypes.c_void_p))


def report_ended(place: int) -> bool:
    """Raise the event that the process with the rank ``place`` in MPI_COMM_WORLD has failed, in this process.

    Returns:
        Whether the library was told. False if this Open MPI has no PMIx of its own beside it; MPI then learns of the
        failure from mpirun only.
    """
    try:
        pmix = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)  # the one that MPI uses, or none
        space = os.environ["PMIX_NAMESPACE"].encode()
        own_process = _Proc(space, int(os.environ["PMIX_RANK"]))
        info = _affected(pmix, _Proc(space, place))
        code: int = pmix.PMIx_Notify_event(
            _ENDED,
            ctypes.byref(own_process),
            ctypes.c_uint8(_HERE_ONLY),
            ctypes.c_void_p(info.array),
            ctypes.c_size_t(info.size),
            None,
            None,
        )
    except (OSError, AttributeError, KeyError):
        return False
    pmix.PMIx_Info_free(ctypes.c_void_p(info.array), ctypes.c_size_t(info.size))
    return code == 0


def _affected(pmix: ctypes.CDLL, process: _Proc) -> _Array:
    """Return the attributes of the event. It is not kept for handlers that are registered later."""
    pmix.PMIx_Info_list_start.restype = ctypes.c_void_p
    attributes, result, yes = ctypes.c_void_p(pmix.PMIx_Info_list_start()), _Array(), ctypes.c_bool(True)
    for name, value, kind in ((b"pmix.evproc", process, _PROC), (b"pmix.evnocache", yes, _BOOL)):
        pmix.PMIx_Info_list_add(attributes, name, ctypes.byref(value), ctypes.c_uint16(kind))
    pmix.PMIx_Info_list_convert(attributes, ctypes.byref(result))
    pmix.PMIx_Info_list_release(attributes)
    return result
