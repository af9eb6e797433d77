"""A fault: one planned failure, with its place and time, as data and as the argument of ``--inject``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import ConfigError, refuse
from holdfast.faults.flip import Flip, parse_flip
from holdfast.faults.reading import check_keys, read_number, read_seconds

ENDS = ("kill", "segfault", "oom")
"""Kinds that end the process immediately."""
STUCK = ("hang", "gil", "spin", "deadlock")
"""Kinds after which the process exists but makes no progress, for some seconds or forever."""
OF_WORKERS = (*ENDS, *STUCK, "slow", "leave")
"""Kinds that strike one worker."""
OF_DEVICES = ("gpu-error", "gpu-oom", "gpu-hang")
"""Kinds that strike the device of one worker, while it computes."""
FLIP = "flip"
"""The kind that alters values of one worker, which continues without noticing."""
OF_NODES = ("nodeloss", "partition")
"""Kinds that strike a node, with all processes that its launcher has started."""
KINDS = (*OF_WORKERS, *OF_DEVICES, FLIP, *OF_NODES)
PHASES = ("forward", "backward", "allreduce", "optimizer", "recovery", "checkpoint", "rejoin")
DEVICE_PHASES = ("forward", "backward", "allreduce", "optimizer")
"""Phases in which a worker uses its device."""
SPLIT_PHASES = ("handover", "rehome", "mirror")
"""Phases of split models: before a slice is handed over, when parts move, while standbys are updated."""
SCRIPT_PHASES = ("evaluate", "save")
"""Phases between two steps of the training loop of a framework: an evaluation; a checkpoint of the framework."""

NOBODY = -1
"""The rank of a fault that strikes a node, until the node's first worker is known."""

_SHORTEST_S, _LONGEST_S = 0.001, 1e6
_LASTING = (*STUCK, "slow", "partition", "gpu-hang")
_FLIP_EXAMPLE = "flip:rank=1,step=20,target=weights"

_NUMBERS = ("rank", "node", "step", "bucket", "slice")
_KEYS = ("rank", "step", "phase", "bucket", "seconds")
_WORDS = ("step", "phase", "bucket", "slice", "seconds")
"""Keys of a spec other than the victim."""
_OF_FLIPS = ("rank", "step", "bucket")
"""Keys for the place and time of a flip; all other keys describe the alteration."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned failure.

    Args:
        kind: ``kill``: the process ends by SIGKILL; ``oom``: the same, sent from outside, as by the kernel; ``segfault``: by
            SIGSEGV. ``hang``: the process is stopped (SIGSTOP); ``gil``: a thread holds the GIL; ``spin``: the worker
            busy-waits; ``deadlock``: it waits for a lock that it holds. ``slow``: the step takes ``seconds`` longer. ``leave``:
            it receives SIGTERM, as on a preempted node. In ``checkpoint`` it strikes whichever thread writes the manifest.
            ``nodeloss``: all processes of a node end by SIGKILL at the same time, including its launcher; ``partition``: the
            network of a node is cut. The node's launcher carries both out. ``flip``: values are altered. ``gpu-error``: the
            device fails, so that it is lost to the process; ``gpu-oom``: it has no memory left, once; ``gpu-hang``: a
            computation never ends. On a CPU, the same exceptions are raised, and a computation of the CPU never ends.
        rank: The worker that it strikes; ranks are numbers of the initial job, kept for life. With ``node``: that
            node's first worker, which triggers the fault, or :data:`NOBODY` until that worker is known.
        step: The step, counted from 0.
        phase: The phase of the step, one of :data:`PHASES`, :data:`SPLIT_PHASES` or :data:`SCRIPT_PHASES`. The latter
            are those before the step.
        bucket: Only with ``allreduce``: the fault strikes after this bucket was reduced, in the middle of the next
            all-reduce. None: in the middle of the step's first all-reduce. A flip of a ``message`` strikes in the
            all-reduce of this bucket.
        seconds: Duration, 0.001 to 1,000,000. Required for ``slow``; not allowed for kinds that end a process or make
            it leave; other kinds last forever without it.
        node: The node that it strikes, for the kinds of :data:`OF_NODES`; None for other kinds.
        flip: The alteration, for the kind ``flip``; None for other kinds. Its target determines the phase.
        slice: Only with ``handover``: the fault strikes between two slices, when the worker has handed over those before
            this one and has not begun it. None: before the first.

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
    flip: Flip | None = None
    slice: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            refuse(f"kind must be {_either(KINDS)}, got {self.kind!r}")
        self._check_victim()
        for name in _NUMBERS:
            value = getattr(self, name)
            if (value is None and name in ("node", "bucket", "slice")) or (
                value == NOBODY and name == "rank" and self.is_of_node
            ):
                continue
            if type(value) is not int or value < 0:
                refuse(f"{name} must be a whole number of at least 0, got {value!r}")
        phases = PHASES + SPLIT_PHASES + SCRIPT_PHASES
        if self.phase not in phases:
            refuse(f"phase must be one of {', '.join(phases)}, got {self.phase!r}")
        if (self.kind == FLIP) != (self.flip is not None):
            refuse(f"a flip needs a target, as in {_FLIP_EXAMPLE}, and no other kind takes one; got {self.kind}")
        if self.flip is not None:
            self._check_flip(self.flip)
        if self.bucket is not None and self.phase != "allreduce":
            refuse(f"bucket is only allowed with phase=allreduce, got phase={self.phase}")
        if self.kind in OF_DEVICES and self.phase not in DEVICE_PHASES:
            refuse(f"phase must be one of {', '.join(DEVICE_PHASES)} for {self.kind}, got {self.phase}")
        if self.slice is not None and (self.phase != "handover" or self.flip is not None):
            refuse(f"slice is only allowed with phase=handover, got {self.kind} in phase={self.phase}")
        if self.seconds is not None:
            self._check_seconds(self.seconds)
        if self.seconds is None and self.kind == "slow":
            refuse("slow needs seconds, as in slow:rank=1,step=20,seconds=0.5")

    @property
    def is_of_node(self) -> bool:
        """Whether it strikes a node and not a single worker."""
        return self.kind in OF_NODES

    def _check_victim(self) -> None:
        if self.is_of_node and self.node is None:
            refuse(f"{self.kind} strikes a node: name it, as in {self.kind}:node=1,step=20")
        if self.node is not None and not self.is_of_node:
            refuse(
                f"node is only allowed with {', '.join(OF_NODES)}, got {self.kind}: it strikes one worker, given by rank"
            )

    def _check_flip(self, flip: Flip) -> None:
        if self.phase != flip.phase:
            refuse(f"phase must be {flip.phase} for a flip of {flip.target}, got {self.phase}")
        if self.bucket is None and flip.target == "message":
            refuse("a flip of a message needs bucket: the bucket whose all-reduce it strikes")
        if self.bucket is not None and flip.target != "message":
            refuse(f"bucket is only allowed with target=message, got target={flip.target}")

    def _check_seconds(self, seconds: float) -> None:
        if type(seconds) not in (int, float) or not _SHORTEST_S <= seconds <= _LONGEST_S:
            refuse(f"seconds must be a number from 0.001 to 1000000, got {seconds!r}")
        if self.kind not in _LASTING:
            refuse(f"seconds is only allowed with {', '.join(_LASTING)}, got {self.kind}")

    def to_spec(self) -> str:
        """Return the text that :func:`parse` parses to this fault."""
        phase = "" if self.phase == "forward" else f",phase={self.phase}"
        bucket = "" if self.bucket is None else f",bucket={self.bucket}"
        seconds = "" if self.seconds is None else f",seconds={self.seconds!r}"
        number = "" if self.slice is None else f",slice={self.slice}"
        victim = f"node={self.node}" if self.is_of_node else f"rank={self.rank}"
        if self.flip is not None:
            return f"{self.kind}:{victim},step={self.step}{bucket},{self.flip.to_spec()}"
        return f"{self.kind}:{victim},step={self.step}{phase}{bucket}{number}{seconds}"

    def to_json(self) -> dict[str, Any]:
        """Return the fault as plain JSON."""
        fields = {"kind": self.kind, **{key: getattr(self, key) for key in _keys(self.kind)}}
        if self.slice is not None:
            fields["slice"] = self.slice
        return fields if self.flip is None else fields | {"flip": self.flip.to_json()}


def fault_from_json(fields: Any) -> Fault:
    """Read JSON from :meth:`Fault.to_json`.

    Raises:
        ConfigError: if a key is missing or unknown, or a value is not allowed.
    """
    kind = fields.get("kind") if type(fields) is dict else None
    more = ("slice",) if type(fields) is dict and "slice" in fields else ()  # only written if it is set
    check_keys("it", fields, ("kind", *_keys(kind), *more))
    if kind == FLIP:
        fields = fields | {"flip": Flip.from_json(fields["flip"])}
    return Fault(**fields)


def parse(spec: str) -> Fault:
    """Parse an argument of ``--inject``: ``KIND:rank=1,step=20[,phase=allreduce[,bucket=2]][,seconds=0.5]``.

    With ``phase=handover`` there may be ``slice=2`` instead of ``bucket=2``. The kinds of :data:`OF_NODES` take
    ``node=1`` instead of ``rank=1``. A flip is ``flip:rank=1,step=20,target=weights`` with the keys of
    :mod:`~holdfast.faults.flip`; for a ``message`` the bucket defaults to 0.

    Raises:
        ConfigError: if it is malformed; the message is one line that begins with the spec.
    """
    try:
        kind, colon, rest = spec.partition(":")
        if kind not in KINDS:
            refuse(f"the kind before the colon must be {_either(KINDS)}, got {kind!r}")
        victim, other = ("node", "rank") if kind in OF_NODES else ("rank", "node")
        if not colon or not rest:
            refuse(f"after the kind there must be at least {victim} and step, as in {kind}:{victim}=1,step=20")
        words = rest.split(",")
        if kind == FLIP:
            return _parse_flip(words)
        values = _parse_values(words, victim, other)
        return Fault(kind, **({"rank": NOBODY} | values))
    except ConfigError as error:
        shown = spec if spec.isprintable() else repr(spec)
        raise ConfigError(f"{shown}: {error}") from None


def _parse_flip(words: Sequence[str]) -> Fault:
    where = [word for word in words if word.partition("=")[0] in _OF_FLIPS]
    flip = parse_flip([word for word in words if word not in where])
    values = _parse_values(where, "rank", "node")
    if flip.target == "message":
        values.setdefault("bucket", 0)
    return Fault(FLIP, phase=flip.phase, flip=flip, **values)


def _parse_values(words: Sequence[str], victim: str, other: str) -> dict[str, Any]:
    """Return the values; ``victim`` is the key for the victim, ``other`` the key that other kinds use for it."""
    values: dict[str, Any] = {}
    keys = (victim, *_WORDS)
    for word in words:
        key, equals, value = word.partition("=")
        if key == other:
            strikes = "one worker" if victim == "rank" else "a whole node"
            refuse(f"{other} is not allowed here: this kind strikes {strikes}, given by {victim}")
        if key not in keys:
            refuse(f"unknown key {key!r}; valid keys are {', '.join(keys)}")
        if not equals or not value:
            refuse(f"{key} needs a value, as in {key}={'forward' if key == 'phase' else '1'}")
        if key in values:
            refuse(f"{key} is given twice; give it once")
        values[key] = _PARSERS[key](key, value) if key in _PARSERS else value
    for key in (victim, "step"):
        if key not in values:
            refuse(f"{key} is missing; {victim} and step are required")
    return values


_PARSERS: dict[str, Callable[[str, str], Any]] = dict.fromkeys(_NUMBERS, read_number) | {"seconds": read_seconds}


def _either(names: Sequence[str]) -> str:
    return repr(names[0]) if len(names) == 1 else f"one of {', '.join(names)}"


def _keys(kind: Any) -> tuple[str, ...]:
    """Return the keys of the JSON object of a fault of this kind, except the kind."""
    if kind == FLIP:
        return (*_KEYS, "flip")
    return (*_KEYS, "node") if kind in OF_NODES else _KEYS
