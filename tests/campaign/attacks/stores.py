"""Members of etcd, in which launchers and workers agree: they die, or stand still for a while."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from dataclasses import replace

import pytest

from campaign.attacks.base import End, Kind, Launch, Running, moment
from campaign.attacks.mechanisms import two_nodes
from campaign.attacks.mechanisms.afterwards import afterwards
from campaign.attacks.mechanisms.kept import Kept
from campaign.attacks.mechanisms.shared import EtcdCluster, find_etcd
from campaign.jobs import SPLIT, with_workers
from campaign.plan import Attack, Job

SIZE = 3
OPTIONS = ["--rdzv-token", "a secret", "--rdzv-timeout", "20", "--node-timeout", "10"]
"""An election of etcd takes up to two seconds, which is more than a lease of four leaves."""
_STORES: Kept[EtcdCluster] = Kept()


class EtcdMembers(Kind):
    """One member of three, which is survived, or two, without which nothing can be agreed on."""

    name = "etcd-members"
    weight = 0.7
    takes = frozenset(("nodes",))

    def missing(self) -> str:
        try:
            find_etcd()
        except pytest.skip.Exception as reason:
            return str(reason)
        return ""

    def suits(self, job: Job) -> bool:
        is_simple = job.script == "session" and job.strategy == "rollback" and job.model not in SPLIT
        return is_simple and job.fabric == "gloo"

    def adjust(self, attack: Attack, job: Job) -> Job:
        """Two launchers have twice as many workers."""
        return replace(with_workers(job, min(job.workers, 2)), spares=0, respawn=False)

    def draw(self, rng: random.Random, job: Job) -> Attack:
        values = {"count": rng.choice((1, 1, 2)), "kills": rng.random() < 0.5, "first": rng.randrange(SIZE)}
        return Attack(self.name, values=values | {"lasts_s": rng.choice((1.0, 3.0, 8.0))}, **moment(rng))

    def end(self, attack: Attack, job: Job) -> End:
        """Two attacks of one plan may meet two members."""
        return End.SURVIVES if attack.values["count"] == 1 else End.REFUSES

    def prepare(self, attack: Attack, launch: Launch) -> None:
        store, is_new = _STORES.make(launch, lambda: _start(launch))
        if is_new:
            told = {"prefixes": [[], []], "options": ["--rdzv", store.url("a-job"), *OPTIONS]}
            told["folder"] = str(launch.folder)
            launch.words[:0] = [sys.executable, "-IS", two_nodes.__file__, json.dumps(told)]

    def strike(self, attack: Attack, running: Running) -> bool:
        if running.is_over():
            return False
        store, values = _STORES.get(running.launch), attack.values
        numbers = [(values["first"] + i) % SIZE for i in range(values["count"])]
        numbers = [number for number in numbers if number in store.pids()]  # another attack may have killed one
        for number in numbers:
            (store.kill if values["kills"] else store.pause)(number)
        _note(running.launch, store)
        running.notes.append(f"etcd's members {numbers} {'killed' if values['kills'] else 'stopped'}")
        running.sleep(values["lasts_s"])
        for number in numbers:
            (store.start if values["kills"] else store.resume)(number)
        _note(running.launch, store)
        return bool(numbers)

    def simpler(self, attack: Attack) -> Iterable[Attack]:
        if not attack.values["kills"]:
            yield replace(attack, values={**attack.values, "kills": True})
        if attack.values["first"]:
            yield replace(attack, values={**attack.values, "first": 0})


def _start(launch: Launch) -> EtcdCluster:
    folder = launch.folder / "etcd"
    folder.mkdir()
    launch.undo.enter_context(afterwards('kill -KILL $(cat "$1")', folder / "pids"))
    launch.undo.callback((folder / "pids").write_text, "")  # the members have ended then, and their PIDs may be others'
    store = launch.undo.enter_context(EtcdCluster(folder, SIZE))
    _note(launch, store)
    return store


def _note(launch: Launch, store: EtcdCluster) -> None:
    """Write down the members' PIDs, for the case that the campaign is killed."""
    (launch.folder / "etcd" / "pids").write_text("\n".join(map(str, store.pids().values())))


KINDS: tuple[Kind, ...] = (EtcdMembers(),)
