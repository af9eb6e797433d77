"""Shared by the benchmarks: options, taking turns, spreads, ratios with intervals, tables, results with their machine.

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
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
PYTHONS = {
    "own": Path(sys.executable),
    "peers": PEERS_PYTHON,
    "torch": ROOT / ".venv-peers-torch" / "bin" / "python",
    "ray": ROOT / ".venv-peers-ray" / "bin" / "python",
}
"""Python of each environment: Holdfast's own, and those that ``make bench-peers`` makes."""


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


def interval(found: Mapping[str, float] | None, digits: int = 2) -> str:
    """Return a ratio with its interval, as a cell of a table; "-" for None."""
    if not found:
        return "-"
    return f"{found['ratio']:.{digits}f} ({found['low']:.{digits}f}-{found['high']:.{digits}f})"


def times(a: Sequence[float], b: Sequence[float], digits: int = 2) -> str:
    """Return how many times the other's median that of ``a`` is, measured in the same blocks, as a cell of a table."""
    return interval(ratio(a, b, paired=True), digits)


def cells(
    values: Sequence[float], digits: int = 2, *, scale: float = 1.0, keys: Sequence[str] = ("p50", "p10", "p90")
) -> list[str]:
    """Return quantiles of the values as cells of a table."""
    found = spread(values)
    return [f"{scale * found[key]:.{digits}f}" for key in keys]


def mean_interval(values: Sequence[float], draws: int = 1000, seed: int = 0) -> tuple[float, float, float]:
    """Return the mean, and its 95 % interval by bootstrap."""
    rng = random.Random(seed)
    drawn = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(draws))
    return statistics.fmean(values), drawn[draws // 40], drawn[-draws // 40 - 1]


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
        Path(path).write_text(json.dumps({"machine": machine(), **content}, indent=1, default=str) + "\n")


def command_line(doc: str | None, /, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser of options with these defaults and their types, and of ``--json FILE``.

    Args:
        doc: Description, as in the docstring.
        defaults: By option: its default, or the default with its help, or these with the choices. A list takes several
            values, False is a flag, None a path or nothing.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, given in defaults.items():
        default, text, choices = (*given, None, None)[:3] if isinstance(given, tuple) else (given, None, None)
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
            continue
        many: dict[str, Any] = {"nargs": "+"} if isinstance(default, list) else {}
        one = default[0] if many else default
        kind = Path if one is None else type(one)
        parser.add_argument(flag, type=kind, default=default, help=text, choices=choices, **many)
    parser.add_argument("--json", metavar="FILE")
    return parser


def listed(kind: Callable[[str], Any] = str) -> Callable[[str], list[Any]]:
    """Return the type of an option whose values are separated by commas."""
    return lambda text: [kind(word) for word in text.split(",")]


def check_names(parser: argparse.ArgumentParser, option: str, given: Sequence[str], known: Sequence[str]) -> None:
    """End the program with one line if an option names what there is not."""
    if odd := set(given) - set(known):
        parser.error(f"{option} must be of {', '.join(known)}, got {', '.join(sorted(odd))}")


def measure_each(names: Sequence[str], measure: Callable[[str], Any]) -> tuple[dict[str, Any], bool]:
    """Measure one after another; one that fails is said, and the others are measured. Return whether one has failed."""
    found = {}
    for name in names:
        try:
            found[name] = measure(name)
        except (RuntimeError, TimeoutError) as error:
            print(f"{name}: {error}", file=sys.stderr)
    return found, len(found) < len(names)


def take_turns(
    ways: Mapping[str, Callable[[], Any]], rounds: int, *, warm_up: int = 1, seed: int = 0
) -> dict[str, list[Any]]:
    """Return what each way returns in each round, in another order each time; rounds of a warm-up are left out."""
    rng, found = random.Random(seed), {name: [] for name in ways}
    for number in range(-warm_up, rounds):
        for name in rng.sample(list(ways), len(ways)):
            value = ways[name]()
            if number >= 0:
                found[name].append(value)
    return found


def told(name: str, row: Any) -> Any:
    """Print the result of one job while others follow, and return it."""
    print(f"{name}: {row}", file=sys.stderr)
    return row


def turned(systems: Sequence[Any], number: int) -> list[Any]:
    """Return the systems in the order of a round: each round begins with the next one."""
    shift = number % max(1, len(systems))
    return [*systems[shift:], *systems[:shift]]


def timed(act: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return how long a call takes, in seconds."""
    begun_s = clock()
    act()
    return clock() - begun_s


def processor_s() -> float:
    """Return the processor time of this process so far, and of the children that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def pss_bytes(pid: int | str = "self") -> int:
    """Return the memory of a process, of each page its share; 0 if it has ended."""
    try:
        lines = Path("/proc", str(pid), "smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a job: one thread a worker, no variables of other jobs, and ``more``."""
    stray = ("HOLDFAST_", "OMPI_", "PMIX_", "PRTE_", "TORCHFT_", "PEER_", "MASTER_", "RANK", "WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(stray)}
    return kept | {"OMP_NUM_THREADS": "1"} | more
