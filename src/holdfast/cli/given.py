"""Options that are declared in dataclasses, as parameters of a command's function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from typer import Option

from holdfast.options import Declared

Command = TypeVar("Command", bound=Callable[..., Any])


def takes(options: Sequence[Declared]) -> Callable[[Command], Command]:
    """Give a command's function, which has ``**given``, a parameter for each of the options: typer reads signatures."""

    def decorate(command: Command) -> Command:
        written = inspect.signature(command, eval_str=True)
        own = [each for each in written.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters = [*own, *map(_parameter, options)]
        # Typer asks for both, and looks up what stands in quotes among the names of the module.
        command.__signature__ = written.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate


def _parameter(declared: Declared) -> inspect.Parameter:
    how, kind = declared.option, declared.kind
    is_switch = kind is bool
    default = False if is_switch else None
    if how.is_shown or (is_switch and any("/" in flag for flag in declared.flags)):
        default = declared.default
    told = Option(
        *declared.flags,
        help=how.help,
        metavar=None if is_switch else declared.metavar,
        envvar=how.env,
        show_default=not is_switch,
    )
    value = kind if default is not None else kind | None
    annotation: Any = Annotated[value, told]
    return inspect.Parameter(declared.parameter, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
