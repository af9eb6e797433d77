"""Options of ``holdfast run`` that a scheduler has set in the environment. Pure: reads a mapping, starts nothing.

=============  =============================================================================================
=============  =============================================================================================
Kubeflow       ``PET_NNODES``, ``PET_NODE_RANK``, ``PET_NPROC_PER_NODE``, ``PET_RDZV_ENDPOINT`` or
               ``PET_MASTER_ADDR`` and ``PET_MASTER_PORT``, ``PET_RDZV_BACKEND``, ``PET_MAX_RESTARTS``
Slurm          the variables of a step of ``srun``, see :mod:`holdfast.base.slurm`
Kubernetes     ``JOB_COMPLETION_INDEX``, for a job whose number of nodes is known; the exit code of a node that left
JobSet         ``JOBSET_NAME``, ``REPLICATED_JOB_NAME``, ``JOB_INDEX``, ``PROCESSES_IN_JOB``: labels that the manifest
               passes on
=============  =============================================================================================

An option that is given wins. Two schedulers that contradict each other are an error.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.base.slurm import SlurmStep, hosts, read_step
from holdfast.errors import ConfigError

_NUMBER = re.compile(r"[0-9]{1,18}")
DEFAULT_PORT = 29400
"""As torchrun's."""
STARTED_AGAIN = 4
"""Exit code of a node that left, where 0 would mean that its part is complete and must not be started again."""
_HUBS = 3
"""Nodes that host the membership store together, where there are as many."""
_ADDRESSES = ("rdzv",)
"""Options for which schedulers may have different values, because a host has several names: the first is used."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Options from the environment, by parameter name, and a line that says where each was taken from ("": none)."""

    values: Mapping[str, Any]
    said: str = ""


def read_scheduler(
    env: Mapping[str, str], given: Mapping[str, Any], cores: int, find_gpus: Callable[[], Sequence[str]] = tuple
) -> Scheduled:
    """Return the options that the environment sets.

    Args:
        env: The environment.
        given: Values of the options that were given, by parameter name.
        cores: CPU cores that this process may use.
        find_gpus: Returns the GPUs that it may use; called if the number of workers depends on it.

    Raises:
        ConfigError: if a variable has a value that cannot be used, or two contradict each other.
    """
    if given.get("hosts") is not None:
        return Scheduled({})  # one launcher starts the workers of all hosts
    options = _Options(env, given)
    _read_kubeflow(options, cores, find_gpus)
    _read_slurm(options)
    _read_kubernetes(options)
    return options.result()


class _Options:
    """Options found so far, with their sources."""

    def __init__(self, env: Mapping[str, str], given: Mapping[str, Any]) -> None:
        self.env = env
        self.given = given
        self._values: dict[str, Any] = {}
        self._sources: dict[str, str] = {}

    def offer(self, name: str, variables: Collection[str], read: Callable[[], Any]) -> None:
        """Take an option from variables that are set, unless it was given; ``read`` returns its value."""
        if name in self.given or not all(self.env.get(each) for each in variables):
            return
        value, source = read(), ", ".join(f"{each}={self.env[each]}" for each in variables)
        if name not in self._values:
            self._values[name], self._sources[name] = value, source
        elif self._values[name] != value and name not in _ADDRESSES:
            raise ConfigError(
                f"{self._sources[name]} and {source} contradict each other: give --{name.replace('_', '-')}"
            )

    def number(self, variable: str, least: int = 0) -> int:
        """Return the whole number in a variable."""
        text = self.env[variable]
        if not (_NUMBER.fullmatch(text) and int(text) >= least):
            raise ConfigError(f"{variable} must be a whole number, at least {least}, got {text!r:.80}")
        return int(text)

    @property
    def num_nodes(self) -> int:
        """Nodes, given or found."""
        return int(self.given.get("nnodes") or self._values.get("nnodes") or 1)

    def result(self) -> Scheduled:
        """Return what was found and applies: a job of one node needs no rendezvous, one of several needs Gloo."""
        values, sources = dict(self._values), dict(self._sources)
        if self.num_nodes == 1:
            for name in ("nnodes", "node_rank", "rdzv"):
                values.pop(name, None)
        elif values and "fabric" not in self.given:
            values["fabric"], sources["fabric"] = "gloo", "for several nodes"
        words = [f"--{name.replace('_', '-')} {value} ({sources[name]})" for name, value in values.items()]
        message = f"taken from the scheduler: {', '.join(words)}" if words else ""
        if self.num_nodes == 1 and self.env.get("JOB_COMPLETION_INDEX", "0") != "0" and "node_rank" not in self.given:
            index = self.env["JOB_COMPLETION_INDEX"]
            alone = f"JOB_COMPLETION_INDEX={index} is not used: without --nnodes this is a job of its own"
            message = f"{message}; {alone}" if message else alone
        return Scheduled(values, message)


def _read_kubeflow(options: _Options, cores: int, find_gpus: Callable[[], Sequence[str]]) -> None:
    options.offer("nnodes", ["PET_NNODES"], lambda: _nodes(options))
    options.offer("node_rank", ["PET_NODE_RANK"], lambda: options.number("PET_NODE_RANK"))
    options.offer("workers", ["PET_NPROC_PER_NODE"], lambda: _workers(options, cores, find_gpus))
    options.offer("max_restarts", ["PET_MAX_RESTARTS"], lambda: options.number("PET_MAX_RESTARTS"))
    if options.num_nodes > 1:
        options.offer("rdzv", ["PET_RDZV_ENDPOINT"], lambda: _rendezvous(options, options.env["PET_RDZV_ENDPOINT"]))
        address = ["PET_MASTER_ADDR", "PET_MASTER_PORT"]
        options.offer("rdzv", address, lambda: _rendezvous(options, ":".join(options.env[each] for each in address)))


def _nodes(options: _Options) -> int:
    least, _, most = options.env["PET_NNODES"].partition(":")
    if most and most != least:
        raise ConfigError(
            f"PET_NNODES={options.env['PET_NNODES']} is a range, and a job begins on a fixed number of nodes: give --nnodes"
        )
    if not (_NUMBER.fullmatch(least) and int(least) >= 1):
        raise ConfigError(f"PET_NNODES must be a whole number, at least 1, got {options.env['PET_NNODES']!r:.80}")
    return int(least)


def _workers(options: _Options, cores: int, find_gpus: Callable[[], Sequence[str]]) -> int:
    """Return the workers of this node; the words mean what they mean to torchrun."""
    text = options.env["PET_NPROC_PER_NODE"]
    if text == "cpu":
        return cores
    if text in ("auto", "gpu"):
        gpus = len(find_gpus())
        if text == "gpu" and not gpus:
            raise ConfigError("PET_NPROC_PER_NODE=gpu asks for a worker for each GPU, and this node has none: give -n")
        return gpus or cores
    return options.number("PET_NPROC_PER_NODE", least=1)


def _rendezvous(options: _Options, endpoint: str) -> str:
    backend = options.env.get("PET_RDZV_BACKEND") or "c10d"
    if backend in ("static", "c10d"):
        return f"holdfast://{with_port(endpoint)}"
    if backend in ("etcd", "etcd-v2"):
        return f"etcd://{endpoint}/{options.env.get('PET_RDZV_ID') or 'holdfast'}"
    raise ConfigError(f"PET_RDZV_BACKEND must be static, c10d, etcd or etcd-v2, got {backend!r}: or give --rdzv")


def with_port(endpoint: str) -> str:
    """Return ``HOST:PORT``, with torchrun's default port if there is none."""
    has_port = ":" in endpoint.rpartition("]")[2]
    return endpoint if has_port else f"{endpoint}:{DEFAULT_PORT}"


def _read_slurm(options: _Options) -> None:
    step = read_step(options.env)
    if step is None:
        return
    is_placed = "nnodes" in options.given and ("node_rank" in options.given or options.given["nnodes"] == 1)
    if step.num_tasks > step.num_nodes and not is_placed:
        nodes = f"{step.num_nodes} node{'s' if step.num_nodes > 1 else ''}"
        raise ConfigError(
            f"srun started {step.num_tasks} tasks on {nodes}, and each would start the workers of a node: "
            "use srun --ntasks-per-node=1, and give the workers of a node as -n"
        )
    nodes_from = "SLURM_STEP_NUM_NODES" if options.env.get("SLURM_STEP_NUM_NODES") else "SLURM_NNODES"
    options.offer("nnodes", [nodes_from], lambda: step.num_nodes)
    if options.num_nodes > 1:
        hosts_from = "SLURM_STEP_NODELIST" if options.env.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
        options.offer("node_rank", ["SLURM_NODEID"], lambda: step.node_id)
        options.offer("rdzv", [hosts_from, "SLURM_JOB_ID"], lambda: _slurm_rendezvous(options, hosts_from, step))


def _slurm_rendezvous(options: _Options, hosts_from: str, step: SlurmStep) -> str:
    """Return the first node, or the first three if there are as many: then any of them may be lost."""
    names = [step.first_host]
    if options.num_nodes >= _HUBS:
        with contextlib.suppress(ValueError):  # a list that cannot be read has a first host in any case
            first = list(itertools.islice(hosts(options.env[hosts_from]), _HUBS))
            names = first if len(set(first)) == _HUBS else names
    return "holdfast://" + ",".join(f"{name}:{step.port}" for name in names)


def _read_kubernetes(options: _Options) -> None:
    if options.num_nodes == 1:
        return
    options.offer("node_rank", ["JOB_COMPLETION_INDEX"], lambda: _pod(options))
    options.offer("left_code", ["JOB_COMPLETION_INDEX"], lambda: STARTED_AGAIN)
    labels = ["JOBSET_NAME", "REPLICATED_JOB_NAME"]

    def coordinator() -> str:
        jobset, job = (options.env[each] for each in labels)
        return f"holdfast://{jobset}-{job}-0-0.{jobset}:{DEFAULT_PORT}"

    options.offer("rdzv", labels, coordinator)


def _pod(options: _Options) -> int:
    """Return the number of this pod: in a JobSet, pods are counted over its replicated jobs."""
    index = options.number("JOB_COMPLETION_INDEX")
    if not options.env.get("JOB_INDEX"):
        return index
    job = options.number("JOB_INDEX")
    if job and not options.env.get("PROCESSES_IN_JOB"):
        raise ConfigError(
            f"JOB_INDEX={job} without PROCESSES_IN_JOB, the pods of each job, does not say which node this is: give --node-rank"
        )
    return index if job == 0 else job * options.number("PROCESSES_IN_JOB", least=1) + index
