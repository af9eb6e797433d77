"""What an exception says about an accelerator: it is lost, it is out of memory, or a peer has failed.

Pure: types are compared by name and texts by pattern, so that neither torch nor a GPU is needed.

After an error such as an uncorrectable ECC error or a device-side assert, every further call of the process to the device
fails. Nothing in the process can be saved, and a new process may work: such a worker must end like a killed one, and its
peers continue. An invalid argument, on the other hand, is a bug of the script, which ends the job.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator

from holdfast.errors import PeerFailed


class DeviceFailure(enum.Enum):
    """What has failed."""

    LOST = "lost"
    """This process can no longer use its device."""
    OUT_OF_MEMORY = "memory"
    """The device has too little free memory; it still works."""
    PEER = "peer"
    """A collective failed because of another process, or of the network."""


_ACCELERATOR_ERRORS = {"torch.AcceleratorError"}
_MEMORY_ERRORS = {"torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError"}

_FROM_DEVICE = re.compile(
    r"\b(CUDA|HIP) ((driver )?error|out of memory)\b|\bcuDNN error\b|CUDNN_STATUS_|CUBLAS_STATUS_|\bNCCL\b|\bXid\b"
)
"""In a plain RuntimeError: the device's libraries raised it, not the script."""

_MEMORY = re.compile(
    r"\b(CUDA|HIP) out of memory\b|\berror: out of memory\b|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
)
_PEER = re.compile(
    r"ncclRemoteError|remote process exited|unhandled system error|communicator was aborted", re.IGNORECASE
)

# Texts of cudaGetErrorString for errors after which CUDA's documentation says that the process must be ended and started
# again, those of hardware that failed, and the errors of libraries that hide one of them.
_LOST = re.compile(
    "|".join(
        (
            r"uncorrectable (ECC|NVLink) error",
            r"illegal memory access",
            r"illegal instruction",
            r"misaligned address",
            r"operation not supported on global/shared address space",
            r"invalid program counter",
            r"hardware stack error",
            r"device-side assert",
            r"unspecified launch failure",
            r"the launch timed out and was terminated",
            r"context is destroyed",
            r"busy or unavailable",
            r"system not yet initialized",
            r"error: unknown error",
            r"\bMPS (client|server)\b",
            r"\bXid\b",
            r"fallen off the bus",
            r"\bGPU is lost\b",
            r"unhandled cuda error",
            r"(CUBLAS|CUDNN)_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)",
        )
    ),
    re.IGNORECASE,
)


def classify(error: BaseException) -> DeviceFailure | None:
    """Return what ``error`` says about the device; None if it says nothing, as an error of the script does.

    An error that was raised while a lost device was handled counts as that loss: the device stays lost.
    """
    if any(_classify_one(one) is DeviceFailure.LOST for one in _chain(error)):
        return DeviceFailure.LOST
    return _classify_one(error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause's cause and so on; without a cause, what was handled when it was raised."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _classify_one(error: BaseException) -> DeviceFailure | None:
    if isinstance(error, PeerFailed):
        return DeviceFailure.PEER
    names, text = {f"{one.__module__}.{one.__qualname__}" for one in type(error).__mro__}, str(error)
    if names & _MEMORY_ERRORS:
        return DeviceFailure.OUT_OF_MEMORY
    if not (names & _ACCELERATOR_ERRORS or (isinstance(error, RuntimeError) and _FROM_DEVICE.search(text))):
        return None
    for pattern, failure in _PATTERNS:
        if pattern.search(text):
            return failure
    return None


_PATTERNS = (
    (_MEMORY, DeviceFailure.OUT_OF_MEMORY),
    (_LOST, DeviceFailure.LOST),
    (_PEER, DeviceFailure.PEER),
)
"""In order: the first that matches decides."""
