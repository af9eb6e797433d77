"""The network between two nodes, which are namespaces: delay, loss, reordering, little bandwidth, silence."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from campaign import jobs
from campaign.attacks.base import End, Kind, Launch, Running, moment
from campaign.attacks.mechanisms import two_nodes
from campaign.attacks.mechanisms.afterwards import afterwards
from campaign.attacks.mechanisms.cables import Cable
from campaign.attacks.mechanisms.frame_relay import Conditions
from campaign.attacks.mechanisms.kept import Kept
from campaign.attacks.mechanisms.shared import Hosts
from campaign.jobs import SPLIT
from campaign.plan import AGENT, Attack, Job
from campaign.victims import AGENTS

PORT = 29400
STRATEGIES = ("rollback", "restart", "forward")
OPTIONS = ["--rdzv-token", "a secret", "--rdzv-timeout", "20", "--node-timeout", "4"]
REMOVE = """
for name in "$@"; do
    for pid in $(ip netns pids "$name"); do kill -KILL "$pid"; done
    ip netns del "$name"
done
"""
MILD = {
    "delay": ({"delay_s": 0.02}, {"delay_s": 0.1, "jitter_s": 0.05}, {"delay_s": 0.2}),
    "loss": ({"loss": 0.01}, {"loss": 0.05}, {"loss": 0.15, "delay_s": 0.005}),
    "reorder": ({"delay_s": 0.01, "reorder": 0.2}, {"delay_s": 0.03, "jitter_s": 0.02, "reorder": 0.5}),
    "duplicate": ({"duplicate": 0.1}, {"duplicate": 0.9, "delay_s": 0.01}),
    "bandwidth": ({"rate": 1_000_000}, {"rate": 100_000}),
}
"""What a job must survive, for as long as it lasts: TCP mends it, and takes its time."""
WAYS = ("both", "away", "toward")
"""Frames in both directions, those from the second node, or those to it: then its connections are half-open."""


WORKERS = 3
"""Of a job of ``--hosts``: two on the first host, one on the second."""


AGENT_SCRIPT = """#!/bin/sh
# As ssh, it reaches no host that is silent.
echo $$ >> "{agents}"
[ -e "{silent}" ] && [ "$1" = "{second}" ] && echo >> "{silent}-met" && sleep 1 && exit 255
exec "{agent}" "$@"
"""


@dataclass
class Network:
    """Two hosts, and the cable of the second.

    Args:
        hosts: The hosts.
        cable: The cable.
        silent: A file that exists while nothing arrives at the second host, or from it.
    """

    hosts: Hosts
    cable: Cable
    silent: Path

    def set(self, way: str, **conditions: float) -> None:
        """Change what happens to frames."""
        if conditions.get("loss") == 1.0:
            self.silent.touch()
        else:
            self.silent.unlink(missing_ok=True)
        there, free = Conditions(**conditions), Conditions()
        self.cable.set(there if way != "toward" else free, there if way != "away" else free)

    def struck(self) -> int:
        """How many frames, and starts on the second host, the conditions have met."""
        met = self.silent.with_name(f"{self.silent.name}-met")
        return self.cable.struck() + (met.stat().st_size if met.exists() else 0)


_NETWORKS: Kept[Network] = Kept()


def _make_network(launch: Launch) -> Network:
    hosts = Hosts(2, net="10.213.0", prefix=_new_prefix())
    launch.undo.enter_context(afterwards(REMOVE, *map(hosts.name, range(3))))
    hosts.make()
    return Network(hosts, launch.undo.enter_context(Cable(hosts, 2)), launch.folder / "silent")


@functools.cache
def _missing() -> str:
    """Why there can be no network namespaces, "" if there can."""
    if os.getuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "hostname"))):
        return "network namespaces need root, ip, unshare and hostname"
    hosts = Hosts(1, prefix=_new_prefix())
    try:
        hosts.make()
    except subprocess.CalledProcessError as error:
        return f"this machine does not permit network namespaces: {error.stderr.strip()}"
    hosts.remove()
    return ""


def _new_prefix() -> str:
    return f"campaign{uuid.uuid4().hex[:6]}-"


def _start_two_launchers(launch: Launch, network: Network) -> None:
    hosts = network.hosts
    options = ["--rdzv", f"holdfast://{hosts.address(1)}:{PORT}", *OPTIONS]
    told = {"prefixes": [hosts.inside(number) for number in (1, 2)], "options": options, "folder": str(launch.folder)}
    launch.words[:0] = [sys.executable, "-IS", two_nodes.__file__, json.dumps(told)]


def _start_on_hosts(launch: Launch, network: Network) -> None:
    hosts, agent, inner = network.hosts, launch.folder / "agent.sh", launch.folder / "agent-of-hosts.sh"
    hosts.write_agent(inner)
    agent.write_text(
        AGENT_SCRIPT.format(agents=launch.folder / AGENTS, silent=network.silent, second=hosts.address(2), agent=inner)
    )
    agent.chmod(0o755)
    launch.words[:0] = hosts.inside(1)
    launch.options += ["--hosts", f"{hosts.address(1)}:2,{hosts.address(2)}:1"]
    launch.options += ["--launch-agent", str(agent), "--node-timeout", "4"]


class NetworkKind(Kind):
    """An attack on the cable of the second of two machines, of a job that begins with ``prefix``.

    Args:
        prefix: "net" for two launchers over Gloo, "hosts" for one ``mpirun`` over both.
        what: What happens to frames.
    """

    takes = frozenset(("nodes", "loopback"))

    def __init__(self, prefix: str, what: str) -> None:
        self.name, self._what = f"{prefix}-{what}", what
        self._has_launchers = prefix == "net"

    def missing(self) -> str:
        return _missing()

    def suits(self, job: Job) -> bool:
        is_simple = job.script == "session" and job.strategy in STRATEGIES and job.model not in SPLIT
        return is_simple and job.fabric == ("gloo" if self._has_launchers else "ulfm")

    def adjust(self, attack: Attack, job: Job) -> Job:
        """Two launchers have twice as many workers."""
        workers = min(job.workers, 2) if self._has_launchers else WORKERS
        return replace(jobs.with_workers(job, workers), spares=0, respawn=False)

    def prepare(self, attack: Attack, launch: Launch) -> None:
        network, is_new = _NETWORKS.make(launch, lambda: _make_network(launch))
        if is_new:
            (_start_two_launchers if self._has_launchers else _start_on_hosts)(launch, network)

    def strike(self, attack: Attack, running: Running) -> bool:
        while len(list(Path(running.launch.checkpoints).glob("step-*/manifest.json"))) < attack.values["saved"]:
            if not running.sleep(0.01):
                return False
        if running.is_over():
            return False
        network, values = _NETWORKS.get(running.launch), attack.values
        conditions = self._conditions(attack)
        before = network.struck()
        network.set(values["way"], **conditions)
        running.notes.append(f"cable of node 1, {values['way']}: {conditions}")
        lasts_s = values["lasts_s"]
        while not lasts_s and network.struck() == before and running.sleep(0.05):
            pass
        running.sleep(lasts_s)
        struck = network.struck() - before
        if lasts_s:
            network.set("both")
        return struck > 0

    def repair(self, attack: Attack, launch: Launch) -> None:
        _NETWORKS.get(launch).set("both")

    def simpler(self, attack: Attack) -> Iterable[Attack]:
        if attack.values["way"] != "both":
            yield replace(attack, values={**attack.values, "way": "both"})

    def is_from_the_start(self, attack: Attack) -> bool:
        """Whether it may come before the machines have met."""
        return attack.since == "start" and not attack.values["saved"]

    def _draw(self, rng: random.Random, **values: Any) -> Attack:
        """Draw the time: workers on several hosts keep their records there, so commits are not seen here."""
        at = moment(rng) if self._has_launchers else {"since": "start", "ms": round(rng.uniform(1, 1000), 1)}
        saved = 0 if self._has_launchers else rng.choice((0, 1, 1, 2))
        return Attack(self.name, values={**values, "way": rng.choice(WAYS), "saved": saved}, **at)

    def _conditions(self, attack: Attack) -> dict[str, Any]:
        raise NotImplementedError


class Disturbed(NetworkKind):
    """Frames arrive late, not at all, in another order, twice, or not many at a time."""

    weight = 0.3

    def draw(self, rng: random.Random, job: Job) -> Attack:
        return self._draw(rng, degree=rng.randrange(len(MILD[self._what])), lasts_s=rng.choice((0, 2.0, 5.0)))

    def end(self, attack: Attack, job: Job) -> End:
        return End.SURVIVES

    def simpler(self, attack: Attack) -> Iterable[Attack]:
        yield from super().simpler(attack)
        if attack.values["degree"]:
            yield replace(attack, values={**attack.values, "degree": 0})

    def _conditions(self, attack: Attack) -> dict[str, Any]:
        return MILD[self._what][attack.values["degree"]]


class Silent(NetworkKind):
    """No frame arrives, in one direction or both: the first machine goes on without the second if it lasts."""

    weight = 1.2

    def draw(self, rng: random.Random, job: Job) -> Attack:
        return self._draw(rng, lasts_s=rng.choice((0, 0, 0.5, 2.0, 8.0)))

    def end(self, attack: Attack, job: Job) -> End:
        """Before the machines have met, none can do anything alone."""
        return End.REFUSES if self.is_from_the_start(attack) else End.SURVIVES

    def _conditions(self, attack: Attack) -> dict[str, Any]:
        return {"loss": 1.0}


class AgentStruck(NetworkKind):
    """A signal to the process that reaches the second host."""

    weight = 0.6

    def draw(self, rng: random.Random, job: Job) -> Attack:
        number = rng.choice(("SIGKILL", "SIGKILL", "SIGTERM", "SIGSTOP"))
        values = {"signal": number} | ({"thaw_s": rng.choice((0.2, 1.0, 3.0))} if number == "SIGSTOP" else {})
        return Attack(self.name, AGENT, values=values, since="exists", ms=round(rng.uniform(1, 1500), 1))

    def end(self, attack: Attack, job: Job) -> End:
        """Without it no worker starts on the second host."""
        return End.REFUSES

    def leaves_files(self, attack: Attack) -> bool:
        """Here it becomes Open MPI's daemon, which leaves its directory on its host if it is killed."""
        return bool(attack.values["signal"] == "SIGKILL")

    def strike(self, attack: Attack, running: Running) -> bool:
        process = running.processes.wait_for(AGENT, running)
        if process is None or not process.send(signal.Signals[attack.values["signal"]]):
            return False
        running.notes.append(f"{attack.values['signal']} to the agent, PID {process.pid}")
        if thaw_s := attack.values.get("thaw_s"):
            running.sleep(thaw_s)
            process.send(signal.SIGCONT)
        return True

    def simpler(self, attack: Attack) -> Iterable[Attack]:
        if attack.values["signal"] != "SIGKILL":
            yield replace(attack, values={"signal": "SIGKILL"})


KINDS: tuple[Kind, ...] = (
    AgentStruck("hosts", "agent"),
    *(
        kind
        for prefix in ("net", "hosts")
        for kind in (*(Disturbed(prefix, what) for what in MILD), Silent(prefix, "silence"))
    ),
)
