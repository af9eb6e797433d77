"""Shared by the benchmarks: spreads, ratios with confidence intervals, tables, and a description of the machine.

This module imports neither torch nor Holdfast, so that it also runs in the environment of the peers.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
"""Python of the environment of the peers, created by ``make bench-peers``."""


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and other quantiles."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]

    return {
        "n": len(ordered),
        "p50": statistics.median(ordered),
        "p10": at(0.1),
        "p90": at(0.9),
        "p99": at(0.99),
        "min": ordered[0],
        "max": ordered[-1],
    }


def ratio(a: Sequence[float], b: Sequence[float], *, paired: bool = False, seed: int = 0) -> dict[str, float]:
    """Return the ratio of medians of ``a`` to ``b``, with a 95 % interval by bootstrap.

    Args:
        a: Values of the numerator.
        b: Values of the denominator.
        paired: Value ``i`` of both was measured in the same block, and the bootstrap draws blocks.
        seed: Seed of the bootstrap.
    """
    rng = random.Random(seed)

    def once() -> float:
        if paired:
            chosen = [rng.randrange(len(a)) for _ in a]
            return statistics.median([a[i] for i in chosen]) / statistics.median([b[i] for i in chosen])
        return statistics.median(rng.choices(a, k=len(a))) / statistics.median(rng.choices(b, k=len(b)))

    drawn = sorted(once() for _ in range(1000))
    return {"ratio": statistics.median(a) / statistics.median(b), "low": drawn[25], "high": drawn[974]}


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table that is also aligned on a terminal."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (width + 1) + ("-" if i == 0 else ":") for i, width in enumerate(widths)) + "|"
    return "\n".join([title, "", line(head), rule, *map(line, rows)])


def machine() -> dict[str, Any]:
    """Return the properties of the machine needed to repeat a measurement."""
    versions = {}
    for name in ("torch", "mpi4py", "openmpi", "torchft"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "python": platform.python_version(),
        **versions,
    }


def cpu_name() -> str:
    """Return the name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def write_json(path: str | Path | None, **content: Any) -> None:
    """Write the measurement and a description of the machine to ``path``; None writes nothing."""
    if path:
        Path(path).write_text(json.dumps({"machine": machine(), **content}, indent=1) + "\n")


def command_line(doc: str | None, /, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser of options with these defaults and their types, and of ``--json FILE``.

    Args:
        doc: Description, as in the docstring.
        defaults: By option: its default, or a pair of that and its help; a list takes several values.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        value, text = default if isinstance(default, tuple) else (default, None)
        many: dict[str, Any] = {"nargs": "+"} if isinstance(value, list) else {}
        kind = type(value[0] if many else value)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value, help=text, **many)
    parser.add_argument("--json", metavar="FILE")
    return parser
