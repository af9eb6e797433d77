"""Faults that the launcher injects: kills of random workers, and faults of this node as a whole.

A node fails, or loses its network. A worker requests the fault at its planned step through a file, and waits; the
launcher records the fault, notifies the other launchers, which receive nothing more from this node, and injects it.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from holdfast.errors import ConfigError
from holdfast.faults.plan import Fault, FaultPlan, mtbf_schedule
from holdfast.launch.fleet import network_partition as cut
from holdfast.launch.job import Job
from holdfast.launch.record_bus import RecordBus, RunState
from holdfast.launch.supervise.attempt import JobAttempt
from holdfast.launch.supervise.processes import end_at_once
from holdfast.membership.store import address_towards
from holdfast.records.beacon import UNCONNECTED
from holdfast.records.paths import strike_path
from holdfast.records.types import FaultFired


def kill_worker(
    run: RunState, bus: RecordBus, attempt: JobAttempt, victim: int, before: Callable[[], object] = lambda: None
) -> bool:
    """Kill a worker of this node as an injected fault, numbered after the planned faults; return whether it was killed.

    A worker that is not connected to the others yet is not killed. ``before`` is called just before.
    """
    position, pair = attempt.position(victim), attempt.pair(victim)
    if position is None or position.phase in UNCONNECTED or pair is None or not pair.worker.is_alive():
        return False
    faults = run.job.settings.faults
    planned = len(FaultPlan.from_json(faults).faults) if faults else 0
    number = planned + sum(fault >= planned for fault in run.state.fired)
    before()
    bus.note(FaultFired(rank=victim, step=position.step, fault=number, kind="kill", phase=position.phase))
    return pair.worker.send(signal.SIGKILL)


_HEARD_S = 0.2
"""The other launchers poll far more often, and the store may be hosted here."""
_HEAL_S = 30.0


class FaultInjector:
    """Injects the planned faults of this node, when its workers request them, and random kills (``--mtbf``)."""

    def __init__(self, run: RunState, bus: RecordBus, plan: FaultPlan) -> None:
        self._run = run
        self._bus = bus
        self._planned = {n: fault for n, fault in enumerate(plan.faults) if fault.node == run.job.node_rank}
        self._cuts: list[subprocess.Popen[bytes]] = []
        self._kills: deque[tuple[float, int]] | None = None
        """When to kill which worker; None until the first step is committed."""

    def strike(self, attempt: JobAttempt) -> None:
        """Inject the faults that workers have requested."""
        self._check_healed()
        for number, fault in self._planned.items():
            request = strike_path(self._run.paths.run_dir, number)
            if request.exists():
                self._announce(attempt, number, fault, int(request.read_text()))
                if fault.kind == "nodeloss":
                    end_at_once(spared=[process.pid for process in self._cuts])
                self._cut(fault)
                request.unlink()

    def kill_random(self, attempt: JobAttempt) -> bool:
        """Kill the worker that is due; return whether one was killed."""
        run, now_s = self._run, self._run.clock.now_s()
        if self._kills is None and run.job.mtbf_s and self._bus.progress.commit is not None:
            schedule = mtbf_schedule(run.job.mtbf_s, run.job.settings.seed, range(run.job.workers))
            self._kills = deque((now_s + after_s, victim) for after_s, victim in schedule)
        if not self._kills or now_s < self._kills[0][0]:
            return False
        _, victim = self._kills.popleft()
        return victim in run.state.living() and kill_worker(run, self._bus, attempt, victim)

    def close(self) -> None:
        """Restore the network."""
        for process in self._cuts:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._cuts:
            try:
                process.wait(_HEAL_S)
            except subprocess.TimeoutExpired:
                node = self._run.job.node_rank
                self._run.view.print_line(f"the network of node {node} could not be restored in {_HEAL_S:g} s")

    def _announce(self, attempt: JobAttempt, number: int, fault: Fault, step: int) -> None:
        first, node = min(attempt.processes), self._run.job.node_rank
        own = tuple(rank for rank in self._run.state.living() if rank in attempt.processes)
        fired = FaultFired(rank=first, step=step, fault=number, kind=fault.kind, phase=fault.phase)
        self._bus.note(dataclasses.replace(fired, node=node, workers=own))
        self._bus.read(attempt)
        time.sleep(_HEARD_S)

    def _cut(self, fault: Fault) -> None:
        process = subprocess.Popen(
            [sys.executable, "-I", cut.__file__, str(fault.seconds or 0), *devices(self._run.job, fault)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher
        )
        assert process.stdout is not None
        if process.stdout.readline() == b"cut\n":
            self._cuts.append(process)
        else:
            self._run.view.print_line(f"{fault.to_spec()} was not injected: the network could not be disabled")

    def _check_healed(self) -> None:
        for process in [process for process in self._cuts if process.poll() is not None]:
            self._cuts.remove(process)
            self._run.view.print_line(f"the network of node {self._run.job.node_rank} is restored")


# -- checks before training


def check_node_faults(job: Job) -> None:
    """Raise a ConfigError, before training, if a fault of this node cannot be injected."""
    plan = FaultPlan.from_json(job.settings.faults) if job.settings.faults else FaultPlan()
    for fault in plan.faults:
        if fault.kind != "partition":
            continue
        if all(ipaddress.ip_address(address).is_loopback for address in _own_addresses(job, fault)):
            _refuse(
                fault,
                f"the rendezvous {job.rdzv} is on this machine's loopback interface: there is no network to disable",
            )
        if fault.node == job.node_rank:
            _check_may_cut(fault, devices(job, fault))


def devices(job: Job, fault: Fault) -> list[str]:
    """Return the network devices that lead to the other nodes; raise a ConfigError if ``ip`` is missing."""
    if shutil.which("ip") is None:
        _refuse(fault, "disabling the network needs the command ip (of iproute2), which is not on PATH")
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    for address in _own_addresses(job, fault):
        shown = json.loads(cut.ip("-json", "addr", "show", "to", address))
        names += [device["ifname"] for device in shown if device and device["ifname"] != "lo"]
    return list(dict.fromkeys(names))


def _own_addresses(job: Job, fault: Fault) -> list[str]:
    """Return the local addresses of routes to the store; nothing is sent."""
    addresses = []
    for host, port in _store_addresses(job.rdzv):
        try:
            addresses.append(address_towards(host, port))
        except OSError as error:
            _refuse(fault, f"the network that leads to {host}:{port} (--rdzv) is unknown: {error.strerror}")
    return addresses


def _store_addresses(url: str) -> Iterator[tuple[str, int]]:
    where = url.partition("://")[2].partition("/")[0].rpartition("@")[2]
    for address in where.split(","):
        host, _, port = address.rpartition(":")
        yield host.strip("[]"), int(port)


def _check_may_cut(fault: Fault, names: Sequence[str]) -> None:
    for name in names:
        try:
            cut.ip("link", "set", "dev", name, "up")  # it is up already: this only checks the permission
        except subprocess.CalledProcessError as error:
            why = error.stderr.decode().strip()
            _refuse(fault, f"disabling the network device {name} needs CAP_NET_ADMIN (root); ip says: {why}")


def _refuse(fault: Fault, why: str) -> NoReturn:
    raise ConfigError(f"--inject {fault.to_spec()}: {why}")
