"""Detects from the environment that another launcher (torchrun, srun, ...) started this process as one of several."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.comm.ulfm import under_mpirun

_SIZES = {
    "WORLD_SIZE": "",  # set by torchrun, and by Ray Train, Accelerate, DeepSpeed and others
    "SLURM_STEP_NUM_TASKS": "srun",  # not SLURM_NTASKS, which is also set in a batch script, a single process
    "PMI_SIZE": "an MPI launcher",
    "MV2_COMM_WORLD_SIZE": "an MPI launcher",
    "FLUX_JOB_SIZE": "Flux",
    "HOROVOD_SIZE": "horovodrun",
    "PET_NNODES": "Kubeflow",  # a range MIN:MAX for an elastic job
}
"""Variables with the number of processes, and their launcher. Open MPI's is missing: the ``ulfm`` fabric handles it."""

_WITHOUT_SIZE = {"PMIX_RANK": "a PMIx launcher", "RAY_JOB_ID": "Ray"}
"""Variables that launchers set in every process that they start, without the number of processes."""

_STEPS_OF_SLURM = 0xFFFFFFFA
"""Slurm reserves step numbers from this one on for batch scripts and the shell of ``salloc``. Each is a single process,
although that shell sees the number of tasks of the allocation."""


def chosen(fabric: str) -> str:
    """Return the fabric of this process: the requested one, else ``ulfm`` under mpirun and ``virtual`` elsewhere."""
    return fabric or ("ulfm" if under_mpirun() else "virtual")


def others_started(env: Mapping[str, str]) -> str:
    """Return the error message if a launcher started this process as one of several, else ""."""
    sizes = {name: size for name in _SIZES if (size := _size(env, name)) > 0}
    saw = next((name for name, size in sizes.items() if size > 1), "")
    if not saw and not sizes:
        saw = next((name for name in _WITHOUT_SIZE if name in env), "")
    if not saw:
        return ""
    size, launcher = sizes.get(saw, 0), _launcher(env, saw)
    what = "is" if size else "may be"
    return (
        f"{saw}={env[saw]}{f' ({launcher})' if launcher else ''} says that this process {what} one of several, "
        "and each would train alone: "
        f'start {_instead(env, saw, size)}, or let it train alone with fabric="virtual" or HOLDFAST_FABRIC=virtual'
    )


def _size(env: Mapping[str, str], name: str) -> int:
    """Return the largest number of processes that a variable allows, 0 if it is not set or holds no number."""
    if name == "SLURM_STEP_NUM_TASKS" and _number(env.get("SLURM_STEP_ID", "")) >= _STEPS_OF_SLURM:
        return 1
    return _number(env.get(name, "").rpartition(":")[2])


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else 0


def _launcher(env: Mapping[str, str], saw: str) -> str:
    if saw in _WITHOUT_SIZE:
        return _WITHOUT_SIZE[saw]
    if saw != "WORLD_SIZE":
        return _SIZES[saw]
    return "torchrun" if "TORCHELASTIC_RUN_ID" in env else "Ray" if "RAY_JOB_ID" in env else ""


def _instead(env: Mapping[str, str], saw: str, size: int) -> str:
    """Return the command that starts the same number of workers."""
    if saw == "SLURM_STEP_NUM_TASKS":
        return "`holdfast run --hosts slurm SCRIPT` in the allocation, without srun"
    here = _number(env.get("LOCAL_WORLD_SIZE", "")) if saw == "WORLD_SIZE" else 0
    nodes = size if saw == "PET_NNODES" else size // here if here else 1
    if nodes > 1:
        return f"`holdfast run --nnodes {nodes} -n {here or 'N'} ... SCRIPT` on each machine (docs/how-to/several-nodes.md)"
    return f"`holdfast run -n {size or 'N'} SCRIPT`"
