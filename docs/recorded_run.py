"""Record a run with two kills, and put what it printed, and a picture of it, into README.md: `make readme`.

The picture is docs/_static/run-light.svg and run-dark.svg: the lanes of the workers over time, drawn from the run's records.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.records import load_events
from holdfast.records.types import FaultFired, Finished, Record, RunStarted, StepCommitted

ROOT = Path(__file__).parents[1]
SCRIPT = "examples/01_survive_a_kill.py"
KILLS = ("kill:rank=1,step=40", "kill:rank=2,step=90,phase=allreduce")
BEGIN, END = "<!-- recorded run: begin -->", "<!-- recorded run: end -->"
SHOWN = re.compile(r"lost rank|sha256|committed,|workers finished|^goodput")
"""Lines of the output that README shows."""

WIDTH, LANE, TOP, LEFT, RIGHT = 860, 46, 14, 92, 24
TICK_ROOM = 28
"""Pixels that the number of a step needs."""
FONT = "font-family='-apple-system,Segoe UI,Helvetica,Arial,sans-serif'"


@dataclass(frozen=True)
class Theme:
    """Colours of a picture, each with a contrast of at least 4.5 to its background where it is text."""

    name: str
    text: str
    lane: str
    bar: str
    kill: str
    tick: str


LIGHT = Theme("light", text="#24292f", lane="#d0d7de", bar="#1a6f5c", kill="#b3261e", tick="#57606a")
DARK = Theme("dark", text="#e6edf3", lane="#3d444d", bar="#3fb68b", kill="#ff8078", tick="#9aa4ae")


def run(folder: Path, faults: Sequence[str]) -> str:
    """Train with four workers; return what the launcher printed.

    Raises:
        subprocess.CalledProcessError: the run failed.
    """
    inject = [word for fault in faults for word in ("--inject", fault)]
    command = [sys.executable, "-m", "holdfast", "run", "-n", "4", *inject, "--report", str(folder), SCRIPT]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"LC_ALL": "C.UTF-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return done.stdout


def block(undisturbed: str, disturbed: str) -> str:
    """Return the console block of README: the hash without kills, and the run with them."""
    shown = [line for line in disturbed.splitlines() if SHOWN.search(line)]
    plain = [line for line in undisturbed.splitlines() if line.startswith("sha256")]
    inject = " ".join(f"--inject {kill}" for kill in KILLS)
    lines = [f"$ holdfast run -n 4 {SCRIPT}", *plain, f"$ holdfast run -n 4 {inject} {SCRIPT}", *shown]
    return "```console\n" + "\n".join(lines) + "\n```\n"


def picture(records: Sequence[Record], theme: Theme) -> str:
    """Draw the run: a lane for each worker, from the start of its training to its end, and the steps between."""
    starts = {r.rank: r.t_s for r in records if isinstance(r, RunStarted)}
    kills = {r.rank: r for r in records if isinstance(r, FaultFired)}
    ends = {r.rank: r.t_s for r in records if isinstance(r, Finished)}
    steps = [r for r in records if isinstance(r, StepCommitted)]
    begin, end = min(starts.values()), max(ends.values())

    def x(t_s: float) -> float:
        return LEFT + (t_s - begin) / (end - begin) * (WIDTH - LEFT - RIGHT)

    height = TOP + LANE * len(starts) + 46
    title = (
        f"Four workers train for {len(steps)} steps. Two receive SIGKILL; the others continue with the same mini-batch."
    )
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' role='img' {FONT} font-size='13'>",
        f"<title>{title}</title>",
    ]
    for lane, rank in enumerate(sorted(starts)):
        y = TOP + LANE * lane
        to_s = kills[rank].t_s if rank in kills else ends[rank]
        parts += [
            f"<text x='8' y='{y + 17}' fill='{theme.text}'>worker {rank}</text>",
            f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y + 12}' y2='{y + 12}' stroke='{theme.lane}'/>",
            f"<rect x='{x(starts[rank]):.1f}' y='{y}' width='{x(to_s) - x(starts[rank]):.1f}' height='24' rx='4' fill='{theme.bar}'/>",
        ]
        if rank in kills:
            parts += killed(kills[rank], x(to_s), y, theme, steps)
    base = TOP + LANE * len(starts)
    last = -math.inf
    for step in steps[:: max(1, len(steps) // 12)]:
        if x(step.t_s) - last < TICK_ROOM:
            continue
        last = x(step.t_s)
        parts += [
            f"<line x1='{x(step.t_s):.1f}' x2='{x(step.t_s):.1f}' y1='{base}' y2='{base + 6}' stroke='{theme.tick}'/>",
            f"<text x='{x(step.t_s):.1f}' y='{base + 20}' fill='{theme.tick}' text-anchor='middle' font-size='11'>{step.step}</text>",
        ]
    parts += [f"<text x='8' y='{base + 20}' fill='{theme.tick}' font-size='11'>committed step</text>", "</svg>"]
    return "\n".join(parts) + "\n"


def killed(fault: FaultFired, x: float, y: float, theme: Theme, steps: Sequence[StepCommitted]) -> list[str]:
    """Draw where a worker was killed, and how long it took until its step was committed by the others."""
    committed_s = min(step.t_s for step in steps if step.step >= fault.step and step.t_s > fault.t_s)
    return [
        f"<path d='M{x - 6:.1f} {y + 6} l12 12 m0 -12 l-12 12' stroke='{theme.kill}' stroke-width='3' stroke-linecap='round'/>",
        f"<text x='{x + 14:.1f}' y='{y + 7}' fill='{theme.kill}'>SIGKILL in step {fault.step}</text>",
        f"<text x='{x + 14:.1f}' y='{y + 27}' fill='{theme.text}'>committed {1000 * (committed_s - fault.t_s):.0f} ms later</text>",
    ]


def main() -> None:
    """Run without and with kills, and write README.md and the pictures."""
    with tempfile.TemporaryDirectory() as folder:
        undisturbed, disturbed = Path(folder) / "undisturbed", Path(folder) / "disturbed"
        said = block(run(undisturbed, ()), run(disturbed, KILLS))
        records = load_events(disturbed)
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n{said}{END}{rest.split(END)[1]}")
    for theme in (LIGHT, DARK):
        (ROOT / "docs" / "_static" / f"run-{theme.name}.svg").write_text(picture(records, theme))


if __name__ == "__main__":
    main()
