"""What will go wrong, where and when: data that can be written down, sent to the workers and replayed.

A fault fires once per job, restarts included. Its number is its place in the plan and never changes, so
that records of several starts of one job speak of the same fault.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Self

from holdfast.errors import ConfigError

ENDS = ("kill", "segfault", "oom")
"""Kinds that end the process at once."""
STUCK = ("hang", "gil", "spin", "deadlock")
"""Kinds after which the process is there and gets no further, for some seconds or for ever."""
OF_WORKERS = (*ENDS, *STUCK, "slow", "leave")
"""Kinds that strike one worker."""
OF_NODES = ("nodeloss", "partition")
"""Kinds that strike a node, with all that its launcher has started."""
KINDS = (*OF_WORKERS, *OF_NODES)
PHASES = ("forward", "backward", "allreduce", "optimizer", "recovery", "checkpoint", "rejoin")
SPLIT_PHASES = ("handover", "rehome")
"""Phases of models that are split: before a worker hands its first micro-batch over, and when parts change homes."""

NOBODY = -1
"""The rank of a fault that strikes a node, until it is known who its first worker is."""

_SHORTEST_S, _LONGEST_S = 0.001, 1e6
_LASTING = (*STUCK, "slow", "partition")

_NUMBERS = ("rank", "node", "step", "bucket")
_KEYS = ("rank", "step", "phase", "bucket", "seconds")

_Place = tuple[int, int, str, int | None]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Args:
        kind: ``kill``: the process ends by SIGKILL; ``oom``: the same, from outside, as the kernel does it;
            ``segfault``: by SIGSEGV. ``hang``: it is stopped (SIGSTOP); ``gil``: a thread keeps Python's lock; ``spin``: it
            computes nothing, busily; ``deadlock``: it waits for a lock that it has. ``slow``: the step takes ``seconds``
            longer. ``leave``: it is told to leave (SIGTERM), as on a machine that will be taken away. In ``checkpoint`` it
            strikes whichever thread writes the manifest. ``nodeloss``: all processes of a node end by SIGKILL at once, its
            launcher too; ``partition``: the network of a node is cut. The launcher of that node does it.
        rank: Whom it strikes; the number of the first world, kept for life. With ``node``: that node's first worker, who
            says when it is time, or :data:`NOBODY` as long as it is not known who that is.
        step: In which step, counted from 0.
        phase: Where in the step, one of :data:`PHASES`.
        bucket: Only with ``allreduce``: the fault strikes after this bucket was summed, in the middle of the
            sum that follows. None: in the middle of the step's first sum.
        seconds: How long it lasts, 0.001 to 1,000,000; ``slow`` needs it, those that end processes or tell one to leave do
            not have it, others last for ever without it.
        node: Which node it strikes, for the kinds of :data:`OF_NODES`; None for the others.

    Raises:
        ConfigError: if a value is not allowed.
    """

    kind: str
    rank: int
    step: int
    phase: str = "forward"
    bucket: int | None = None
    seconds: float | None = None
    node: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            _refuse(f"kind must be {_either(KINDS)}, got {self.kind!r}")
        self._check_victim()
        for name in _NUMBERS:
            value = getattr(self, name)
            if (value is None and name in ("node", "bucket")) or (
                value == NOBODY and name == "rank" and self.is_of_node
            ):
                continue
            if type(value) is not int or value < 0:
                _refuse(f"{name} must be a whole number of at least 0, got {value!r}")
        if self.phase not in PHASES + SPLIT_PHASES:
            _refuse(f"phase must be one of {', '.join(PHASES + SPLIT_PHASES)}, got {self.phase!r}")
        if self.bucket is not None and self.phase != "allreduce":
            _refuse(f"bucket is only allowed with phase=allreduce, got phase={self.phase}")
        if self.seconds is not None:
            self._check_seconds(self.seconds)
        if self.seconds is None and self.kind == "slow":
            _refuse("slow needs seconds, as in slow:rank=1,step=20,seconds=0.5")

    @property
    def is_of_node(self) -> bool:
        """Whether it strikes a node, not one worker."""
        return self.kind in OF_NODES

    def _check_victim(self) -> None:
        if self.is_of_node and self.node is None:
            _refuse(f"{self.kind} strikes a node: say which, as in {self.kind}:node=1,step=20")
        if self.node is not None and not self.is_of_node:
            _refuse(
                f"node is only allowed with {', '.join(OF_NODES)}, got {self.kind}: it strikes one worker, rank says which"
            )

    def _check_seconds(self, seconds: float) -> None:
        if type(seconds) not in (int, float) or not _SHORTEST_S <= seconds <= _LONGEST_S:
            _refuse(f"seconds must be a number from 0.001 to 1000000, got {seconds!r}")
        if self.kind not in _LASTING:
            _refuse(f"seconds is only allowed with {', '.join(_LASTING)}, got {self.kind}")

    def to_spec(self) -> str:
        """Return the text that :func:`parse` reads as this fault."""
        phase = "" if self.phase == "forward" else f",phase={self.phase}"
        bucket = "" if self.bucket is None else f",bucket={self.bucket}"
        seconds = "" if self.seconds is None else f",seconds={self.seconds!r}"
        victim = f"node={self.node}" if self.is_of_node else f"rank={self.rank}"
        return f"{self.kind}:{victim},step={self.step}{phase}{bucket}{seconds}"


def parse(spec: str) -> Fault:
    """Read a fault as ``--inject`` takes it: ``KIND:rank=1,step=20[,phase=allreduce[,bucket=2]][,seconds=0.5]``.

    The kinds of :data:`OF_NODES` have ``node=1`` instead of ``rank=1``.

    Raises:
        ConfigError: if it is malformed; one line that begins with the spec.
    """
    try:
        kind, colon, rest = spec.partition(":")
        if kind not in KINDS:
            _refuse(f"the kind before the colon must be {_either(KINDS)}, got {kind!r}")
        victim, other = ("node", "rank") if kind in OF_NODES else ("rank", "node")
        if not colon or not rest:
            _refuse(f"after the kind there must be at least {victim} and step, as in {kind}:{victim}=1,step=20")
        values = _parse_values(rest, victim, other)
        return Fault(kind, **({"rank": NOBODY} | values))
    except ConfigError as error:
        shown = spec if spec.isprintable() else repr(spec)
        msg = f"{shown}: {error}"
        raise ConfigError(msg) from None


def _parse_values(text: str, victim: str, other: str) -> dict[str, Any]:
    """Return the values; ``victim`` is the key that says whom it strikes, ``other`` what says so with other kinds."""
    values: dict[str, Any] = {}
    keys = (victim, *_KEYS[1:])
    for item in text.split(","):
        key, equals, value = item.partition("=")
        if key == other:
            strikes = "one worker" if victim == "rank" else "a whole node"
            _refuse(f"{other} is not allowed here: this kind strikes {strikes}, and {victim} says which")
        if key not in keys:
            _refuse(f"unknown key {key!r}; there are {', '.join(keys)}")
        if not equals or not value:
            _refuse(f"{key} needs a value, as in {key}={'forward' if key == 'phase' else '1'}")
        if key in values:
            _refuse(f"{key} is given twice; give it once")
        values[key] = _PARSERS[key](key, value) if key in _PARSERS else value
    for key in (victim, "step"):
        if key not in values:
            _refuse(f"{key} is missing; {victim} and step are needed")
    return values


def _parse_number(key: str, text: str) -> int:
    # Not int(text) alone: it takes "1_0", " 1", "+1" and the digits of other scripts.
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        _refuse(f"{key} must be a whole number of at least 0, got {text!r}")
    return int(text)


def _parse_seconds(key: str, text: str) -> float:
    if not (text.isascii() and text.replace(".", "", 1).isdigit() and len(text) <= 30):
        _refuse(f"{key} must be a number from 0.001 to 1000000, got {text!r}")
    return float(text)


_PARSERS: dict[str, Callable[[str, str], Any]] = dict.fromkeys(_NUMBERS, _parse_number) | {"seconds": _parse_seconds}


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The faults of a job.

    Args:
        faults: In any order; the place of each is its number.
        seed: That the plan was drawn with; kept so that a report can say it.
        fired: Numbers of those that have fired already.

    Raises:
        ConfigError: if ``seed`` is negative or ``fired`` holds a number that no fault has.
    """

    faults: tuple[Fault, ...] = ()
    seed: int = 0
    fired: frozenset[int] = frozenset()
    _by_place: dict[_Place, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if type(self.seed) is not int or self.seed < 0:
            _refuse(f"seed must be a whole number of at least 0, got {self.seed!r}")
        if odd := [number for number in self.fired if not 0 <= number < len(self.faults)]:
            _refuse(f"fired must hold numbers of the {len(self.faults)} faults of the plan, got {min(odd)}")
        by_place: dict[_Place, int] = {}
        for number, fault in enumerate(self.faults):
            if number not in self.fired:
                by_place.setdefault((fault.rank, fault.step, fault.phase, fault.bucket), number)
        object.__setattr__(self, "_by_place", by_place)

    def due(self, rank: int, step: int, phase: str, bucket: int | None = None) -> tuple[int, Fault] | None:
        """Return the fault that strikes here, with its number; None if there is none.

        Nobody knows beforehand when a newcomer will come: in ``rejoin`` it is the first time from the fault's step on.

        Ask at every place of every step; it costs one look into a dict, or less.

        Args:
            rank: Who asks.
            step: The step in progress.
            phase: One of :data:`PHASES`.
            bucket: In ``allreduce``: the bucket that was summed last in this step; None in the first sum.
        """
        if not self._by_place:
            return None
        if phase == "rejoin":
            numbers = (n for n, f in enumerate(self.faults) if (f.rank, f.phase) == (rank, phase) and f.step <= step)
            number = next((n for n in numbers if n not in self.fired), None)
        else:
            number = self._by_place.get((rank, step, phase, bucket))
        return None if number is None else (number, self.faults[number])

    def without(self, fired: Iterable[int]) -> Self:
        """Return the plan after these have fired too; the numbers of the others stay what they were."""
        return replace(self, fired=self.fired | frozenset(fired))

    def of_node(self, node: int, first: int) -> Self:
        """Return the plan as the workers of a node need it: its ``first`` worker says when a fault of the node strikes."""
        faults = tuple(replace(f, rank=first) if f.node == node else f for f in self.faults)
        return replace(self, faults=faults)

    def check(self, workers: Collection[int], num_buckets: int | None = None, *, nodes: int = 1) -> None:
        """Make sure that every fault can find its victim.

        Args:
            workers: The ranks of the job.
            num_buckets: Buckets of a step, if it is known already.
            nodes: How many launchers the job has.

        Raises:
            ConfigError: if a fault names a rank, a node or a bucket that there is not.
        """
        for fault in self.faults:
            if fault.node is not None:
                _check_node(fault, nodes)
            elif fault.rank not in workers:
                _refuse(f"{fault.to_spec()}: rank must be {_ranks(workers)}, got {fault.rank}")
            if num_buckets is not None and fault.bucket is not None and fault.bucket >= num_buckets:
                _refuse(f"{fault.to_spec()}: bucket must be {_ranks(range(num_buckets))}, got {fault.bucket}")

    def to_specs(self) -> list[str]:
        """Return every fault, fired or not, as :func:`parse` reads it."""
        return [fault.to_spec() for fault in self.faults]

    def to_json(self) -> str:
        """Return the plan in one line."""
        faults = [{"kind": f.kind, **{key: getattr(f, key) for key in _keys(f.kind)}} for f in self.faults]
        return json.dumps({"seed": self.seed, "faults": faults, "fired": sorted(self.fired)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote.

        Raises:
            ConfigError: if a key is missing, unknown or there twice, or a value is not allowed.
        """
        try:
            fields = json.loads(text, object_pairs_hook=_no_duplicates)
        except ConfigError:
            raise
        except (ValueError, RecursionError) as error:
            _refuse(f"a fault plan must be one JSON object, got {text[:60]!r}: {error}")
        _check_keys("a fault plan", fields, ("seed", "faults", "fired"))
        for name in ("faults", "fired"):
            if type(fields[name]) is not list:
                _refuse(f"{name} of a fault plan must be a list, got {fields[name]!r:.60}")
        if any(type(number) is not int for number in fields["fired"]):
            _refuse(f"fired must be whole numbers, got {fields['fired']!r:.60}")
        faults = tuple(_fault_from(number, fault) for number, fault in enumerate(fields["faults"]))
        return cls(faults, fields["seed"], frozenset(fields["fired"]))

    @classmethod
    def random(
        cls,
        seed: int,
        workers: int,
        steps: int,
        kills: int,
        num_buckets: int,
        *,
        kinds: Sequence[str] = ("kill",),
        newcomers: int = 0,
    ) -> Self:
        """Draw a plan for a soak test: faults in any phase, alone, in sequence and several at once.

        No rank is struck twice and at least one of the first is never named. Not every fault must come to strike: one in
        ``checkpoint`` needs its victim to write a checkpoint there, one in ``rejoin`` that somebody comes.

        Args:
            seed: Same seed, same plan.
            workers: The job has the ranks 0 to ``workers - 1``.
            steps: The job has the steps 0 to ``steps - 1``.
            kills: How many of them are struck, less than ``workers``.
            num_buckets: Buckets of a step.
            kinds: Kinds of :data:`OF_WORKERS` to choose from; one that is there twice comes twice as often.
            newcomers: Ranks from ``workers`` on that may come later; about half of them are struck too.

        Raises:
            ConfigError: if a number is out of range, or there is no such kind.
        """
        if not kinds:
            _refuse("kinds must name at least one kind")
        for name, value, least in (("workers", workers, 1), ("steps", steps, 1), ("num_buckets", num_buckets, 1)):
            if value < least:
                _refuse(f"{name} must be at least {least}, got {value}")
        if not 0 <= kills < workers:
            _refuse(f"kills must be from 0 to {workers - 1}, so that one of {workers} workers is left, got {kills}")
        rng = random.Random(seed)
        faults: list[Fault] = []
        victims = rng.sample(range(workers), kills)
        victims += [rank for rank in range(workers, workers + newcomers) if rng.random() < 0.5]
        phases = PHASES if newcomers else tuple(phase for phase in PHASES if phase != "rejoin")
        for rank in victims:
            fault = _draw(rng, rank, steps, num_buckets, phases, faults[-1] if faults else None)
            faults.append(fault if tuple(kinds) == ("kill",) else _of_some_kind(rng, fault, kinds))
        return cls(tuple(faults), seed)


def mtbf_schedule(mtbf_s: float, seed: int, workers: Sequence[int]) -> Iterator[tuple[float, int]]:
    """Draw when workers die and which: exponential times, a victim chosen evenly among those alive.

    Args:
        mtbf_s: Mean time between failures of the *whole job*, seconds, more than 0. It stays the same
            while the job shrinks.
        seed: Same seed, same schedule.
        workers: The ranks of the job; one of them is spared.

    Returns:
        Seconds since the start, growing, and the victim.

    Raises:
        ConfigError: if ``mtbf_s`` is not a positive number, or a rank is there twice.
    """
    if not (math.isfinite(mtbf_s) and mtbf_s > 0):
        _refuse(f"mtbf_s must be more than 0 and finite, got {mtbf_s}")
    if len(set(workers)) != len(workers):
        _refuse(f"workers must be different ranks, got {list(workers)}")
    return _draw_deaths(mtbf_s, random.Random(seed), sorted(workers))


def _draw_deaths(mtbf_s: float, rng: random.Random, alive: list[int]) -> Iterator[tuple[float, int]]:
    now_s = 0.0
    while len(alive) > 1:
        now_s += rng.expovariate(1 / mtbf_s)
        yield now_s, alive.pop(rng.randrange(len(alive)))


def _draw(
    rng: random.Random, rank: int, steps: int, num_buckets: int, phases: Sequence[str], last: Fault | None
) -> Fault:
    if last is not None and rng.random() < 0.4:
        # With the one before: in the same phase, in another, or while the others recover from it.
        step, phase = last.step, rng.choice((last.phase, "recovery", rng.choice(phases)))
    else:
        # Nobody recovers in a step in which nobody else dies.
        step, phase = rng.randrange(steps), rng.choice([p for p in phases if p != "recovery"])
    bucket = rng.choice((None, *range(num_buckets))) if phase == "allreduce" else None
    return Fault("kill", rank, step, phase, bucket)


def _of_some_kind(rng: random.Random, fault: Fault, kinds: Sequence[str]) -> Fault:
    """Return ``fault`` with a kind of ``kinds``; who gets stuck mostly stays so."""
    kind = rng.choice(kinds)
    if kind == "slow":
        return replace(fault, kind=kind, seconds=rng.choice((0.2, 1.0)))
    return replace(fault, kind=kind, seconds=rng.choice((None, None, 0.2)) if kind in STUCK else None)


# ---------------------------------------------------------------------------------------------
# Strict reading


def _fault_from(number: int, fields: Any) -> Fault:
    try:
        kind = fields.get("kind") if type(fields) is dict else None
        _check_keys("it", fields, ("kind", *_keys(kind)))
        return Fault(**fields)
    except ConfigError as error:
        _refuse(f"fault {number} of the plan: {error}")


def _keys(kind: Any) -> tuple[str, ...]:
    return (*_KEYS, "node") if kind in OF_NODES else _KEYS


def _check_node(fault: Fault, nodes: int) -> None:
    if nodes < 2:
        _refuse(
            f"{fault.to_spec()}: {fault.kind} strikes one of several nodes: it needs --fabric gloo and --nnodes 2 or more"
        )
    if fault.node not in range(nodes):
        _refuse(f"{fault.to_spec()}: node must be {_ranks(range(nodes))}, got {fault.node}")


def _check_keys(what: str, fields: Any, keys: Sequence[str]) -> None:
    if type(fields) is not dict:
        _refuse(f"{what} must be a JSON object, got {fields!r:.60}")
    if odd := sorted(fields.keys() ^ set(keys)):
        _refuse(f"{what} must have the keys {', '.join(keys)}; wrong or missing: {', '.join(odd)}")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for position, (name, _) in enumerate(pairs):
        if any(name == other for other, _ in pairs[:position]):
            _refuse(f"the key {name!r} of a fault plan is given twice; give it once")
    return dict(pairs)


def _either(names: Sequence[str]) -> str:
    return repr(names[0]) if len(names) == 1 else f"one of {', '.join(names)}"


def _ranks(numbers: Collection[int]) -> str:
    ordered = sorted(numbers)
    if not ordered:
        return "a worker of the job, and there is none"
    if ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"one of {ordered[0]}..{ordered[-1]}"
    return f"one of {', '.join(map(str, ordered))}"


def _refuse(what: str) -> NoReturn:
    raise ConfigError(what)
