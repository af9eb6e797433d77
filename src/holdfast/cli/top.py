"""``holdfast top``: shows the jobs of this machine, live, until a key ends it."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from holdfast.cli.signals import sigterm_as_interrupt
from holdfast.cli.tables import say
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from holdfast.observe.monitor.observed import ObservedJob

_NOTHING_RUNS = 1
_SHORTEST_S, _LONGEST_S = 0.1, 60.0
_EVENTS = 3
_FIRST_S = 0.2
"""Without a terminal, processors are measured for this long."""


def top(
    *,
    every: Annotated[float, Option("--every", metavar="SECONDS", help="Time between two updates.")] = 1.0,
) -> int:
    """Show the jobs of this user on this machine, live: progress, workers, processors and memory.

    Ends with q or Ctrl-C. Without a terminal, prints one frame; it then exits with 1 if no job runs.

    Example: holdfast top
    """
    if not _SHORTEST_S <= every <= _LONGEST_S:
        raise ConfigError(f"--every must be from {_SHORTEST_S:g} to {_LONGEST_S:g} seconds, got {every:g}")
    jobs = _Jobs()
    if not sys.stdout.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        return _print_once(jobs)
    with contextlib.suppress(KeyboardInterrupt), sigterm_as_interrupt():
        _run(jobs, every)
    return 0


class _Jobs:
    """The jobs that run now."""

    def __init__(self) -> None:
        self._jobs: dict[str, ObservedJob] = {}

    def poll(self) -> list[ObservedJob]:
        """Return them, up to date, in the order of their launchers' PIDs."""
        from holdfast.launch.control import running_jobs
        from holdfast.observe.monitor.observed import ObservedJob

        jobs: dict[str, ObservedJob] = {}
        for running in running_jobs():
            job = self._jobs.get(running.process)
            if job is None or job.running != running:  # a launcher describes its job again once it begins
                job = ObservedJob(running)
            job.poll()
            jobs[running.process] = job
        self._jobs = jobs
        return sorted(jobs.values(), key=lambda job: job.running.pid)


def _print_once(jobs: _Jobs) -> int:
    jobs.poll()
    time.sleep(_FIRST_S)
    now = jobs.poll()
    if not now:
        say("no job of yours runs on this machine")
        return _NOTHING_RUNS
    from holdfast.cli.status import show

    for place, job in enumerate(now):
        if place:
            say("")
        show(job)
    return 0


def _run(jobs: _Jobs, every_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=sys.stdout, highlight=False)
    with _keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_screen(jobs.poll(), console.width, console.height), refresh=True)
            if _asks_to_quit(every_s):
                return


def _screen(jobs: list[ObservedJob], width: int, height: int) -> RenderableType:
    """Return what a terminal of this size shows of the jobs, each with an equal share of the lines."""
    from rich.console import Group
    from rich.text import Text

    number = f"{len(jobs)} job{'' if len(jobs) == 1 else 's'}"
    head = Text(f"holdfast top   {time.strftime('%H:%M:%S')}   {number}   q quits", style="reverse", no_wrap=True)
    head.truncate(width, pad=True, overflow="ellipsis")
    if not jobs:
        return Group(head, Text("no job of yours runs on this machine", style="dim"))
    room = max(1, (height - 1) // len(jobs))
    shown = jobs[: max(1, height - 1)]
    return Group(head, *(line for job in shown for line in _job_lines(job, width, room)))


def _job_lines(job: ObservedJob, width: int, room: int) -> list[RenderableType]:
    """Return a job in at most so many lines: first what matters most."""
    from rich.text import Text

    from holdfast.base.formatting import timer
    from holdfast.cli.run_text import event_lines, facts

    state = job.live.full(job.now_s())
    entries = facts(state, job.waits_for)
    title = f"{job.running.script}  job {job.running.pid}  {timer(state['now_s'])}"
    lines = [Text(title, style="bold"), Text(entries[0][1], style=_STYLES.get(state["state"]["level"], ""))]
    lines += [Text(f"{name:<12}{text}") for name, text in entries[1:]]
    events = [Text(line, style="dim") for line in event_lines(state, _EVENTS)]
    rows = _worker_lines(job, state, max(0, room - len(lines) - len(events) - 1))
    lines = [*lines, *rows, *events, Text("")]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return list(lines[:room])


_STYLES = {"good": "green", "busy": "cyan", "warning": "yellow", "bad": "bold red", "done": "green"}


def _worker_lines(job: ObservedJob, state: dict[str, Any], room: int) -> list[Text]:
    """Return the table of workers in at most so many lines; those that train as usual are left out first."""
    from rich.text import Text

    from holdfast.cli.run_text import WORKER_COLUMNS, shown_workers, worker_cells

    if room < 2:
        return []
    number = len(state["workers"])
    shown = shown_workers(state, number if number < room else room - 2)
    cells = [worker_cells(state, row, job.workers) for row in shown]
    heads = [head.removesuffix(">") for head in WORKER_COLUMNS]
    widths = [max(len(row[place]) for row in (heads, *cells)) for place in range(len(heads))]
    lines = [Text(_row(heads, widths), style="bold"), *(Text(_row(row, widths)) for row in cells)]
    if left_out := number - len(shown):
        lines.append(Text(f"... and {left_out} more", style="dim"))
    return lines


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    from holdfast.cli.run_text import WORKER_COLUMNS

    sides = [">" if head.endswith(">") else "<" for head in WORKER_COLUMNS]
    return "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(cells, sides, widths, strict=True)).rstrip()


# -- keys


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Let single keys be read from the terminal, without showing them, if the input is one."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    try:
        tty.setcbreak(file)
        modes = termios.tcgetattr(file)
        modes[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the shell with this screen
        termios.tcsetattr(file, termios.TCSANOW, modes)
        yield
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _asks_to_quit(wait_s: float) -> bool:
    """Wait for a key; return whether it is q. The end of the input is no key."""
    ends_s = time.monotonic() + wait_s
    if not sys.stdin.isatty():
        time.sleep(wait_s)
        return False
    while (left_s := ends_s - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left_s)[0]:
            typed = os.read(sys.stdin.fileno(), 64)
            if not typed or any(key in b"qQ" for key in typed):
                return True
    return False
