"""A job step of Slurm, as ``srun`` describes it in the environment of each process that it starts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_SPECIAL_STEPS = 0xFFFFFFFA
"""Slurm reserves step numbers from this one on for batch scripts and the shell of ``salloc``. Each is a single process,
although that shell sees the number of tasks of the allocation."""
_FIRST_PORT, _PORTS = 20000, 12000
"""Ports below the range from which Linux and Windows choose ports of outgoing connections (32768 on)."""
_STEPS_OF_A_JOB = 31
"""Steps of a job that certainly have different ports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmStep:
    """One process (a task) of a job step.

    Args:
        num_nodes: Nodes of the step, ``>= 1``.
        node_id: This node, from 0.
        num_tasks: Tasks of the step, over all nodes, ``>= 1``.
        task: This task, from 0.
        first_host: Name of node 0; "" if the list of nodes cannot be read.
        port: A port for the step, derived from the number of its job, the same in all its tasks.
    """

    num_nodes: int
    node_id: int
    num_tasks: int
    task: int
    first_host: str
    port: int


def read_step(env: Mapping[str, str]) -> SlurmStep | None:
    """Return the step that ``srun`` started this process for; None in a batch script, in ``salloc``, and without Slurm."""
    step, tasks = number(env, "SLURM_STEP_ID"), number(env, "SLURM_STEP_NUM_TASKS")
    if not tasks or (step is not None and step >= _SPECIAL_STEPS):
        return None
    job = number(env, "SLURM_JOB_ID") or 0
    return SlurmStep(
        num_nodes=number(env, "SLURM_STEP_NUM_NODES") or number(env, "SLURM_NNODES") or 1,
        node_id=number(env, "SLURM_NODEID") or 0,
        num_tasks=tasks,
        task=number(env, "SLURM_PROCID") or 0,
        first_host=first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""),
        port=_FIRST_PORT + (job * _STEPS_OF_A_JOB + (step or 0)) % _PORTS,
    )


def first_host(nodes: str) -> str:
    """Return the first host of a list such as ``node[01-04,07],gpu3``, as ``scontrol show hostnames`` would."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None  # it matches ""
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def hosts(nodes: str) -> Iterator[str]:
    """Yield the hosts of a list such as ``node[01-04,07],gpu3``, as ``scontrol show hostnames`` would.

    Raises:
        ValueError: if a range in brackets is not one of numbers.
    """
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        yield from _expand(part)


def _expand(name: str) -> Iterator[str]:
    match = re.search(r"\[([^\]]*)\]", name)
    if match is None:
        yield name
        return
    for words in match[1].split(","):
        low, _, high = words.partition("-")
        for value in range(int(low), int(high or low) + 1):
            yield from _expand(f"{name[: match.start()]}{value:0{len(low)}d}{name[match.end() :]}")


def number(env: Mapping[str, str], name: str) -> int | None:
    """Return the whole number in a variable; None if it is not set, or holds anything else."""
    text = env.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None
