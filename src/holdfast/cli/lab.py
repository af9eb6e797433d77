"""Commands of the lab: known by name here, loaded only when they are called."""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperGroup

COMMANDS = {
    "demo": "Train on handwritten digits: undisturbed, then under each strategy with two workers killed.",
    "rehearse": "Kill workers in rehearsals of SCRIPT with each predictor and codec; print the options that cost the fewest steps.",
    "study": "Repeat a published experiment on this code: measure, check its claims against the results, write a page.",
    "simulate": "Simulate a job under failures, once for each strategy, with the same failures for all.",
    "plan": "Recommend a strategy, a checkpoint interval and a number of spares, and explain why.",
    "inject": "Flip bits of values in a checkpoint, as soft errors do.",
}
"""First line of the help of each command, so that ``holdfast --help`` loads none of them; each is in a module of its
name."""

_INTERSPERSED = {"rehearse": {"allow_interspersed_args": False}}
"""Words after the script are its arguments."""


class CommandGroup(TyperGroup):
    """The commands of the core and of the lab."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; load it if it is one of the lab's."""
        return load(cmd_name) if cmd_name in COMMANDS else super().get_command(ctx, cmd_name)


def placeholder() -> None:
    """Represents a command of the lab that is not loaded, in the list of commands."""


def load(name: str) -> Any:
    """Return a command of the lab. Code in it that needs the extra ``lab`` reports a missing library itself."""
    made = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    made.command(name=name, context_settings=_INTERSPERSED.get(name))(_find(name))
    return typer.main.get_command(made)


def _find(name: str) -> Any:
    """Return the function of an entry point, or else the known one.

    A checkout that is only on ``PYTHONPATH`` has no metadata, or that of another version, but its commands must work.
    """
    from importlib.metadata import entry_points

    for point in entry_points(group="holdfast.commands", name=name):
        return point.load()
    return getattr(importlib.import_module(f"holdfast_lab.commands.{name}"), name)
