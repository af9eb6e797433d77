"""Recognises from the environment that a foreign launcher started this process as one of several."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.comm.ulfm import under_mpirun

_SIZES = {
    "WORLD_SIZE": "",  # torchrun's, but Ray Train, Accelerate, DeepSpeed and others set it, too
    "SLURM_STEP_NUM_TASKS": "srun",  # SLURM_NTASKS is there in a batch script, too, which is one process
    "PMI_SIZE": "an MPI launcher",
    "MV2_COMM_WORLD_SIZE": "an MPI launcher",
    "FLUX_JOB_SIZE": "Flux",
    "HOROVOD_SIZE": "horovodrun",
    "PET_NNODES": "Kubeflow",  # a range, MIN:MAX, where the job is elastic
}
"""Variables that hold the number of processes, and the launcher that sets each. Open MPI's is not among them: the ``ulfm`` fabric handles it."""

_WITHOUT_SIZE = {"PMIX_RANK": "a PMIx launcher", "RAY_JOB_ID": "Ray"}
"""Variables that launchers set in each process that they start, without saying how many there are."""

_STEPS_OF_SLURM = 0xFFFFFFFA
"""Steps from this number on are Slurm's own: a batch script, the shell of ``salloc``. Each is one process, though that shell has the
number of tasks of the allocation."""


def chosen(fabric: str) -> str:
    """Return the name of the fabric of this process: what is asked for, or else ``ulfm`` under mpirun and ``virtual`` elsewhere."""
    return fabric or ("ulfm" if under_mpirun() else "virtual")


def others_started(env: Mapping[str, str]) -> str:
    """Return which variable says that a launcher started this process beside others, and what to do; "" where none does."""
    sizes = {name: size for name in _SIZES if (size := _size(env, name)) > 0}
    saw = next((name for name, size in sizes.items() if size > 1), "")
    if not saw and not sizes:
        saw = next((name for name in _WITHOUT_SIZE if name in env), "")
    if not saw:
        return ""
    size, who = sizes.get(saw, 0), _who(env, saw)
    what = "is" if size else "may be"
    return (
        f"{saw}={env[saw]}{f' ({who})' if who else ''} says that this process {what} one of several, each of which would train alone: "
        f'start {_instead(env, saw, size)}, or let it train alone with fabric="virtual" or HOLDFAST_FABRIC=virtual'
    )


def _size(env: Mapping[str, str], name: str) -> int:
    """Return the largest number of processes that a variable allows, 0 where it says none."""
    if name == "SLURM_STEP_NUM_TASKS" and _number(env.get("SLURM_STEP_ID", "")) >= _STEPS_OF_SLURM:
        return 1
    return _number(env.get(name, "").rpartition(":")[2])


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else 0


def _who(env: Mapping[str, str], saw: str) -> str:
    if saw in _WITHOUT_SIZE:
        return _WITHOUT_SIZE[saw]
    if saw != "WORLD_SIZE":
        return _SIZES[saw]
    return "torchrun" if "TORCHELASTIC_RUN_ID" in env else "Ray" if "RAY_JOB_ID" in env else ""


def _instead(env: Mapping[str, str], saw: str, size: int) -> str:
    """Return the command that starts as many workers."""
    if saw == "SLURM_STEP_NUM_TASKS":
        return "`holdfast run --hosts slurm SCRIPT` in the allocation, without srun"
    here = _number(env.get("LOCAL_WORLD_SIZE", "")) if saw == "WORLD_SIZE" else 0
    nodes = size if saw == "PET_NNODES" else size // here if here else 1
    if nodes > 1:
        return f"`holdfast run --nnodes {nodes} -n {here or 'N'} ... SCRIPT` on each machine (docs/how-to/several-nodes.md)"
    return f"`holdfast run -n {size or 'N'} SCRIPT`"
