"""What an exception says about a device. The texts are those of CUDA, cuDNN, cuBLAS and NCCL; no GPU is needed."""

from __future__ import annotations

import pytest
import torch

from holdfast.base.device_errors import DeviceFailure, classify
from holdfast.errors import PeerFailed, ScriptError

HINT = "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace might be incorrect."

LOST = (
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA error: uncorrectable NVLink error detected during the execution",
    "CUDA error: device-side assert triggered",
    "CUDA error: unspecified launch failure",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: an illegal instruction was encountered",
    "CUDA error: misaligned address",
    "CUDA error: the launch timed out and was terminated",
    "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    "CUDA error: unknown error",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, ... )`",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "HIP error: an illegal memory access was encountered",
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.",
)
MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.2 GiB is free.",
    "CUDA error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "HIP out of memory. Tried to allocate 20.00 MiB",
)
BUGS = (
    "CUDA error: invalid device ordinal",
    "CUDA error: invalid argument",
    "CUDA error: no kernel image is available for execution on the device",
    "CUDA error: operation not permitted when stream is capturing",
)


@pytest.mark.parametrize("text", LOST)
@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError])
def test_after_these_errors_the_device_is_lost(kind, text):
    assert classify(kind(text + HINT)) is DeviceFailure.LOST


@pytest.mark.parametrize("text", MEMORY)
@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError, torch.OutOfMemoryError])
def test_these_errors_mean_too_little_memory(kind, text):
    assert classify(kind(text)) is DeviceFailure.OUT_OF_MEMORY


@pytest.mark.parametrize("text", BUGS)
@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError])
def test_these_errors_of_a_device_are_bugs(kind, text):
    assert classify(kind(text + HINT)) is None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
        RuntimeError("device-side assert is what I call my own check"),  # the script's own words
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
        ValueError("CUDA error: device-side assert triggered"),
        KeyboardInterrupt(),
        SystemExit(1),
        ScriptError("training was left before its end"),
    ],
    ids=repr,
)
def test_an_error_of_the_script_says_nothing_about_a_device(error):
    assert classify(error) is None


@pytest.mark.parametrize(
    "error",
    [
        PeerFailed("rank 2"),
        RuntimeError("NCCL error: ncclRemoteError: A call failed possibly due to a remote process exiting prematurely"),
        RuntimeError("NCCL Error 2: unhandled system error. Last error: Connection refused"),
        RuntimeError("NCCL communicator was aborted on rank 1."),
    ],
    ids=repr,
)
def test_the_end_of_a_peer_is_no_error_of_the_own_device(error):
    assert classify(error) is DeviceFailure.PEER


def test_a_device_that_is_lost_stays_lost_whatever_is_raised_next():
    lost = torch.AcceleratorError(LOST[0])

    def wrapped(how: str) -> BaseException:
        try:
            try:
                raise lost
            except RuntimeError as error:
                if how == "from":
                    raise ScriptError("the step failed") from error
                if how == "while":
                    raise KeyError("cleanup")  # noqa: B904
                raise ScriptError("another attempt failed") from None
        except Exception as error:
            return error

    assert classify(wrapped("from")) is DeviceFailure.LOST
    assert classify(wrapped("while")) is DeviceFailure.LOST
    assert classify(wrapped("from None")) is None  # the script says that it has dealt with it


def test_errors_that_are_each_others_cause_end():
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one

    assert classify(one) is None
