"""What decides bits on a GPU, as text, and which promise holds there. Pure; ``state/gpu_check.py`` finds the description.

Two promises have names. *Reproducible*: the final bits are those of the undisturbed run. *In place*: replicas are equal and no
sample is lost or counted twice, but another run may end with other bits, because a kernel may add in another order each time.
A difference of this kind is in the gradients of all replicas alike, so no comparison of replicas can find it.
"""

from __future__ import annotations

from dataclasses import dataclass

REPRODUCIBLE, IN_PLACE = "reproducible", "in place"
WORKSPACES = (":4096:8", ":16:8")
"""Values of ``CUBLAS_WORKSPACE_CONFIG`` with which cuBLAS computes the same bits in every run."""
PROMISE = "promise"
"""Property of a platform: the promise, and why it is no more than that; not compared, since the flags are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDescription:
    """A GPU and the settings of torch for it, as one worker finds them; "" for a version that is unknown."""

    name: str
    multiprocessors: int
    """Streaming multiprocessors, or compute units: MPS and MIG change their number, and kernels divide work by it."""
    driver: str = ""
    cuda: str = ""
    """Version of CUDA, or of ROCm, that torch was built for."""
    cudnn: str = ""
    cublas: str = ""
    nccl: str = ""
    deterministic: bool = False
    """``torch.use_deterministic_algorithms(True)``."""
    warn_only: bool = False
    """Of these, only a warning is given for an algorithm that is not deterministic."""
    benchmark: bool = False
    """``torch.backends.cudnn.benchmark``."""
    cudnn_deterministic: bool = False
    tf32_matmul: str = ""
    tf32_cudnn: str = ""
    reduced: tuple[str, ...] = ()
    """Data types whose matrix products may be reduced in lower precision."""
    attention: tuple[str, ...] = ()
    """Enabled back ends of ``scaled_dot_product_attention``."""
    workspace: str = ""
    """``CUBLAS_WORKSPACE_CONFIG``."""


def gpu_properties(gpu: GpuDescription) -> dict[str, str]:
    """Return the properties of a platform with a GPU, by names of :data:`holdfast.state.platform.FIELDS`."""
    versions = {"CUDA": gpu.cuda, "cuDNN": gpu.cudnn, "cuBLAS": gpu.cublas, "NCCL": gpu.nccl}
    flags = {
        "deterministic": _switch(gpu.deterministic) + (" (warn only)" if gpu.warn_only else ""),
        "cudnn.benchmark": _switch(gpu.benchmark),
        "cudnn.deterministic": _switch(gpu.cudnn_deterministic),
        "tf32": f"matmul {gpu.tf32_matmul or 'unknown'}, cuDNN {gpu.tf32_cudnn or 'unknown'}",
        "reduced-precision sums": "+".join(gpu.reduced) or "none",
        "attention": "+".join(gpu.attention) or "none",
        "CUBLAS_WORKSPACE_CONFIG": gpu.workspace or "not set",
    }
    return {
        "gpu": f"{gpu.name}, {gpu.multiprocessors} multiprocessors",
        "gpu_driver": gpu.driver,
        "gpu_libraries": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "gpu_flags": "; ".join(f"{name} {value}" for name, value in flags.items()),
        PROMISE: promise_of(gpu),
    }


def reasons(gpu: GpuDescription) -> list[str]:
    """Return what keeps runs on this GPU from having the same bits; each entry says what to set."""
    problems = []
    if not gpu.deterministic:
        problems.append("torch.use_deterministic_algorithms(True) is not called")
    elif gpu.warn_only:
        problems.append("torch.use_deterministic_algorithms has warn_only=True, so other algorithms are used as well")
    if gpu.benchmark:
        problems.append("torch.backends.cudnn.benchmark is True, so kernels are chosen by their speed")
    if gpu.workspace not in WORKSPACES:
        problems.append(
            f"CUBLAS_WORKSPACE_CONFIG is {gpu.workspace or 'not set'}, and must be {' or '.join(WORKSPACES)}"
        )
    return problems


def promise_of(gpu: GpuDescription) -> str:
    """Return the name of the promise that holds on this GPU; after a colon, why it is not :data:`REPRODUCIBLE`."""
    why = reasons(gpu)
    return f"{IN_PLACE}: {'; '.join(why)}" if why else REPRODUCIBLE


def line_of(promise: str) -> str:
    """Return a line for the start of a job, from :func:`promise_of`."""
    name, _, why = promise.partition(": ")
    if name == REPRODUCIBLE:
        return "on GPUs, this run is reproducible: deterministic kernels are chosen, so its bits are those of an undisturbed run"
    return f"on GPUs, this run is exact in place, and not reproducible: replicas stay equal and no sample is lost, but {why}"


def _switch(value: bool) -> str:
    return "on" if value else "off"
