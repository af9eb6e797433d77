"""Options, declared once: in the field of the dataclass that holds the value.

``holdfast run --help``, the parser, the checks of amounts and choices, the table in ``docs/reference/cli.md`` and the command line that a
report names are all made from these fields. To add an option, add a field.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError

GROUPS = (
    *("workers", "machines", "nodes", "meeting", "recovery", "slices", "sums", "copies", "newcomers", "limits", "watching"),
    *("stragglers", "faults", "seed", "checkpoints", "stopping", "length", "output", "comparison"),
)  # fmt: skip
"""In this order ``--help`` and the manual show options; those of a group stand in the order of their fields."""

_KEY = "holdfast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """How a field is given on the command line, and what values it may have.

    Args:
        help: Its line in ``--help``, "" for a field without an option.
        manual: Its line in ``docs/reference/cli.md``, in Markdown; "": that of ``--help``.
        usual: What the manual says is the default; "": the field's, where there are choices or ``--help`` shows it, or what
            stands in brackets at the end of ``help``.
        group: One of :data:`GROUPS`.
        flags: As click takes them; none: ``--`` and the name of the field, without its unit.
        metavar: What stands for the value; "": the choices, or what the field's name or type says.
        kind: Type of the word, where it is not that of the default.
        choices: All values that there are; none: any.
        is_open: Other packages may add choices, so the value is checked where they are known.
        least: The smallest value of the field; None: any.
        most: The largest value of the field; None: any.
        least_given: The smallest value on the command line, where values below it mean something else inside the program.
        because: Why there is a smallest one.
        is_shown: Whether ``--help`` shows the field's default. It is then what the option has, else the option has None.
        env: A variable that may be set instead.
    """

    help: str = ""
    manual: str = ""
    usual: str = ""
    group: str = ""
    flags: tuple[str, ...] = ()
    metavar: str = ""
    kind: Any = None
    choices: tuple[str, ...] = ()
    is_open: bool = False
    least: int | None = None
    most: int | None = None
    least_given: int | None = None
    because: str = ""
    is_shown: bool = False
    env: str | None = None


@dataclass(frozen=True, slots=True)
class Declared:
    """An option and the field that declares it."""

    name: str
    default: Any
    option: Option

    @property
    def flags(self) -> tuple[str, ...]:
        """As click takes them, such as ``--workers`` and ``-n``."""
        return self.option.flags or ("--" + self.name.removesuffix("_s").replace("_", "-"),)

    @property
    def flag(self) -> str:
        """The option's own name, such as ``--workers``."""
        return self.flags[0].split("/")[0]

    @property
    def parameter(self) -> str:
        """What the command's function calls it: the same name in Python's words."""
        return "as_json" if self.flag == "--json" else self.flag.removeprefix("--").replace("-", "_")

    @property
    def metavar(self) -> str:
        """What stands for the value in ``--help``."""
        said = "SECONDS" if self.name.endswith("_s") else "DIR" if self.kind is Path else ""
        return self.option.metavar or "|".join(filter(None, self.option.choices)) or said

    @property
    def manual(self) -> str:
        """Its line in ``docs/reference/cli.md``."""
        return self.option.manual or self.option.help[:1].lower() + self.option.help[1:].removesuffix(".")

    @property
    def usual(self) -> str:
        """What the manual says is the default."""
        if self.option.usual or isinstance(self.default, bool):
            return self.option.usual
        if self.option.choices and self.default:
            return f"`{self.default}`"
        if self.option.is_shown:
            return f"{self.default:g}"
        return self.option.help.rpartition(" [")[2].removesuffix("].") if self.option.help.endswith("].") else ""

    @property
    def kind(self) -> Any:
        """Type of the value on the command line."""
        return self.option.kind or type(self.default)


def option(default: Any, **how: Any) -> Any:
    """Declare a field of a dataclass that has an :class:`Option`."""
    return dataclasses.field(default=default, metadata={_KEY: Option(**how)})


def declared(*classes: type) -> list[Declared]:
    """Return the options of all fields, in the order in which they are shown."""
    found = [each for one in classes for each in fields_of(one) if each.option.help]
    return sorted(found, key=lambda each: GROUPS.index(each.option.group))


def choices(one: type) -> dict[str, tuple[str, ...]]:
    """Return the fields of a dataclass that may have only some values, and these."""
    return {each.name: each.option.choices for each in fields_of(one) if each.option.choices}


def check(given: Any) -> None:
    """Hold the values of a dataclass against the choices and bounds that its fields declare.

    Raises:
        ConfigError: naming the first field that breaks them.
    """
    fields = [(each.name, getattr(given, each.name), each.option) for each in fields_of(type(given))]
    for name, value, how in fields:
        if how.choices and not how.is_open and value not in how.choices:
            raise ConfigError(f"{name} must be one of {', '.join(filter(None, how.choices))}, got {value!r}")
    for name, value, how in fields:
        if how.least is not None and value < how.least:
            raise ConfigError(f"{name} must be at least {how.least}, got {value}")
        if how.most is not None and value > how.most:
            raise ConfigError(f"{name} must be at most {how.most}, got {value}")


def fields_of(one: type) -> Iterator[Declared]:
    """Yield the fields of a dataclass that declare something."""
    for field in dataclasses.fields(one):
        if _KEY in field.metadata:
            yield Declared(field.name, field.default, field.metadata[_KEY])


def variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return f"HOLDFAST_{name.upper()}"


def parse(variable: str, text: str, default: Any) -> Any:
    """Return what a variable says, of the type of the default.

    Raises:
        ConfigError: naming the variable, if it says no such thing.
    """
    try:
        if isinstance(default, bool):
            return {"1": True, "true": True, "0": False, "false": False, "": False}[text.lower()]
        return type(default)(text)
    except (KeyError, ValueError):
        raise ConfigError(
            f"{variable} must be {'0 or 1' if isinstance(default, bool) else f'of type {type(default).__name__}'}, got {text!r}"
        ) from None


MAX_REQUEST = 1 << 16
"""Most characters of a line that asks a running job for changes."""


def request_in(line: str) -> dict[str, Any]:
    """Return what a line of a file asks a running job for; the caller checks whether a value is allowed.

    Raises:
        ConfigError: if it is no JSON object with names of settings as keys.
    """
    if len(line) > MAX_REQUEST:
        raise ConfigError(f"it has more than {MAX_REQUEST} characters")
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"it is not JSON: {error}") from None
    if not isinstance(request, dict):
        raise ConfigError(f"it must be a JSON object, and is a {type(request).__name__}")
    for name in request:
        if not name.isidentifier():
            raise ConfigError(f"{name!a:.60} is no name of a setting")
    return request


def losses_of(text: str, name: str) -> int:
    """Return the loss of how many workers the number of slices is to bear, 0 for as many as usual.

    Args:
        text: ``auto`` or ``auto:F``.
        name: Of what was given, for the message.

    Raises:
        ConfigError: if it is something else.
    """
    word, colon, losses = text.partition(":")
    if word == "auto" and (not colon or (losses.isdecimal() and int(losses) > 0)):
        return int(losses or 0)
    raise ConfigError(
        f"{name} must be a number, auto, or auto:F to bear the loss of F workers, 1 at least, got {text!r}"
    )
