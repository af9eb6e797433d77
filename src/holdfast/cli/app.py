"""All commands: one module per command, which imports its dependencies when it runs."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from typer import Option

from holdfast.base import system_errors
from holdfast.base.formatting import clean
from holdfast.cli.ckpt import ckpt
from holdfast.cli.control import scale, set_
from holdfast.cli.dashboard import dashboard
from holdfast.cli.debug_bundle import debug_bundle
from holdfast.cli.diff_runs import diff_runs
from holdfast.cli.doctor import doctor
from holdfast.cli.given import GroupedCommand
from holdfast.cli.lab import COMMANDS, CommandGroup, placeholder
from holdfast.cli.report import report
from holdfast.cli.run import RunCommand, our_name, run
from holdfast.cli.signals import raise_on_interrupt
from holdfast.cli.status import status
from holdfast.cli.tables import need_command
from holdfast.cli.top import top
from holdfast.cli.verify import verify
from holdfast.errors import CheckpointCorrupt, CheckpointMissing, ConfigError, HoldfastError, InternalError

app = typer.Typer(
    name="holdfast",
    cls=CommandGroup,
    help="Fault-tolerant PyTorch training: recover from worker failures with bit-identical results.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(cls=RunCommand, context_settings={"allow_interspersed_args": False, "token_normalize_func": our_name})(run)
app.command(context_settings={"allow_interspersed_args": False})(doctor)
app.command()(status)
app.command()(top)
app.command()(scale)
app.command(name="set")(set_)
app.command()(report)
app.command()(dashboard)
app.command(name="diff-runs")(diff_runs)
app.command()(verify)
app.command(name="debug-bundle")(debug_bundle)
app.add_typer(ckpt)
for _name, _help in COMMANDS.items():
    app.command(name=_name, help=_help)(placeholder)

_USAGE_ERROR: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")
"""Not exported by typer."""
_NUMBERS = {"int": "a whole number", "float": "a number"}
_LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    *,
    debug: Annotated[bool, Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, Option("--version", help="Print the version.")] = False,
) -> None:
    """Options that all commands share."""
    need_command(context)
    _check_working_directory()
    if context.invoked_subcommand != "run":  # which has nothing to undo before it launches a job
        raise_on_interrupt()


def _check_working_directory() -> None:
    """Refuse to begin in a directory that was removed: paths could not be made absolute, nor a process started."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the working directory was removed; change to another one (cd)") from None


def main(args: Sequence[str]) -> NoReturn:
    """Run a command and exit; see :func:`holdfast.cli.main`."""
    words = list(args)
    debug = "--debug" in words[:2]  # before the command or directly after it; later words may be the script's
    words = [word for place, word in enumerate(words) if place > 1 or word != "--debug"]
    try:
        sys.exit(app(words, prog_name="holdfast", standalone_mode=False) or 0)
    except HoldfastError as error:
        _complain(error, debug=debug)
    except typer.Abort:
        sys.exit(1)
    except _USAGE_ERROR as error:
        message = _of_number(error) or " ".join(error.format_message().split())  # type: ignore[attr-defined]
        print(f"error: {message}{_all_options(error)}", file=sys.stderr)
        sys.exit(2)
    except system_errors.KINDS as error:
        if debug or not (why := system_errors.refusal(error)):
            raise
        print(f"error: {clean(why)}", file=sys.stderr)
        sys.exit(1)


def _complain(error: HoldfastError, *, debug: bool) -> NoReturn:
    if debug or isinstance(error, InternalError):
        traceback.print_exception(error)
    else:
        # some messages quote the content of a file, which may be anything
        print("\n".join(map(clean, f"error: {error}".split("\n"))), file=sys.stderr)
    sys.exit(exit_code_of(type(error)))


def exit_code_of(kind: type[HoldfastError]) -> int:
    """Return the exit code of a command that ends with an error of this class."""
    if issubclass(kind, ConfigError | CheckpointMissing):
        return 2
    return 3 if issubclass(kind, CheckpointCorrupt) else 1


def _all_options(error: Exception) -> str:
    """Return the hint to ``--help-all`` for an unknown option of a command that has it; "" for other errors."""
    context = getattr(error, "ctx", None)
    if context is None or type(error).__name__ != "NoSuchOption" or not isinstance(context.command, GroupedCommand):
        return ""
    return f"; {context.command_path} --help-all lists every option"


def _of_number(error: Exception) -> str:
    """Return a message in our own form for a value that is no number or out of range; "" for other errors."""
    param, find = getattr(error, "param", None), getattr(error.__cause__, "errors", None)
    if param is None or find is None:
        return ""
    wrong = find()[0]
    kind, limits = wrong["type"].partition("_")[0], wrong.get("ctx", {})
    allowed = [f"{_LIMITS[name]} {limit}" for name, limit in limits.items() if name in _LIMITS]
    if not allowed and kind in _NUMBERS:
        of = " of seconds, without a unit" if param.metavar == "SECONDS" else ""
        allowed = [f"{_NUMBERS[kind]}{of}"]
    name = param.opts[0] if param.opts[0].startswith("-") else param.metavar
    value = wrong["input"] if limits else repr(wrong["input"])
    return f"{name} must be {allowed[0]}, got {value}" if allowed else ""
