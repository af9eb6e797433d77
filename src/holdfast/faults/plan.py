"""A fault plan: what goes wrong, where and when, as data that can be stored, sent to the workers and replayed.

A fault fires once per job, restarts included. Its number is its position in the plan and never changes, so
records of several starts of one job refer to the same fault.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from holdfast.errors import ConfigError, refuse
from holdfast.faults.kinds import (
    ENDS,
    FLIP,
    KINDS,
    NOBODY,
    OF_DEVICES,
    OF_NODES,
    OF_WORKERS,
    PHASES,
    SCRIPT_PHASES,
    SPLIT_PHASES,
    STUCK,
    Fault,
    fault_from_json,
    parse,
)
from holdfast.faults.reading import check_keys, no_duplicates

__all__ = [
    "ENDS",
    "FLIP",
    "KINDS",
    "NOBODY",
    "OF_DEVICES",
    "OF_NODES",
    "OF_WORKERS",
    "PHASES",
    "SCRIPT_PHASES",
    "SPLIT_PHASES",
    "STUCK",
    "Fault",
    "FaultPlan",
    "mtbf_schedule",
    "parse",
]

_Place = tuple[int, int, str, int | None, str]


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The faults of a job.

    Args:
        faults: In any order; the position of each is its number.
        seed: The seed that the plan was drawn with, kept for the report.
        fired: Numbers of the faults that have already fired.

    Raises:
        ConfigError: if ``seed`` is negative or ``fired`` holds a number that no fault has.
    """

    faults: tuple[Fault, ...] = ()
    seed: int = 0
    fired: frozenset[int] = frozenset()
    _by_place: dict[_Place, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if type(self.seed) is not int or self.seed < 0:
            refuse(f"seed must be a whole number of at least 0, got {self.seed!r}")
        if odd := [number for number in self.fired if not 0 <= number < len(self.faults)]:
            refuse(f"fired must hold numbers of the {len(self.faults)} faults of the plan, got {min(odd)}")
        by_place: dict[_Place, int] = {}
        for number, fault in enumerate(self.faults):
            if number not in self.fired:
                target = "" if fault.flip is None else fault.flip.target
                within = fault.bucket if fault.slice is None else fault.slice
                by_place.setdefault((fault.rank, fault.step, fault.phase, within, target), number)
        object.__setattr__(self, "_by_place", by_place)

    def due(
        self, rank: int, step: int, phase: str, bucket: int | None = None, target: str = ""
    ) -> tuple[int, Fault] | None:
        """Return the fault that strikes here, with its number; None if there is none.

        The arrival of a newcomer cannot be predicted, so a fault in ``rejoin`` strikes at the first from its step on.

        Call this at every phase of every step; it costs at most one dict lookup.

        Args:
            rank: The calling worker.
            step: The step in progress.
            phase: One of :data:`PHASES`.
            bucket: In ``allreduce``: the bucket that was reduced last in this step; None in the first all-reduce. In
                ``handover``: the next slice; None before the first.
            target: Look for a flip of this target, in ``allreduce`` of the bucket being reduced; otherwise skip flips.
        """
        if not self._by_place:
            return None
        if phase == "rejoin":
            numbers = (n for n, f in enumerate(self.faults) if (f.rank, f.phase) == (rank, phase) and f.step <= step)
            number = next((n for n in numbers if n not in self.fired), None)
        else:
            number = self._by_place.get((rank, step, phase, bucket, target))
        return None if number is None else (number, self.faults[number])

    def without(self, fired: Iterable[int]) -> Self:
        """Return the plan after these faults have fired too; the other faults keep their numbers."""
        return replace(self, fired=self.fired | frozenset(fired))

    def of_node(self, node: int, first: int) -> Self:
        """Return the plan for the workers of a node: its ``first`` worker triggers faults of the node."""
        faults = tuple(replace(f, rank=first) if f.node == node else f for f in self.faults)
        return replace(self, faults=faults)

    def check(self, workers: Collection[int], num_buckets: int | None = None, *, nodes: int = 1) -> None:
        """Check that every fault has a victim.

        Args:
            workers: The ranks of the job.
            num_buckets: Buckets of a step, if known.
            nodes: Number of launchers of the job.

        Raises:
            ConfigError: if a fault names a rank, a node or a bucket that does not exist.
        """
        for fault in self.faults:
            if fault.node is not None:
                _check_node(fault, nodes)
            elif fault.rank not in workers:
                refuse(f"{fault.to_spec()}: rank must be {_ranks(workers)}, got {fault.rank}")
            if num_buckets is not None and fault.bucket is not None and fault.bucket >= num_buckets:
                refuse(f"{fault.to_spec()}: bucket must be {_ranks(range(num_buckets))}, got {fault.bucket}")

    def to_specs(self) -> list[str]:
        """Return every fault, fired or not, in the syntax of :func:`parse`."""
        return [fault.to_spec() for fault in self.faults]

    def to_json(self) -> str:
        """Return the plan as one line of JSON."""
        faults = [fault.to_json() for fault in self.faults]
        return json.dumps({"seed": self.seed, "faults": faults, "fired": sorted(self.fired)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read JSON from :meth:`to_json`.

        Raises:
            ConfigError: if a key is missing, unknown or repeated, or a value is not allowed.
        """
        try:
            fields = json.loads(text, object_pairs_hook=no_duplicates)
        except ConfigError:
            raise
        except (ValueError, RecursionError) as error:
            refuse(f"a fault plan must be one JSON object, got {text[:60]!r}: {error}")
        check_keys("a fault plan", fields, ("seed", "faults", "fired"))
        for name in ("faults", "fired"):
            if type(fields[name]) is not list:
                refuse(f"{name} of a fault plan must be a list, got {fields[name]!r:.60}")
        if any(type(number) is not int for number in fields["fired"]):
            refuse(f"fired must be whole numbers, got {fields['fired']!r:.60}")
        faults = tuple(_fault_from(number, fault) for number, fault in enumerate(fields["faults"]))
        return cls(faults, fields["seed"], frozenset(fields["fired"]))


def _fault_from(number: int, fields: object) -> Fault:
    try:
        return fault_from_json(fields)
    except ConfigError as error:
        refuse(f"fault {number} of the plan: {error}")


def _check_node(fault: Fault, nodes: int) -> None:
    if nodes < 2:
        refuse(
            f"{fault.to_spec()}: {fault.kind} strikes one of several nodes, so it needs --fabric gloo and --nnodes 2 or more"
        )
    if fault.node not in range(nodes):
        refuse(f"{fault.to_spec()}: node must be {_ranks(range(nodes))}, got {fault.node}")


def _ranks(numbers: Collection[int]) -> str:
    ordered = sorted(numbers)
    if not ordered:
        return "a worker of the job, which has none"
    if ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"one of {ordered[0]}..{ordered[-1]}"
    return f"one of {', '.join(map(str, ordered))}"


def mtbf_schedule(mtbf_s: float, seed: int, workers: Sequence[int]) -> Iterator[tuple[float, int]]:
    """Draw a random schedule of failures: exponential intervals, and a victim drawn uniformly among the workers alive.

    Args:
        mtbf_s: Mean time between failures of the *whole job*, seconds, more than 0. It stays the same while the job shrinks.
        seed: Same seed, same schedule.
        workers: The ranks of the job; one of them is spared.

    Returns:
        Seconds since the start, ascending, and the victim.

    Raises:
        ConfigError: if ``mtbf_s`` is not a positive number, or a rank is repeated.
    """
    if not (math.isfinite(mtbf_s) and mtbf_s > 0):
        refuse(f"mtbf_s must be more than 0 and finite, got {mtbf_s}")
    if len(set(workers)) != len(workers):
        refuse(f"workers must be different ranks, got {list(workers)}")
    return _draw_deaths(mtbf_s, random.Random(seed), sorted(workers))


def _draw_deaths(mtbf_s: float, rng: random.Random, alive: list[int]) -> Iterator[tuple[float, int]]:
    now_s = 0.0
    while len(alive) > 1:
        now_s += rng.expovariate(1 / mtbf_s)
        yield now_s, alive.pop(rng.randrange(len(alive)))
