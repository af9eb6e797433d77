"""What a script raised, as its worker tells the launcher. Imported before the script runs, so nothing heavy is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from holdfast.records.types import ScriptFailed


def describe(error: BaseException, script: Path) -> ScriptFailed:
    """Return what to tell of ``error``, which ended ``script``; time, rank and step are left to the caller.

    A :class:`~holdfast.errors.HoldfastError` explains itself in one line; anything else keeps its traceback, without
    the frames above the script's own.
    """
    import traceback

    from holdfast.errors import ConfigError, HoldfastError, InternalError
    from holdfast.records.types import ScriptFailed

    frames = _script_frames(error.__traceback__, script)
    if isinstance(error, SystemExit):
        message, text = f"{script.name} ended with sys.exit({error.code!r})", ""
    elif isinstance(error, KeyboardInterrupt):
        message, text = f"{script.name} was interrupted", ""
    elif isinstance(error, HoldfastError) and not isinstance(error, InternalError):
        where = _line_in(frames, script)
        message, text = f"{error}{where}", ""
    else:
        text = "".join(traceback.format_exception(type(error), error, frames))
        message = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    exit_code = 2 if isinstance(error, ConfigError) else 1
    return ScriptFailed(t_s=0.0, rank=-1, step=-1, exit_code=exit_code, message=message, traceback=text)


def _script_frames(frames: TracebackType | None, script: Path) -> TracebackType | None:
    """Drop the frames above the script's own; all of them if the script never ran."""
    while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
        frames = frames.tb_next
    return frames


def _line_in(frames: TracebackType | None, script: Path) -> str:
    """Return where in ``script`` it happened: the deepest of its frames, as ``" (train.py, line 12)"``."""
    line = 0
    while frames is not None:
        if frames.tb_frame.f_code.co_filename == str(script):
            line = frames.tb_lineno
        frames = frames.tb_next
    return f" ({script.name}, line {line})" if line else ""
