"""Makes the values of a row out of what the scripts of ``benchmarks/`` write with ``--json``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from rows.row import Content, Measured

Reader = Callable[[Sequence[Content]], Measured]


def all_reduce(contents: Sequence[Content]) -> Measured:
    """``allreduce/sum.py``: milliseconds of one all-reduce, by block."""
    (content,) = contents
    times = content["results"][0]["times_ms"]
    return Measured(times["shared"], _only(times, "gloo", "openmpi"), times.get("memcpy", ()), paired=True)


def step(ours: str) -> Reader:
    """``step/step_time.py``: milliseconds of one step, the median of each block.

    Args:
        ours: The system that is Holdfast; every other one but ``alone`` is a peer.
    """

    def read(contents: Sequence[Content]) -> Measured:
        (content,) = contents
        (found,) = content["results"]
        whole = {name for name, summary in found["systems"].items() if "failed" not in summary}
        blocks = {name: [*map(statistics.median, found["blocks_ms"][name])] for name in whole}
        peers = {name: times for name, times in blocks.items() if name not in {ours, "alone"}}
        return Measured(blocks[ours], peers, blocks.get("alone", ()), paired=True)

    return read


def hosts(contents: Sequence[Content]) -> Measured:
    """``step/hosts.py``: milliseconds of one step, and of moving its bytes over the same links."""
    (content,) = contents
    systems = {name: found["steps_ms"] for name, found in content["results"][0]["systems"].items()}
    return Measured(systems["holdfast"], _only(systems, "ddp-gloo"), systems.get("wire", ()))


def memory(contents: Sequence[Content]) -> Measured:
    """``step/memory.py``: bytes by parameter and worker, one value a job."""
    (content,) = contents
    systems: dict[str, list[float]] = {}
    for one in content["results"]:
        systems.setdefault(one["system"], []).append(one["bytes"])
    return Measured(systems["shared"], _only(systems, "ddp", "ddp-views"), systems.get("alone", ()))


def kill(contents: Sequence[Content]) -> Measured:
    """``recovery/kill.py``: milliseconds from a SIGKILL to the next commit; the limit is one step."""
    (content,) = contents
    times = {system: [row["recover_ms"] for row in found] for system, found in content["rows"].items()}
    return Measured(times.pop("rollback"), times, [row["step_ms"] for row in content["rows"]["rollback"]])


def join(contents: Sequence[Content]) -> Measured:
    """``recovery/join.py``: milliseconds that a newcomer holds the other workers."""
    (content,) = contents
    held = {kind: [row["held_ms"] for row in rows] for kind, rows in content["rows"].items() if kind != "spare"}
    return Measured(held.pop("whole"), held, content["copy_ms"])


def store(part: str, limit: str) -> Reader:
    """``checkpoint/save_load.py``: seconds that a save or a load takes, by round.

    Args:
        part: ``save`` or ``load``.
        limit: The way that is the limit.
    """

    def read(contents: Sequence[Content]) -> Measured:
        (content,) = contents
        times = {name: [one["held_s"] for one in found] for name, found in content["results"][part].items()}
        peers = {name: values for name, values in times.items() if name not in {"holdfast", limit}}
        return Measured(times["holdfast"], peers, times.get(limit, ()), paired=True)

    return read


def start_job(contents: Sequence[Content]) -> Measured:
    """``launch/start_job.py`` and ``launch/start.py``: seconds until the first step; the limit is one import of torch."""
    first = contents[0]["first_step_s"]
    imports = contents[1]["values"]["import torch"] if len(contents) > 1 else ()
    return Measured(first["gloo"], _only(first, "torchrun"), imports)


def processes(ours: str, *peers: str) -> Reader:
    """``launch/start.py``: seconds from the start of a process to its end; the limit is the bare interpreter.

    Args:
        ours: The process that is Holdfast's.
        peers: Those of peers.
    """

    def read(contents: Sequence[Content]) -> Measured:
        values = contents[0]["values"]
        return Measured(values[ours], _only(values, *peers), values["the interpreter"], paired=True)

    return read


def goodput(contents: Sequence[Content]) -> Measured:
    """``recovery/goodput.py``, one run a seed: useful samples a second; the limit is Holdfast's own rate without kills."""
    rates: dict[str, list[float]] = {}
    calm: list[float] = []
    for content in contents:
        for result in content["results"]:
            if result["mtbf_s"] is not None:
                rates.setdefault(result["system"], []).append(result["useful_per_s"])
            elif result["system"] == "holdfast-respawn":
                calm.append(result["useful_per_s"])
    return Measured(rates.pop("holdfast-respawn"), rates, calm, paired=True)


def simulator(contents: Sequence[Content]) -> Measured:
    """``scale/simulate.py``, several runs: histories a second of processor time."""
    return Measured([content["settings"]["repetitions"] / content["sweep"]["seconds"] for content in contents])


def injection(ours: str, *peers: str) -> Reader:
    """``inject/injection.py``: milliseconds to flip bits in a file, by round; the limit is bare reads and writes.

    Args:
        ours: The way that is Holdfast's.
        peers: Ways that do the same.
    """

    def read(contents: Sequence[Content]) -> Measured:
        (content,) = contents
        times = {name: [1e3 * value for value in values] for name, values in content["seconds"]["clock"].items()}
        return Measured(times[ours], _only(times, *peers), times.get("pwrite", ()), paired=True)

    return read


def _only(values: Any, *names: str) -> dict[str, list[float]]:
    return {name: values[name] for name in names if name in values}
