"""What a process that has not trained yet is busy with, seen from a thread of its own: an import, or loading data."""

from __future__ import annotations

import sys
import threading
from types import FrameType, ModuleType

_DATA = ("/torch/utils/data/", "/holdfast/data/")
"""Folders of the code that loads data."""
_MOST_FRAMES = 100


def current_activity() -> str:
    """Return what the main thread is busy with, in two words such as ``importing torch``; "" if that is not known."""
    if module := _importing():
        return f"importing {module}"
    main = threading.main_thread().ident
    return "loading data" if main is not None and _loads_data(sys._current_frames().get(main)) else ""


def _importing() -> str:
    """Return the package that is being imported, as the script named it; "" if none is."""
    for name, module in sys.modules.copy().items():  # in the order in which imports began; a list() would not be atomic
        if _is_initializing(module):
            return name.partition(".")[0]
    return ""


def _is_initializing(module: object) -> bool:
    try:
        # not by getattr: it would load a module that loads itself lazily
        spec = object.__getattribute__(module, "__dict__").get("__spec__") if isinstance(module, ModuleType) else None
        return bool(getattr(spec, "_initializing", False))
    except Exception:  # of a module that answers strangely; the caller is the pulse, which must not end for it
        return False


def _loads_data(frame: FrameType | None) -> bool:
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return False
        if any(folder in frame.f_code.co_filename for folder in _DATA):
            return True
        frame = frame.f_back
    return False
