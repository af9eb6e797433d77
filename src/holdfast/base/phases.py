"""The phases of a job: what watches each, how long it may take, and what happens when that time is over.

The components that watch take their limits from here, and so does the table in the documentation. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

_LAUNCHER = "the launcher"
_SCRIPT_TIMES = 60.0
"""Half an hour with the default of ``--hang-timeout``, as torch's own time-out of a process group over Gloo."""

FIRST_STEP_TIMES = 10.0
"""Factor on the limit for a worker's first step, which may compile and load data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRule:
    """What holds in a phase.

    Args:
        name: As the documentation and messages name it.
        owner: The component that watches it.
        option: The option whose value, times ``times``, limits the phase; "" if the limit is fixed.
        times: Factor on that value.
        fixed_s: The limit in seconds where no option gives it.
        clock: From when, or while what, the time is counted.
        at_end: What happens when the time is over.
        beacon: The phases of a worker's beacon that belong to this one, see :data:`holdfast.records.beacon.PHASES`.
    """

    name: str
    owner: str
    option: str = ""
    times: float = 1.0
    fixed_s: float = 0.0
    clock: str
    at_end: str
    beacon: tuple[str, ...] = ()

    @property
    def limit(self) -> str:
        """The limit in words."""
        if not self.option:
            return f"{self.fixed_s:g} s"
        return f"`{self.option}`" if self.times == 1 else f"{self.times:g} times `{self.option}`"


_WITHOUT = "the worker is ended; the job begins without it, or with a spare. Over Open MPI it is started again for that"
_ENDED = "the worker is ended, and the others continue without it"
_OTHERS_WAIT = "no progress, while another worker waits"


class Phase(Enum):
    """The phases of a job, in their order; each has one :class:`PhaseRule`, its value."""

    NODE_CHECK = PhaseRule(
        name="check of a node, `--health-check`",
        owner=_LAUNCHER,
        fixed_s=60.0,
        clock="the command has not ended",
        at_end="the node is unfit: the job begins without it, or ends with an error if it is the only one",
    )
    PROCESS_START = PhaseRule(
        name="process start",
        owner=_LAUNCHER,
        option="--start-timeout",
        clock="without a sign of life",
        at_end=_WITHOUT,
    )
    FORK = PhaseRule(
        name="start of a worker by the fork server",
        owner=_LAUNCHER,
        option="--start-timeout",
        times=0.5,
        clock="the fork server is stopped",
        at_end="the fork server is ended; each worker imports torch itself",
    )
    IMPORTS = PhaseRule(
        name="imports, and what the script prepares",
        owner=_LAUNCHER,
        option="--start-timeout",
        clock="the process is stopped, or another worker waits",
        at_end=_WITHOUT,
        beacon=("launch",),
    )
    SILENT_IMPORT = PhaseRule(
        name="an import that holds Python's lock",
        owner=_LAUNCHER,
        option="--start-timeout",
        times=10.0,
        clock="without a sign of life",
        at_end=_WITHOUT,
        beacon=("launch",),
    )
    CONNECTING = PhaseRule(
        name="`MPI_Init`, or the rendezvous of the workers",
        owner=_LAUNCHER,
        option="--start-timeout",
        clock="all unconnected workers have asked to be connected",
        at_end="those that the connected ones wait for are ended; if none is connected, the job is started again",
        beacon=("connect",),
    )
    LAUNCHERS = PhaseRule(
        name="rendezvous of the launchers of several nodes",
        owner="each launcher",
        option="--rdzv-timeout",
        clock="not all launchers are there, or the store does not answer",
        at_end="the launcher ends with an error that names the missing nodes",
    )
    GROUP = PhaseRule(
        name="group building",
        owner="each worker",
        fixed_s=60.0,
        clock="a member that is alive cannot be connected with",
        at_end="the member counts as failed, and the group is built again",
    )
    TORCH_GROUP = PhaseRule(
        name="group building of `init_process_group`",
        owner="each rank that no launcher watches",
        fixed_s=120.0,
        clock="not all ranks are connected; `HOLDFAST_START_TIMEOUT_S` sets another limit",
        at_end="`init_process_group` raises an error; if `MPI_Init` waits, the process prints its stacks and exits",
    )
    MPI_GROUP = PhaseRule(
        name="`MPI_Init` of a session under a bare `mpirun`",
        owner="each process",
        fixed_s=300.0,
        clock="not all processes are connected: Open MPI would wait forever for one that has died; `HOLDFAST_START_TIMEOUT_S` sets another limit",
        at_end="the process prints its stacks and exits",
    )
    JOINING = PhaseRule(
        name="rendezvous of processes that torchrun, srun or another launcher but mpirun started",
        owner="each process",
        fixed_s=300.0,
        clock="not all processes are there; `HOLDFAST_START_TIMEOUT_S` sets another limit",
        at_end="one line names the missing ranks, and the process exits with 1; or, with `HOLDFAST_MIN_WORKERS`, and where the launcher leaves the others alone, the job begins without them",
    )
    LOADING = PhaseRule(
        name="loading: the state, the first samples",
        owner=_LAUNCHER,
        option="--hang-timeout",
        times=_SCRIPT_TIMES,
        clock=_OTHERS_WAIT,
        at_end=_ENDED,
        beacon=("start",),
    )
    TRAINING = PhaseRule(
        name="training",
        owner=_LAUNCHER,
        option="--hang-timeout",
        clock=f"{_OTHERS_WAIT}; {FIRST_STEP_TIMES:g} times as long in a worker's first step",
        at_end=_ENDED,
        beacon=("forward", "backward", "allreduce", "optimizer"),
    )
    RECOVERY = PhaseRule(
        name="recovery",
        owner=_LAUNCHER,
        option="--hang-timeout",
        times=10.0,
        clock=_OTHERS_WAIT,
        at_end=_ENDED,
        beacon=("recovery",),
    )
    STALL = PhaseRule(
        name="waiting of all workers for each other",
        owner=_LAUNCHER,
        option="--stall-timeout",
        clock="all wait, and none makes progress",
        at_end="the job is started again",
    )
    SCRIPT = PhaseRule(
        name="evaluation, and other code of the script between two loops, or two collectives of `torch.distributed`",
        owner=_LAUNCHER,
        option="--hang-timeout",
        times=_SCRIPT_TIMES,
        clock=f"{_OTHERS_WAIT}; not inside `session.busy()`",
        at_end=_ENDED,
        beacon=("script",),
    )
    SAVING = PhaseRule(
        name="saving",
        owner=_LAUNCHER,
        option="--hang-timeout",
        times=30.0,
        clock=_OTHERS_WAIT,
        at_end=_ENDED,
        beacon=("checkpoint",),
    )
    GATE = PhaseRule(
        name="the gate, through which all workers leave training together",
        owner=_LAUNCHER,
        option="--hang-timeout",
        times=10.0,
        clock=_OTHERS_WAIT,
        at_end=_ENDED,
        beacon=("gate",),
    )
    FINALIZING = PhaseRule(
        name="finalizing: exit handlers, once the script has ended",
        owner="each worker",
        option="--hang-timeout",
        times=_SCRIPT_TIMES,
        clock="from the end of the script; not inside `session.busy()`",
        at_end="the worker exits with one line, and with exit code 1 if the script had succeeded",
        beacon=("exit",),
    )
    STOPPING = PhaseRule(
        name="a stop on request: the step in progress, and saving",
        owner="the launcher; each watcher, if the launcher has died",
        option="--grace",
        clock="the workers were asked to stop",
        at_end="SIGKILL; the job can be resumed from its newest checkpoint",
    )
    TEAR_DOWN = PhaseRule(
        name="the launcher's tear-down",
        owner=_LAUNCHER,
        fixed_s=2.0,
        clock="a process has received SIGTERM",
        at_end="SIGKILL",
    )

    def limit_s(self, options: Mapping[str, float]) -> float:
        """Return the limit in seconds, given the values of options by their names, such as ``--hang-timeout``."""
        rule = self.value
        return rule.times * options[rule.option] if rule.option else rule.fixed_s


def times_of(option: str) -> dict[str, float]:
    """Return the factor on an option's value in each phase of the beacon that it limits; the smallest, if several do."""
    rules = [phase.value for phase in Phase if phase.value.option == option]
    factors: dict[str, float] = {}
    for rule in rules:
        for name in rule.beacon:
            factors[name] = min(rule.times, factors.get(name, rule.times))
    return factors
