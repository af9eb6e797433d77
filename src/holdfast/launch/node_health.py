"""Whether this machine is fit to take part in a job: checked before it joins, beside everything else that starts.

Disk, memory, loopback and GPUs are checked by a process of its own (:mod:`.node_probe`), so that a check that hangs is a
check that fails. The clock is compared with that of the launcher that hosts the store, or with the first one's.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.errors import ConfigError, JobError, StoreLost
from holdfast.launch import node_probe
from holdfast.launch.clock_offset import ClockServer, measure_offset
from holdfast.launch.job import Job
from holdfast.membership import Store
from holdfast.phases import Phase

_MARGIN_S = Phase.NODE_CHECK.value.fixed_s
"""A check may end this long after its limit, because the process that makes it has to start."""
_CLOCK_S = 1.0
"""How long to wait for another node's time."""


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """What a machine must do to be fit. A check whose limit is None is not made.

    Args:
        disk_s: Seconds for a synced write of 1 MiB.
        memory_bytes: Memory available.
        clock_s: Seconds between this clock and the other node's.
        loopback_bytes_per_s: Speed of a connection of this machine with itself.
        gpu_s: Seconds for ``nvidia-smi`` to answer.
    """

    disk_s: float | None = 10.0
    memory_bytes: float | None = 64 * 2**20
    clock_s: float | None = 10.0
    loopback_bytes_per_s: float | None = 1e6
    gpu_s: float | None = 10.0


_SCALES = {
    "disk": ("disk_s", {"ms": 1e-3, "s": 1.0}),
    "memory": ("memory_bytes", {"MB": 1e6, "GB": 1e9, "MiB": 2.0**20, "GiB": 2.0**30}),
    "clock": ("clock_s", {"ms": 1e-3, "s": 1.0}),
    "loopback": ("loopback_bytes_per_s", {"MB/s": 1e6, "GB/s": 1e9}),
    "gpu": ("gpu_s", {"ms": 1e-3, "s": 1.0}),
}
"""The limit of each check, and its units."""


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """The result of one check: its name, what was measured, and why the machine is unfit, or ""."""

    name: str
    value: str
    why: str = ""


def parse_limits(text: str) -> HealthLimits | None:
    """Return the limits that ``--health-check`` gives: ``on``, ``off`` (None), or ``disk=2s,gpu=off,...``.

    Raises:
        ConfigError: if it is something else.
    """
    if text in ("on", "off"):
        return HealthLimits() if text == "on" else None
    limits = HealthLimits()
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in _SCALES:
            raise ConfigError(
                f"--health-check must be on, off, or limits of {', '.join(_SCALES)} such as disk=2s,gpu=off; got {text!r}"
            )
        field, units = _SCALES[name]
        limits = replace(limits, **{field: None if value == "off" else _limit(name, value, units)})
    return limits


def _limit(name: str, value: str, units: dict[str, float]) -> float:
    for unit in sorted(units, key=len, reverse=True):
        with contextlib.suppress(ValueError):
            if value.endswith(unit) and 0 < (number := float(value.removesuffix(unit))) < 1e12:
                return number * units[unit]
    raise ConfigError(
        f"--health-check {name} must be off, or a number above 0 with {' or '.join(units)}, got {value!r}"
    )


class NodeCheck:
    """The checks of this machine; they begin at once, and :meth:`admit` waits for them.

    Args:
        limits: What the machine must do; None: nothing is checked.
        folders: Directories that the job writes to.
        gpus: Whether the job may use GPUs.
        elects: Whether no launcher hosts the store, so that the first one gives the time.
    """

    def __init__(
        self, limits: HealthLimits | None, folders: tuple[Path, ...] = (), *, gpus: bool = True, elects: bool = False
    ) -> None:
        self._limits, self._elects = limits, elects
        self._probe: subprocess.Popen[bytes] | None = None
        self._clock: ClockServer | None = None
        self._ends_s: dict[str, float] = {}
        self._is_done = limits is None
        if limits is not None:
            self._start(limits, folders, gpus=gpus)

    @classmethod
    def of_job(cls, job: Job) -> NodeCheck:
        """Return the checks that a job asks for."""
        limits = parse_limits(job.health_check)
        if job.is_virtual or job.hosts:
            limits = None
        folders = [Path(job.settings.run_dir or tempfile.gettempdir())]
        local = job.settings.checkpoint_dir.removeprefix("file://")
        if local and "://" not in local:
            folders.append(Path(local))
        return cls(
            limits,
            tuple(dict.fromkeys(map(_existing, folders))),
            gpus=job.gpus != "none",
            elects=job.rdzv.startswith("etcd://"),
        )

    def _start(self, limits: HealthLimits, folders: tuple[Path, ...], *, gpus: bool) -> None:
        wanted: list[tuple[object, ...]] = []
        if limits.disk_s is not None:
            wanted += [("disk", f"disk {folder}", str(folder), limits.disk_s) for folder in folders]
        if limits.memory_bytes is not None:
            wanted.append(("memory", "memory", limits.memory_bytes))
        if limits.loopback_bytes_per_s is not None:
            wanted.append(("loopback", "loopback", limits.loopback_bytes_per_s))
        if gpus and limits.gpu_s is not None:
            wanted.append(("gpu", "gpu", limits.gpu_s))
        allowed_s = {"disk": limits.disk_s, "gpu": limits.gpu_s}
        now_s = time.monotonic()
        self._ends_s = {str(one[1]): now_s + (allowed_s.get(str(one[0])) or 0.0) + _MARGIN_S for one in wanted}
        command = [sys.executable, "-I", "-S", node_probe.__file__, json.dumps(wanted)]
        self._probe = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)

    def findings(self) -> list[HealthFinding]:
        """Return the results of the checks of this machine alone, once all have ended or have taken too long."""
        found: list[HealthFinding] = []
        if self._probe is None or self._probe.stdout is None:
            return found
        waiting, pipe, rest = dict(self._ends_s), self._probe.stdout.fileno(), b""
        while waiting and (left_s := max(waiting.values()) - time.monotonic()) > 0:
            if not select.select([pipe], [], [], min(left_s, 0.5))[0]:
                continue
            block = os.read(pipe, 65536)
            if not block:
                break
            *lines, rest = (rest + block).split(b"\n")
            for said in map(json.loads, lines):
                found.append(HealthFinding(said["name"], said["value"], said["why"]))
                waiting.pop(said["name"], None)
        found += [HealthFinding(name, "", "no answer: the check hangs or was killed") for name in waiting]
        self._end_probe()
        return sorted(found, key=lambda one: list(self._ends_s).index(one.name))

    def admit(self, store: Store | None = None, node: int = 0, *, hosts_store: bool = False) -> None:
        """Wait for the checks; does nothing the second time.

        Args:
            store: The store of the launchers; None if there is one node. An unfit node is noted in it.
            node: Rank of this node.
            hosts_store: Whether this launcher hosts the store: the other nodes compare their clocks with its.

        Raises:
            JobError: if this machine is unfit; the message says why.
        """
        if self._is_done or self._limits is None:
            return
        self._is_done = True
        found: list[HealthFinding] = []
        if store is not None and self._limits.clock_s is not None:  # first, because other nodes may wait for the time
            found.append(self._compare_clocks(store, self._limits.clock_s, hosts_store=hosts_store))
        found += self.findings()
        if bad := [one for one in found if one.why]:
            why = "; ".join(f"{one.name}: {one.why}" for one in bad)
            if store is not None:
                with contextlib.suppress(StoreLost):
                    store.put(f"unfit/{node}", why)
            raise JobError(f"node {node} stays out of the job, because it is unfit: {why} (--health-check)")
        if store is not None:
            store.delete(f"unfit/{node}")

    def _compare_clocks(self, store: Store, limit_s: float, *, hosts_store: bool) -> HealthFinding:
        """Compare this clock with that of the node that hosts the store; if none does, with the first node's."""
        if hosts_store or (store.get("clock") is None and self._elects):
            self._clock = ClockServer(store.own_address)
            said = f"{store.own_address} {self._clock.port}"
            if store.create("clock", said) or hosts_store:
                return HealthFinding("clock", "the other nodes compare theirs with this one")
            self._clock.close()
            self._clock = None
        address = store.wait(lambda: store.get("clock"), _CLOCK_S)
        offset = None
        if address is not None:
            host, _, port = address.rpartition(" ")
            offset = measure_offset(host, int(port), _CLOCK_S)
        if offset is None:
            return HealthFinding("clock", "not measured: no node answers")
        ahead_s, half_s = offset
        return HealthFinding("clock", f"{ahead_s:+.4f} s (+-{half_s:.4f})", clock_complaint(ahead_s, half_s, limit_s))

    def _end_probe(self) -> None:
        if self._probe is None:
            return
        self._probe.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that waits for a dead disk cannot be killed
            self._probe.wait(0.5)
        if self._probe.stdout is not None:
            self._probe.stdout.close()
        self._probe = None

    def close(self) -> None:
        """End everything that was started."""
        self._end_probe()
        if self._clock is not None:
            self._clock.close()


def clock_complaint(ahead_s: float, half_s: float, limit_s: float) -> str:
    """Return what is wrong with an offset of a clock that is known to within ``half_s``, or ""."""
    if abs(ahead_s) - half_s <= limit_s:
        return ""
    way = "ahead of" if ahead_s > 0 else "behind"
    return f"the clock is {abs(ahead_s):.3g} s {way} that of the node that hosts the store, more than {limit_s:g} s"


def _existing(folder: Path) -> Path:
    """Return a directory, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next((one for one in (folder, *folder.parents) if one.is_dir()), folder)
