"""The network between two nodes, which are namespaces: delay, loss, reordering, little bandwidth, silence."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from campaign.attacks.base import End, Kind, Launch, Running, moment
from campaign.attacks.mechanisms import two_nodes
from campaign.attacks.mechanisms.afterwards import afterwards
from campaign.attacks.mechanisms.cables import Cable
from campaign.attacks.mechanisms.frame_relay import Conditions
from campaign.attacks.mechanisms.kept import Kept
from campaign.attacks.mechanisms.shared import Hosts
from campaign.plan import Attack, Job

PORT = 29400
OPTIONS = ["--rdzv-token", "a secret", "--rdzv-timeout", "20", "--node-timeout", "4"]
REMOVE = """
for name in "$@"; do
    for pid in $(ip netns pids "$name"); do kill -KILL "$pid"; done
    ip netns del "$name"
done
"""
MILD = {
    "delay": ({"delay_s": 0.02}, {"delay_s": 0.1, "jitter_s": 0.05}, {"delay_s": 0.4}),
    "loss": ({"loss": 0.01}, {"loss": 0.05}, {"loss": 0.15, "delay_s": 0.005}),
    "reorder": ({"delay_s": 0.01, "reorder": 0.2}, {"delay_s": 0.03, "jitter_s": 0.02, "reorder": 0.5}),
    "duplicate": ({"duplicate": 0.1}, {"duplicate": 0.9, "delay_s": 0.01}),
    "bandwidth": ({"rate": 1_000_000}, {"rate": 100_000}),
}
"""What a job must survive, for as long as it lasts: TCP mends it, and takes its time."""
WAYS = ("both", "away", "toward")
"""Frames in both directions, those from the second node, or those to it: then its connections are half-open."""


@dataclass
class Network:
    """Two hosts, and the cable of the second."""

    hosts: Hosts
    cable: Cable

    def set(self, way: str, **conditions: float) -> None:
        """Change what happens to frames."""
        there, free = Conditions(**conditions), Conditions()
        self.cable.set(there if way != "toward" else free, there if way != "away" else free)


_NETWORKS: Kept[Network] = Kept()


def _network(launch: Launch) -> Network:
    hosts = Hosts(2, net="10.213.0", prefix=f"campaign{uuid.uuid4().hex[:6]}-")
    launch.undo.enter_context(afterwards(REMOVE, *map(hosts.name, range(3))))
    hosts.make()
    cable = launch.undo.enter_context(Cable(hosts, 2))
    options = ["--rdzv", f"holdfast://{hosts.address(1)}:{PORT}", *OPTIONS]
    told = {"prefixes": [hosts.inside(number) for number in (1, 2)], "options": options}
    launch.words[:0] = [sys.executable, "-IS", two_nodes.__file__, json.dumps(told)]
    return Network(hosts, cable)


class NetworkKind(Kind):
    """An attack on the cable of the second of two nodes."""

    def missing(self) -> str:
        if os.getuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "hostname"))):
            return "network namespaces need root, ip, unshare and hostname"
        hosts = Hosts(1, prefix=f"campaign{uuid.uuid4().hex[:6]}-")
        try:
            hosts.make()
        except subprocess.CalledProcessError as error:
            return f"this machine does not permit network namespaces: {error.stderr.strip()}"
        hosts.remove()
        return ""

    def suits(self, job: Job) -> bool:
        return job.fabric == "gloo" and job.script == "session" and job.strategy == "rollback"

    def adjust(self, attack: Attack, job: Job) -> Job:
        """Two nodes have twice as many workers."""
        return replace(job, workers=min(job.workers, 2), spares=0, respawn=False)

    def prepare(self, attack: Attack, launch: Launch) -> None:
        _NETWORKS.make(launch, lambda: _network(launch))

    def _strike(self, running: Running, conditions: dict[str, Any], attack: Attack) -> bool:
        network, values = _NETWORKS.get(running.launch), attack.values
        network.set(values["way"], **conditions)
        running.notes.append(f"cable of node 1, {values['way']}: {conditions}")
        if lasts_s := values["lasts_s"]:
            running.sleep(lasts_s)
            network.set("both")
        return True

    def simpler(self, attack: Attack) -> Iterable[Attack]:
        if attack.values["way"] != "both":
            yield replace(attack, values={**attack.values, "way": "both"})


class Disturbed(NetworkKind):
    """Frames arrive late, not at all, in another order, twice, or not many at a time."""

    def __init__(self, what: str) -> None:
        self.name, self._what = f"net-{what}", what
        self.weight = 0.4

    def draw(self, rng: random.Random, job: Job) -> Attack:
        values = {"way": rng.choice(WAYS), "degree": rng.randrange(len(MILD[self._what]))}
        return Attack(self.name, values=values | {"lasts_s": rng.choice((0, 2.0, 5.0))}, **moment(rng))

    def end(self, attack: Attack, job: Job) -> End:
        return End.SURVIVES

    def strike(self, attack: Attack, running: Running) -> bool:
        return not running.is_over() and self._strike(running, MILD[self._what][attack.values["degree"]], attack)

    def simpler(self, attack: Attack) -> Iterable[Attack]:
        yield from super().simpler(attack)
        if attack.values["degree"]:
            yield replace(attack, values={**attack.values, "degree": 0})


class Silent(NetworkKind):
    """No frame arrives, in one direction or both: the first node goes on without the second if it lasts."""

    name = "net-silence"
    weight = 1.0

    def draw(self, rng: random.Random, job: Job) -> Attack:
        values = {"way": rng.choice(WAYS), "lasts_s": rng.choice((0, 0, 0.5, 2.0, 8.0))}
        return Attack(self.name, values=values, **moment(rng))

    def end(self, attack: Attack, job: Job) -> End:
        """Before the nodes have met, none can do anything alone."""
        return End.REFUSES if attack.since == "start" else End.SURVIVES

    def strike(self, attack: Attack, running: Running) -> bool:
        return not running.is_over() and self._strike(running, {"loss": 1.0}, attack)

    def repair(self, attack: Attack, launch: Launch) -> None:
        _NETWORKS.get(launch).set("both")


KINDS: tuple[Kind, ...] = (*map(Disturbed, MILD), Silent())
