"""Commands of the laboratory: known by name here, loaded only when they are called."""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperGroup

COMMANDS = {
    "demo": "Train on handwritten digits: undisturbed, then under each strategy with two workers killed.",
    "rehearse": "Kill workers in rehearsals of SCRIPT with each predictor and codec; print the options that cost fewest steps.",
    "study": "Repeat a published experiment on this code: measure, hold the claims against it, draw a page.",
    "simulate": "Simulate a job under failures, once for each strategy, with the strategies that run in production.",
    "plan": "Say which strategy to use, how often to save, how many spares to keep, and why.",
    "inject": "Flip bits of values in a checkpoint, as soft errors do.",
}
"""The first line of the help of each, so that ``holdfast --help`` loads none of them; it is in a module of its name."""

_INTERSPERSED = {"rehearse": {"allow_interspersed_args": False}}
"""What stands behind the script is the script's."""


class Commands(TyperGroup):
    """The core's commands, and those of the lab."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, loaded if it is one of the lab's."""
        return load(cmd_name) if cmd_name in COMMANDS else super().get_command(ctx, cmd_name)


def placeholder() -> None:
    """Stand in the list of commands for one that is not loaded."""


def load(name: str) -> Any:
    """Return a command of the lab. Whatever in it needs a library of the extra ``lab`` says so where it uses it."""
    made = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    made.command(name=name, context_settings=_INTERSPERSED.get(name))(_find(name))
    return typer.main.get_command(made)


def _find(name: str) -> Any:
    """Return the function that an entry point names, or else the one that is known.

    A checkout that is only on ``PYTHONPATH`` has no metadata, or that of another version, and its commands work all the same.
    """
    from importlib.metadata import entry_points

    for point in entry_points(group="holdfast.commands", name=name):
        return point.load()
    return getattr(importlib.import_module(f"holdfast_lab.commands.{name}"), name)
