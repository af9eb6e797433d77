"""A worker whose device is lost ends like one that was killed, so that the others continue."""

from __future__ import annotations

import os
import sys

from holdfast.base.device_errors import DeviceFailure, classify
from holdfast.records.types import DeviceLost


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
