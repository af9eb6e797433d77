"""One table: Holdfast beside the best peer and beside the machine's limit, each row with its 95 % interval.

    python benchmarks/table.py [--only step,load] [--long] [--again] [--list] [--markdown] [--out DIR]

``make bench`` calls it, ``make bench LONG=1`` with ``--long``. Each row runs scripts of this folder in a process of its
own with a deadline, and leaves a file below ``out/bench``, by commit and machine. The next run measures only what is
missing, what failed, and what was measured on a busy machine. All rows together take less than an hour.

A ratio is that of medians, with a 95 % interval by bootstrap; below 1 Holdfast is better. The limit is measured in the
same run: copying memory, ``dd``, the wire, the bare process. While a row runs, the share of processor time used by
other processes or stolen by the host of a virtual machine is watched, and just before it: a row measured on a busy
machine gets a remark instead of an interval.

Peers need ``make bench-peers``. ``--tiny`` runs each row at a size that takes seconds, to see whether it works; its
figures count for nothing.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common import ROOT
from rows.catalogue import ROWS
from rows.environments import versions_for, why_missing
from rows.machine import judge, kernel_threads_s, ticks_now, watch_before
from rows.process import RowFailed, SampledTime, adopt_orphans, children_s, run_commands
from rows.results import Result, Results, as_dict, folder_of
from rows.row import Row
from rows.text import by_row, page

LONG_TIMES = 6.0
"""A row of ``--long`` has this many times its deadline."""
GRACE_S = 60.0
"""How long the process of a row may take beyond its deadline, in seconds: it ends what it has started."""


def main() -> int:
    """Measure what is missing and print the table."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the row's process ends too
    if options.measure:
        signal.signal(signal.SIGINT, lambda *_: None)  # of the terminal; the program above sends SIGTERM
        return measure(options.only[0], options.size, Results(options.out))
    if options.list:
        for row in options.only:
            print(f"{row.name:16} {row.what}; at most {deadline(row, options.size):.0f} s")
        return 0
    results = Results(folder_of(options.out))
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        measure_all(options.only, options.size, results, again=options.again)
    except KeyboardInterrupt:
        print("interrupted; the next run resumes\n", file=sys.stderr)
    founds = by_row(options.only, read_all(options.only, options.size, results))
    print(page(founds, why_missing, markdown=options.markdown))
    print(f"\nresults and output of each row: {results.folder}")
    return int(any(found.result is None or bool(found.result.failed) for found in founds))


def read_all(rows: Sequence[Row], size: str, results: Results) -> dict[str, Result]:
    """Return the results by row, but for those of other commands or versions than now."""
    found = [(row, results.read(row.name, size)) for row in rows]
    return {row.name: each for row, each in found if each and each.is_of(row, size, versions_for(row))}


def measure_all(rows: Sequence[Row], size: str, results: Results, *, again: bool) -> None:
    """Measure each row that has no result that counts, or with ``again`` each row, in a process of its own."""
    for number, row in enumerate(rows, 1):
        found = results.read(row.name, size)
        if not again and found is not None and found.counts_for(row, size, versions_for(row)):
            print(f"[{number}/{len(rows)}] {row.name}: measured on {found.date}", file=sys.stderr)
            continue
        print(f"[{number}/{len(rows)}] {row.name}: at most {deadline(row, size):.0f} s", file=sys.stderr, flush=True)
        begun_s = time.monotonic()
        done = measure_apart(row, size, results)
        remark = done.failed or (f"busy: {done.busy}" if done.busy else "measured")
        print(f"    {remark}, {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)


def measure_apart(row: Row, size: str, results: Results) -> Result:
    """Measure a row in a process of its own and return its result, which replaces an earlier one at the end."""
    before_ns = results.written_ns(row.name, size)
    command = [sys.executable, __file__, "--measure", "--only", row.name, "--out", str(results.folder)]
    process = subprocess.Popen([*command, *([f"--{size}"] if size != "usual" else [])])
    try:
        process.wait(deadline(row, size) + GRACE_S)
    except subprocess.TimeoutExpired:
        pass  # which is reported below
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    done = results.read(row.name, size) if results.written_ns(row.name, size) != before_ns else None
    if done is None:
        why = f"its process ended with {process.returncode} and left no result"
        done = Result(**_about(row, size), failed=why)
        results.write(done)
    return done


def measure(row: Row, size: str, results: Results) -> int:
    """Measure one row in this process and write its result."""
    adopt_orphans()
    begun_s = time.monotonic()
    before = watch_before()
    first, own_s, kernel_s = ticks_now(), children_s() + time.process_time(), kernel_threads_s()
    folder = results.folder / f"{row.name}-{size}"
    about, sampled = _about(row, size), SampledTime()
    try:
        values = as_dict(row.read(run_commands(row.commands_of(size), folder, deadline(row, size), sampled)))
    except Exception as error:
        why = (
            str(error)
            if isinstance(error, RowFailed)
            else f"{type(error).__name__} at what its scripts wrote: {error}; {folder}/output.log has their output"
        )
        results.write(Result(**about, failed=why, seconds=time.monotonic() - begun_s))
        return 1
    own_s = max(children_s() + time.process_time() - own_s, sampled.seconds())
    watched = judge(before, (first, ticks_now()), own_s, kernel_threads_s() - kernel_s)
    results.write(Result(**about, busy=watched.busy(), seconds=time.monotonic() - begun_s, **values))
    return 0


def _about(row: Row, size: str) -> dict[str, object]:
    commands = [list(command) for command in row.commands_of(size)]
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return {"row": row.name, "size": size, "commands": commands, "versions": versions_for(row), "date": today}


def deadline(row: Row, size: str) -> float:
    """Return how long a row may take, in seconds."""
    return row.limit_s * (LONG_TIMES if size == "long" else 1.0)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; a bad option ends the program with one line and exit code 2."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=chosen, metavar="ROWS", help="rows or groups: step,load")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--long", dest="size", action="store_const", const="long", help="more rounds: hours")
    size.add_argument(
        "--tiny", dest="size", action="store_const", const="tiny", help="whether each row works; counts for nothing"
    )
    parser.add_argument("--again", action="store_true", help="measure rows that have a result, too")
    parser.add_argument("--list", action="store_true", help="print the rows and their deadlines, measure nothing")
    parser.add_argument("--markdown", action="store_true", help="print Markdown, for the documentation")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench", metavar="DIR", help="folder of the results")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(size="usual")
    options = parser.parse_args(words)
    options.only = options.only or [row for row in ROWS if options.size == "long" or not row.only_long]
    return options


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> None:  # type: ignore[override]
        """Print the line and end the program."""
        self.exit(2, f"table.py: {message}\n")


def chosen(text: str) -> list[Row]:
    """Return the rows that the text names, in the order of the table.

    Raises:
        argparse.ArgumentTypeError: if a name is neither that of a row nor of a group.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = {row.name for row in ROWS} | {row.name.partition("-")[0] for row in ROWS}
    odd = [name for name in names if name not in known]
    if odd or not names:
        what = f"there is no row {odd[0]!r}" if odd else "it names no row"
        raise argparse.ArgumentTypeError(f"{what}; rows and groups are {', '.join(sorted(known))}")
    return [row for row in ROWS if row.name in names or row.name.partition("-")[0] in names]


if __name__ == "__main__":
    sys.exit(main())
