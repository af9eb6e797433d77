"""Options, each declared once, in the dataclass field that holds its value.

The parser, ``holdfast run --help``, the checks of bounds and choices, the tables in ``docs/reference/cli.md`` and the
command lines in reports are all generated from these fields. To add an option, add a field; ``extending.md`` names what else
some options need: choices, rules, whether it may differ by node, is kept on resume, or can be changed live.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError

GROUPS = (
    "Workers",
    "Recovery",
    "Spare and replacement workers",
    "Checkpoints",
    "Resume and stop",
    "Failure detection",
    "Mini-batches and gradient reduction",
    "Verification and silent data corruption",
    "Pipeline and sharded models",
    "Multiple nodes with Open MPI",
    "Multiple nodes with Gloo",
    "Fault injection",
    "Output",
    "Monitoring",
)
"""Sections of ``--help-all`` and of the reference page, in order. Within a group, basic options come first, then the
order of fields."""

_KEY = "holdfast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The command-line option of a field, and the values that the field may have.

    Args:
        help: Text in ``--help``; "" for a field without an option.
        manual: Text in ``docs/reference/cli.md``, in Markdown; "" to reuse ``help``.
        usual: Default as the documentation shows it, in Markdown; "" to show that of the field, if it is positive or a word.
        group: One of :data:`GROUPS`.
        is_basic: Whether ``--help`` lists the option. ``--help-all`` lists every option.
        flags: Names, as click expects them; empty for ``--`` and the field name without its unit.
        metavar: Placeholder of the value; "" for the choices, or for one derived from the field's name or type.
        kind: Type of the value on the command line, if it is not that of the default.
        choices: All allowed values; empty if any value is allowed.
        is_open: Whether there are more choices, such as those of plugins; the value is then checked elsewhere.
        least: The smallest value of the field; None for no bound.
        most: The largest value of the field; None for no bound.
        least_given: The smallest value on the command line, if smaller values have an internal meaning.
        because: The reason for the smallest value.
        has_default: Whether the parser uses the field's default; otherwise a missing option is None.
        env: Environment variable that may be set instead.
    """

    help: str = ""
    manual: str = ""
    usual: str = ""
    group: str = ""
    is_basic: bool = False
    flags: tuple[str, ...] = ()
    metavar: str = ""
    kind: Any = None
    choices: tuple[str, ...] = ()
    is_open: bool = False
    least: int | None = None
    most: int | None = None
    least_given: int | None = None
    because: str = ""
    has_default: bool = False
    env: str | None = None


@dataclass(frozen=True, slots=True)
class DeclaredOption:
    """An option and the field that declares it."""

    name: str
    default: Any
    option: Option

    @property
    def flags(self) -> tuple[str, ...]:
        """Names, as click expects them, such as ``--workers`` and ``-n``."""
        return self.option.flags or ("--" + self.name.removesuffix("_s").replace("_", "-"),)

    @property
    def flag(self) -> str:
        """The main name, such as ``--workers``."""
        return self.flags[0].split("/")[0]

    @property
    def parameter(self) -> str:
        """Name of the parameter of the command's function."""
        return "as_json" if self.flag == "--json" else self.flag.removeprefix("--").replace("-", "_")

    @property
    def metavar(self) -> str:
        """Placeholder of the value in ``--help``."""
        derived = "SECONDS" if self.name.endswith("_s") else "DIR" if self.kind is Path else ""
        return self.option.metavar or "|".join(filter(None, self.option.choices)) or derived

    @property
    def manual(self) -> str:
        """Text in ``docs/reference/cli.md``."""
        return self.option.manual or self.option.help[:1].lower() + self.option.help[1:].removesuffix(".")

    @property
    def usual(self) -> str:
        """Default as the documentation shows it, in Markdown; "" for none."""
        if self.option.usual or isinstance(self.default, bool) or not self.default:
            return self.option.usual
        if isinstance(self.default, str):
            return f"`{self.default}`"
        return f"{self.default:g}" if self.default > 0 else ""

    @property
    def kind(self) -> Any:
        """Type of the value on the command line."""
        return self.option.kind or type(self.default)


def option(default: Any, **how: Any) -> Any:
    """Declare a field of a dataclass that has an :class:`Option`."""
    return dataclasses.field(default=default, metadata={_KEY: Option(**how)})


def declared(*classes: type) -> list[DeclaredOption]:
    """Return the options of all fields, in the order in which the documentation lists them."""
    options = [each for one in classes for each in fields_of(one) if each.option.help]
    return sorted(options, key=lambda each: (GROUPS.index(each.option.group), not each.option.is_basic))


def choices(one: type) -> dict[str, tuple[str, ...]]:
    """Return the allowed values of each field of a dataclass that declares choices."""
    return {each.name: each.option.choices for each in fields_of(one) if each.option.choices}


def check(given: Any) -> None:
    """Check the values of a dataclass against the choices and bounds that its fields declare.

    Raises:
        ConfigError: naming the first field whose value is not allowed.
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


def fields_of(one: type) -> Iterator[DeclaredOption]:
    """Yield the fields of a dataclass that declare an :class:`Option`."""
    for field in dataclasses.fields(one):
        if _KEY in field.metadata:
            yield DeclaredOption(field.name, field.default, field.metadata[_KEY])


def variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return f"HOLDFAST_{name.upper()}"


def is_set(settings: Any, name: str) -> bool:
    """Return whether a setting was given, in the environment or with another value than its default.

    Args:
        settings: A dataclass of settings.
        name: The field.
    """
    default = type(settings).__dataclass_fields__[name].default
    return variable(name) in os.environ or getattr(settings, name) != default


def parse(variable: str, text: str, default: Any) -> Any:
    """Return the value of an environment variable, converted to the type of the default.

    Raises:
        ConfigError: naming the variable, if its text cannot be converted.
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
"""Maximum length of a request line to a running job, in characters."""
MAX_NUMBER = 2**31 - 1
"""The largest whole number in one."""


def is_whole(value: Any, least: int, most: int = MAX_NUMBER) -> bool:
    """Return whether a value of a request is a whole number from ``least`` to ``most``."""
    return type(value) is int and least <= value <= most


def is_finite(value: Any) -> bool:
    """Return whether a value of a request is a finite number, ``>= 0``."""
    return type(value) in (int, float) and 0 <= value <= sys.float_info.max


def request_in(line: str) -> dict[str, Any]:
    """Parse a request line to a running job; the caller checks the values.

    Raises:
        ConfigError: if the line is not a JSON object with setting names as keys.
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
    """Return F of ``auto:F``, the number of lost workers to plan slices for; 0 for ``auto``, the default number.

    Args:
        text: ``auto`` or ``auto:F``.
        name: Name of the option or variable, for the error message.

    Raises:
        ConfigError: if the text is neither.
    """
    word, colon, losses = text.partition(":")
    if word == "auto" and (not colon or (losses.isdecimal() and len(losses) < 10 and int(losses) > 0)):
        return int(losses or 0)
    raise ConfigError(
        f"{name} must be a number, auto, or auto:F to bear the loss of F workers, 1 at least, got {text!r}"
    )
