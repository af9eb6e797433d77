"""Finds the description of this worker's GPU; what it means is decided in ``state/gpu_platform.py``."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from holdfast.state.gpu_platform import GpuDescription

_DRIVER = Path("/proc/driver/nvidia/version")
_CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12", "nvidia-cublas-cu11")
"""Distributions that may hold the cuBLAS that torch loads; a torch without any of them has it built in."""


def describe_gpu(device: torch.device) -> GpuDescription:
    """Return the description of a CUDA or ROCm device under torch's current settings."""
    properties = torch.cuda.get_device_properties(device)
    cudnn: Any = torch.backends.cudnn
    cuda: Any = torch.backends.cuda
    reduced: dict[str, Callable[[], bool]] = {
        "fp16": lambda: cuda.matmul.allow_fp16_reduced_precision_reduction,
        "bf16": lambda: cuda.matmul.allow_bf16_reduced_precision_reduction,
        "fp16 accumulation": lambda: cuda.matmul.allow_fp16_accumulation,
    }
    attention: dict[str, Callable[[], bool]] = {
        "flash": cuda.flash_sdp_enabled,
        "efficient": cuda.mem_efficient_sdp_enabled,
        "math": cuda.math_sdp_enabled,
        "cuDNN": cuda.cudnn_sdp_enabled,
    }
    return GpuDescription(
        name=properties.name,
        multiprocessors=properties.multi_processor_count,
        driver=driver_of(_DRIVER.read_text() if _DRIVER.exists() else ""),
        cuda=str(torch.version.cuda or torch.version.hip or ""),
        cudnn=_text(cudnn.version),
        cublas=_cublas_version(),
        nccl=_text(lambda: ".".join(map(str, torch.cuda.nccl.version()))),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        benchmark=bool(cudnn.benchmark),
        cudnn_deterministic=bool(cudnn.deterministic),
        tf32_matmul=_text(lambda: cuda.matmul.fp32_precision),
        tf32_cudnn=_text(lambda: f"conv {cudnn.conv.fp32_precision} rnn {cudnn.rnn.fp32_precision}"),
        reduced=tuple(name for name, is_on in reduced.items() if is_on()),
        attention=tuple(name for name, is_on in attention.items() if is_on()),
        workspace=os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
    )


def driver_of(text: str) -> str:
    """Return the version of NVIDIA's driver from the text of ``/proc/driver/nvidia/version``, "" if it has none."""
    match = re.search(r"^NVRM version:.*?\b(\d+\.\d+(?:\.\d+)?)\b", text, flags=re.MULTILINE)
    return match[1] if match else ""


def _text(find: Callable[[], object]) -> str:
    """Return a version or a setting as text, "" if this torch does not have it."""
    try:
        value = find()
    except (AttributeError, ImportError, RuntimeError):
        return ""
    return "" if value is None else str(value)


def _cublas_version() -> str:
    for name in _CUBLAS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
