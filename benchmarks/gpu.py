"""Everything of Holdfast that one GPU can show, in sections: ``python benchmarks/gpu.py``, at most two hours on one card.

    python benchmarks/gpu.py --list
    python benchmarks/gpu.py [--only staged,kernel] [--again]
    python benchmarks/gpu.py --device cpu             # the same code at tiny size: does the script work?

Each section runs in a process of its own, with a time limit. It writes ``benchmarks/results/gpu-SECTION.json`` after every
figure, so that a section that is cut short keeps what it has; ``python docs/generate.py`` makes the page of results of
these files. A section that is complete for this commit is not run again, unless ``--again`` is given.

With ``--device cpu`` nothing is measured that counts: files are called ``cpu-SECTION.json``, and lie in ``out/``. Sections
that need CUDA are skipped, and say why.

Exit code: 0 if every section that was run is complete and everything in it holds, 1 if not, 2 if it cannot be run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from gpus.results import COMPLETE, ROOT, Results, SectionFailed, Where, commit_of, facts_of, path_of

END_S = 20.0
"""How long a section that has reached its time limit may take to end its processes, seconds."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the benchmark.

    Args:
        title: What it shows.
        limit_s: Its time limit, seconds.
        cuda: Why it cannot run on a CPU, "" if it can.
    """

    title: str
    limit_s: float
    cuda: str = ""


SECTIONS = {
    "staged": Section("2 to 8 processes on one GPU, kills in every phase", 1200),
    "step": Section("time of a step beside the plain loop", 1200),
    "alone": Section("one process that runs all workers", 600),
    "kernel": Section("kernel of the ordered addition", 300),
    "exporter": Section("what a reader of shared device memory sees when its owner is killed", 600),
    "lifecycles": Section("communicators of NCCL: made, aborted, made anew", 900),
    "sick": Section("a device that fails, has no memory, or computes for ever", 600),
    "features": Section("features of PyTorch, with a kill", 900),
    "waits": Section("how often a step makes the host wait", 300, "it counts calls of the CUDA runtime"),
    "memory": Section(
        "peak of device memory, before and after a loss", 600, "it reads counters of the GPU's allocator"
    ),
}
"""In order of their value."""


def main() -> None:
    """Run the sections one after another."""
    options = parse()
    if options.section:
        sys.exit(run_section(options))
    failed = []
    for name in options.only:
        section = SECTIONS[name]
        if options.device == "cpu" and section.cuda:
            print(f"{name}: skipped, needs CUDA: {section.cuda}")
        elif not options.again and is_complete(path_of(options.out, options.device, name), options.commit):
            print(f"{name}: complete for this commit; --again runs it again")
        elif why := start_section(name, section, options):
            failed.append(name)
            print(f"{name}: {why}", file=sys.stderr)
    if failed:
        print(f"not complete, or something does not hold: {', '.join(failed)}", file=sys.stderr)
    sys.exit(bool(failed))


def parse() -> argparse.Namespace:
    """Read the command line; exit code 2 if it cannot be carried out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the sections, and what each needs")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SECTIONS), metavar="SECTION,...")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=("full", "tiny"), help="default: full on a GPU, tiny on a CPU")
    parser.add_argument("--out", type=Path, help="folder of the result files")
    parser.add_argument("--again", action="store_true", help="also what is complete")
    parser.add_argument("--commit", help="the commit that is run, where there is no git")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        for name, section in SECTIONS.items():
            needs = f"; needs CUDA: {section.cuda}" if section.cuda else ""
            print(f"{name:12} {section.title}, at most {section.limit_s / 60:.0f} minutes{needs}")
        sys.exit()
    if odd := [name for name in options.only if name not in SECTIONS]:
        parser.error(f"--only must be of {', '.join(SECTIONS)}, got {', '.join(odd)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "this process cannot use CUDA: run it on a machine with a GPU, or try the script with --device cpu"
        )
    head, changed = commit_of()
    if options.device == "cuda" and not options.commit and (changed or not head):
        parser.error("figures belong to a commit: commit the changes in this checkout first, or name it by --commit")
    options.commit = options.commit or head or "unknown"
    options.size = options.size or ("full" if options.device == "cuda" else "tiny")
    of_device = ROOT / "benchmarks" / "results" if options.device == "cuda" else ROOT / "out" / "gpu-on-cpu"
    options.out = options.out or of_device
    return options


def is_complete(path: Path, commit: str) -> bool:
    """Return whether a section was run to its end, at this commit, and everything held."""
    if not path.exists():
        return False
    found = json.loads(path.read_text())
    return found["ended"] == COMPLETE and found["commit"] == commit and not found["failed"]


def start_section(name: str, section: Section, options: argparse.Namespace) -> str:
    """Run a section in a process of its own: an error on a GPU ends all use of it in a process. Return what failed."""
    print(f"{name}: {section.title}", flush=True)
    command = [sys.executable, __file__, *sys.argv[1:], "--section", name, "--commit", options.commit]
    process = subprocess.Popen(command, start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        code = process.wait(section.limit_s)
    except subprocess.TimeoutExpired:
        end_group(process)
        return unfinished(name, options, f"time limit of {section.limit_s:.0f} s")
    except BaseException:  # this process is being ended
        end_group(process)
        raise
    if code in (0, 1):
        return "something does not hold, see above" if code else ""
    return unfinished(name, options, f"ended with {code}")


def unfinished(name: str, options: argparse.Namespace, why: str) -> str:
    """Say in the file of a section that ended early that it did; return why."""
    path = path_of(options.out, options.device, name)
    found = json.loads(path.read_text()) if path.exists() else {"commit": ""}
    if found["commit"] != options.commit:
        return f"{why}; there is no figure"
    figures = found["figures"] | {"not complete": why}
    results = Results(path, found | {"figures": None}, figures, [*found["failed"], "the section"])
    results.write(why)
    return f"{why}; the figures until then are kept"


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a section and everything that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            process.wait(END_S)
            return
        except subprocess.TimeoutExpired:
            continue


def run_section(options: argparse.Namespace) -> int:
    """Run one section in this process; return its exit code."""
    name = options.section
    facts = facts_of(SECTIONS[name].title, options.device, options.commit)
    facts["command"] = f"python benchmarks/gpu.py --only {name}"
    results = Results(path_of(options.out, options.device, name), facts)
    ended = COMPLETE
    try:
        importlib.import_module(f"gpus.{name}").run(Where(options.device, options.size == "tiny"), results)
    except SectionFailed as error:
        ended = str(error)
    except Exception as error:  # an error of one section leaves the others
        traceback.print_exc()
        ended = f"{type(error).__name__}: {error}"
    if ended != COMPLETE:
        results.failed.append("the section")
        print(f"  {ended}", file=sys.stderr)
        results.figures["not complete"] = ended.splitlines()[0]
    results.write(ended)
    return bool(results.failed)


if __name__ == "__main__":
    main()
