"""Properties of this machine that determine bits, or that Holdfast needs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.comm.fabrics.ulfm import find_mpirun, open_mpi_version
from holdfast.errors import ConfigError
from holdfast.state.platform_check import platform_of_worker

_PREFIXES = ("MKL_", "ONEDNN_", "DNNL_", "OMP_", "KMP_", "ATEN_", "CUBLAS_", "NVIDIA_TF32")
"""Prefixes of variables that numerical libraries read."""


def why_unusable(device: str) -> str:
    """Return why torch cannot compute on a device, "" if it can."""
    try:
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return ""


def machine_info(environment: Mapping[str, str], device: str = "cpu") -> dict[str, Any]:
    """Return, as plain data: the platform of a worker, versions, variables, GPUs, fabrics, shared memory, limits.

    Args:
        environment: Variables at the start of this process; libraries add some.
        device: The device that was checked.
    """
    version, why_no_mpi = _open_mpi()
    memory = Path("/dev/shm")  # noqa: S108 - only its size is read
    return {
        "kind": platform_of_worker(torch.device(device)),
        "cpus": len(os.sched_getaffinity(0)),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "holdfast": importlib.metadata.version("holdfast"),
        },
        "libraries": {"MKL": torch.backends.mkl.is_available(), "oneDNN": torch.backends.mkldnn.is_available()},
        "variables": {name: value for name, value in sorted(environment.items()) if name.startswith(_PREFIXES)},
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "fabrics": {
            "ulfm": version,
            "no ulfm": why_no_mpi,
            "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        },
        "shm_bytes": shutil.disk_usage(memory).free if memory.is_dir() else 0,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def _open_mpi() -> tuple[str, str]:
    """Return the version of the Open MPI that would start workers, and why there is none, one of them ""."""
    try:
        return open_mpi_version(find_mpirun()), ""
    except ConfigError as error:
        return "", str(error)
