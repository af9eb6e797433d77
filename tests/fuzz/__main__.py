"""Fuzz parsers: ``python tests/fuzz [PARSER ...] [--seconds N] [--out FOLDER]``; without a name all, one after the other.

Each runs in a process of its own. What it found to be new is kept in the folder, and it begins with that the next time.
The folder also has ``tally.jsonl``, how long each was run and how often it called its parser, from which a table is printed.
"""

import argparse
import json
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

INSTRUMENTED = ("holdfast", "holdfast_lab", "http.server", "tomllib")
TALLY = "tally.jsonl"
_INTERRUPTED = 72
"""Exit code of libFuzzer."""


def fuzz(name: str, seconds: int, out: Path) -> None:
    """Fuzz one parser in this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        from fuzz.parsers import find_parser

        target = find_parser(name)
    warnings.simplefilter("ignore")
    corpus = out / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    limits = ["-timeout=10", "-rss_limit_mb=4096", "-max_len=16384", "-print_final_stats=1"]
    limits += [f"-max_total_time={seconds}", f"-artifact_prefix={corpus}-found-"]
    atheris.Setup([sys.argv[0], *limits, str(corpus)], target.read)
    atheris.Fuzz()


def run(name: str, seconds: int, out: Path) -> bool:
    """Fuzz one parser in a process of its own, note what it did, and return whether it found nothing."""
    out.mkdir(parents=True, exist_ok=True)
    log, began_s = out / f"{name}.log", time.monotonic()
    with log.open("w") as file:
        command = [sys.executable, str(Path(__file__).parent), name, "--here", "--seconds", str(seconds)]
        with subprocess.Popen([*command, "--out", str(out)], stdout=file, stderr=file) as child:
            try:
                ended = child.wait()
            except KeyboardInterrupt:  # it was interrupted, too, and counts what it did
                ended = child.wait()
                if ended == _INTERRUPTED:
                    ended = 0
    said = log.read_text(errors="replace")
    counted = re.search(r"stat::number_of_executed_units:\s*(\d+)", said)
    line = {"parser": name, "seconds": round(time.monotonic() - began_s), "calls": int(counted[1]) if counted else 0}
    with (out / TALLY).open("a") as file:
        file.write(json.dumps(line) + "\n")
    if ended:
        print(f"{name}: something was found, see {log} and {out}/{name}-found-*", *said.splitlines()[-25:], sep="\n")
    return not ended


def table(out: Path) -> str:
    """Return how long each parser was fuzzed, over all runs that kept what they found in this folder."""
    lines = [json.loads(line) for line in (out / TALLY).read_text().splitlines()]
    rows = ["| parser | minutes | calls | inputs kept |", "|---|---|---|---|"]
    for name in dict.fromkeys(line["parser"] for line in lines):
        seconds, calls = (sum(line[key] for line in lines if line["parser"] == name) for key in ("seconds", "calls"))
        rows.append(f"| `{name}` | {seconds / 60:.1f} | {calls:,} | {sum(1 for _ in (out / name).iterdir()):,} |")
    return "\n".join(rows)


def _all_names() -> list[str]:
    from fuzz.parsers import all_parsers

    return list(all_parsers())


def main() -> int:
    """Fuzz until the time is over; return 1 if something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parser", nargs="*", help="their names; --list shows them")
    parser.add_argument("--seconds", type=int, default=3600, help="of each")
    parser.add_argument("--out", type=Path, default=Path("fuzz-out"), help="keeps what was new, and findings")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        fuzz(options.parser[0], options.seconds, options.out)
    names = options.parser or _all_names()
    if options.list:
        print(*names, sep="\n")
        return 0
    found = [name for name in names if not run(name, options.seconds, options.out)]
    print(table(options.out))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
