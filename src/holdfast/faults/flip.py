"""A flip as data: which values of a running job are altered. :mod:`~holdfast.faults.tensors` carries it out.

In ``--inject`` a flip is a list of words, each an option of ``holdfast inject`` without its dashes::

    target=weights,count=10,bits=critical,at=fc1,at=fc2,keep-sign
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from holdfast.errors import refuse
from holdfast.faults.reading import check_keys, read_number

if TYPE_CHECKING:  # it imports NumPy, which the launcher, a reader of plans, does not need
    from holdfast.faults.alteration import Alteration

TARGETS = {
    "weights": "forward",
    "optimizer": "forward",
    "activations": "forward",
    "gradients": "backward",
    "message": "allreduce",
    "handover": "handover",
}
"""The possible targets, and the phase of the step in which each is altered."""

SCHEMA = 2
"""Schema of a flip's JSON."""


@dataclass(frozen=True, slots=True)
class Flip:
    """Which values are altered, and how.

    Args:
        target: One of :data:`TARGETS`.
        how: The alteration, and how it is drawn.
        at: Only tensors whose path begins with, or matches, one of these; empty: all tensors of the target.

    Raises:
        ConfigError: if a value is not allowed.
    """

    target: str
    how: Alteration
    at: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            refuse(f"target must be one of {', '.join(TARGETS)}, got {self.target!r}")
        if any(type(pattern) is not str or not pattern or "," in pattern for pattern in self.at):
            refuse(f"at must be the path of a tensor or a pattern without a comma, got {list(self.at)}")

    @property
    def phase(self) -> str:
        """The phase of the step in which it strikes."""
        return TARGETS[self.target]

    def to_spec(self) -> str:
        """Return the words that :func:`parse_flip` parses to this flip."""
        words = [f"target={self.target}", *(f"at={pattern}" for pattern in self.at)]
        for name, (_, default) in _fields().items():
            value = getattr(self.how, name)
            if value != default:
                words.append(_word(name) if value is True else f"{_word(name)}={value}")
        return ",".join(words)

    def to_json(self) -> dict[str, Any]:
        """Return the flip as plain JSON."""
        return {"schema": SCHEMA, "target": self.target, "at": list(self.at), **dataclasses.asdict(self.how)}

    @classmethod
    def from_json(cls, fields: Any) -> Self:
        """Read JSON from :meth:`to_json`, of this version.

        Raises:
            ConfigError: if a key is missing or unknown, or a value is not allowed.
        """
        from holdfast.faults.alteration import Alteration

        check_keys("flip", fields, ("schema", "target", "at", *_fields()))
        schema = fields["schema"]
        if type(schema) is not int or schema != SCHEMA:
            refuse(f"schema of a flip must be {SCHEMA}, got {schema!r:.40}; another version of holdfast may read it")
        how = {name: value for name, value in fields.items() if name not in ("schema", "target", "at")}
        for name, value in how.items():
            _check_type(name, value)
        if type(fields["at"]) is not list or type(fields["target"]) is not str:
            refuse(f"at must be a list and target a text, got {fields['at']!r:.60} and {fields['target']!r:.60}")
        return cls(fields["target"], Alteration(**how), tuple(fields["at"]))


def parse_flip(words: Sequence[str]) -> Flip:
    """Parse the words of a flip.

    Args:
        words: Words such as ``target=weights`` or ``keep-sign``; ``at`` may be repeated.

    Raises:
        ConfigError: if a word is malformed, unknown or repeated, or the target is missing.
    """
    from holdfast.faults.alteration import Alteration

    values: dict[str, Any] = {}
    at: list[str] = []
    keys = ("target", "at", *map(_word, _fields()))
    for word in words:
        key, equals, text = word.partition("=")
        name = key.replace("-", "_")
        if key not in keys:
            refuse(f"unknown key {key!r}; valid keys are rank, step, bucket, {', '.join(keys)}")
        if key != "at" and name in values:
            refuse(f"{key} is given twice; give it once")
        kind = _fields().get(name, ("str",))[0]
        if kind == "bool":
            if equals:
                refuse(f"{key} takes no value, got {text!r}")
            values[name] = True
            continue
        if not text:
            refuse(f"{key} needs a value, as in {key}={_EXAMPLES[key]}")
        if key == "at":
            at.append(text)
        else:
            values[name] = _READERS[kind](key, text)
    if "target" not in values:
        refuse(f"target is missing; it must be one of {', '.join(TARGETS)}")
    target = values.pop("target")
    return Flip(target, Alteration(**values), tuple(at))


_EXAMPLES = {
    "target": "weights",
    "at": "fc1.weight",
    "count": "10",
    "percent": "0.1",
    "rate": "1e-6",
    "probability": "0.5",
    "bits": "critical",
    "burst": "4",
    "mask": "1011",
    "scale": "-1",
    "law": "bits",
    "seed": "1",
}


@cache
def _fields() -> Mapping[str, tuple[str, Any]]:
    """Return the fields of an alteration, each with its type (without None) and its default."""
    from holdfast.faults.alteration import Alteration

    fields = dataclasses.fields(Alteration)
    return {field.name: (str(field.type).removesuffix(" | None"), field.default) for field in fields}


def _word(name: str) -> str:
    return name.replace("_", "-")


def _read_float(key: str, text: str) -> float:
    # Not float(text) alone, which accepts "1_0", " 1", "nan" and the digits of other scripts.
    plain = text if not set(text) - set("0123456789.eE+-") else "no number"
    try:
        return float(plain)
    except ValueError:
        refuse(f"{key} must be a number, got {text!r}")


_READERS: dict[str, Callable[[str, str], Any]] = {
    "int": read_number,
    "float": _read_float,
    "str": lambda key, text: text,
}
_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}


def _check_type(name: str, value: Any) -> None:
    """Refuse a JSON value of another type than the field; None stands for a default that is None."""
    kind, default = _fields()[name]
    if not (value is None and default is None) and type(value) not in _TYPES[kind]:
        refuse(f"{name} must be of type {kind}, got {value!r:.60}")
