"""Options declared in dataclasses, as parameters of a command's function, and the help that lists them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import typer
from typer import Option
from typer.core import TyperCommand

from holdfast.base.options import DeclaredOption

Command = TypeVar("Command", bound=Callable[..., Any])

_ALL = "holdfast.help_all"


class GroupedCommand(TyperCommand):
    """A command with many options: ``--help`` lists the basic ones, ``--help-all`` lists every option by group."""

    basic: frozenset[str] = frozenset()
    """Parameters whose options are basic."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of the help."""
        is_whole = ctx.meta.get(_ALL, False)
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            group = getattr(param, "rich_help_panel", None)
            title = "Arguments" if param.param_type_name == "argument" else group if is_whole and group else "Options"
            if (is_whole or not group or param.name in self.basic) and (record := param.get_help_record(ctx)):
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def show_all(context: typer.Context, value: bool) -> None:
    """Print the help with every option, and exit, if ``--help-all`` is given."""
    if value:
        context.meta[_ALL] = True
        print(context.get_help())
        raise typer.Exit


def takes(options: Sequence[DeclaredOption]) -> Callable[[Command], Command]:
    """Replace ``**given`` in a command's signature by one parameter for each option: typer reads signatures."""

    def decorate(command: Command) -> Command:
        written = inspect.signature(command, eval_str=True)
        own = [each for each in written.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters = [*own, *map(_parameter, options)]
        # Typer reads both, and evaluates annotations that are strings in the module's namespace.
        command.__signature__ = written.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate


def _parameter(declared: DeclaredOption) -> inspect.Parameter:
    how, kind = declared.option, declared.kind
    is_switch = kind is bool
    default = False if is_switch else None
    if how.has_default or (is_switch and any("/" in flag for flag in declared.flags)):
        default = declared.default
    parsed = Option(
        *declared.flags,
        help=how.help + (f"  [default: {declared.usual.replace('`', '')}]" if declared.usual else ""),
        metavar=None if is_switch else declared.metavar,
        envvar=how.env,
        show_default=False,
        rich_help_panel=how.group,
    )
    value = kind if default is not None else kind | None
    annotation: Any = Annotated[value, parsed]
    return inspect.Parameter(declared.parameter, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
