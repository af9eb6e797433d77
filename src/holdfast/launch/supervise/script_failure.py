"""How a script failed: its record, and whether the script is to blame."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from pathlib import Path
from types import TracebackType

from holdfast.base.device_errors import DeviceFailure, classify
from holdfast.base.system_errors import refusal, refusal_to_torch
from holdfast.errors import ConfigError, HoldfastError, InternalError, ScriptError, is_of_lost_ranks
from holdfast.launch.supervise.gpus import hint_for
from holdfast.records.types import DeviceLost, ScriptFailed

_WRONG_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EINVAL)
"""Errors of the system that are due to what the script asked for."""
_PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep
_INSTALLED = re.compile(r"/(site|dist)-packages/")
_BELOW_US = re.compile(r"/(site|dist)-packages/(torch|numpy)/")


def describe(error: BaseException, script: Path) -> ScriptFailed:
    """Return the record of ``error``, which ended ``script``; the caller sets time, rank and step.

    A :class:`~holdfast.errors.HoldfastError` is reported in one line, and so is what the system refuses to Holdfast itself;
    any other error with its traceback, without the frames above the script's own.
    """
    frames = _script_frames(error.__traceback__, script)
    if isinstance(error, SystemExit):
        message, text = f"{script.name} ended with sys.exit({error.code!r})", ""
    elif isinstance(error, KeyboardInterrupt):
        message, text = f"{script.name} was interrupted", ""
    elif isinstance(error, HoldfastError) and not isinstance(error, InternalError):
        where = line_in(frames, script)
        message, text = f"{error}{where}", ""
    elif (refusal_to_torch(error) or _is_ours(error.__traceback__)) and (refused := refusal(error)):
        message, text = f"{refused}{line_in(frames, script)}", ""
    else:
        text = "".join(traceback.format_exception(type(error), error, frames))
        message = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        message += hint_for(message)
    exit_code = 2 if isinstance(error, ConfigError) else 1
    is_loss = is_of_lost_ranks(error)
    return ScriptFailed(
        exit_code=exit_code, message=message, traceback=text, is_bug=is_bug(error) and not is_loss, is_loss=is_loss
    )


def is_bug(error: BaseException) -> bool:
    """Return whether the script would raise ``error`` again, as opposed to one that other machines or a later try avoid.

    Lost workers, unreachable storage, a full disk and lack of memory or of threads may pass. Nothing is known of an exit
    code of the script's own.
    """
    if isinstance(error, HoldfastError):
        return isinstance(error, ScriptError)
    if isinstance(error, OSError):
        return error.errno in _WRONG_PATH
    may_be_refused = isinstance(error, MemoryError | RuntimeError) or _is_ours(error.__traceback__)
    may_pass = (may_be_refused and bool(refusal(error))) or type(error).__name__ == "OutOfMemoryError"  # torch's
    return isinstance(error, Exception) and not may_pass


def _script_frames(frames: TracebackType | None, script: Path) -> TracebackType | None:
    """Drop the frames above the script's own; all of them if the script never ran."""
    while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
        frames = frames.tb_next
    return frames


def _is_ours(frames: TracebackType | None) -> bool:
    """Return whether Holdfast raised, or what it called of Python, torch or numpy; not the script, nor what that brings."""
    deepest = ""
    while frames is not None:
        name = frames.tb_frame.f_code.co_filename
        is_python = name.startswith((_STDLIB, "<frozen ")) and not _INSTALLED.search(name)
        if not (is_python or _BELOW_US.search(name)):
            deepest = name
        frames = frames.tb_next
    return deepest.startswith(_PACKAGE)


def line_in(frames: TracebackType | None, script: Path) -> str:
    """Return the line of ``script`` that raised, from the deepest of its frames, as ``" (train.py, line 12)"``."""
    line = 0
    while frames is not None:
        if frames.tb_frame.f_code.co_filename == str(script):
            line = frames.tb_lineno
        frames = frames.tb_next
    return f" ({script.name}, line {line})" if line else ""


def device_loss(error: BaseException) -> DeviceLost | None:
    """Return the record of the loss if ``error`` ends this worker and not the job; the caller sets time, rank and step.

    Too little memory ends the worker only if it had taken over slices of failed workers: others may have room for them. A
    worker that never had enough would be followed by all others, so that is an error of the script.
    """
    failure = classify(error)
    if failure is DeviceFailure.LOST or (failure is DeviceFailure.OUT_OF_MEMORY and _has_taken_over()):
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        return DeviceLost(what=failure.value, message=message, gpu=os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return None


def _has_taken_over() -> bool:
    session = sys.modules.get("holdfast.session.session")
    return session is not None and session.has_taken_over()
