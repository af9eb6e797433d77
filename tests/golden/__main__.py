"""The golden record: what works today, fixed, so that a redesign can be judged against it.

    python tests/golden record --tree PATH --out F.json [--only runs,traces] [--work DIR]
    python tests/golden compare A.json B.json          # a line for each difference; exit code 1 if there is any
    python tests/golden judge --base PATH|REVISION     # record both trees on this machine, compare, and swap their files
    python tests/golden check                          # record this tree, compare with the record that is kept
    python tests/golden trace SEED --tree PATH         # every event and order of one seed
    python tests/golden files CORPUS --tree PATH       # how a tree reads files that another one wrote

Only public doors of the tree are used: the command line, public names, and files that runs write. The few others stand in doors.py.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import explored
import files
import runs
import simulated
import surface
import traces
from comparing import differences
from tree import ROOT, Tree

KEPT = Path(__file__).with_name("record.json")
SECTIONS = {
    "runs": runs.record,
    "files": files.record,
    "surface": surface.record,  # its schemas are those of the runs before
    "traces": traces.record,
    "explored": explored.record,
    "simulated": simulated.record,
}
OF_THIS_MACHINE = ("runs", "files")
"""Sections with bits that another torch, or another CPU, may compute otherwise."""


def record(tree, work, only=tuple(SECTIONS)):
    """Return the record of a tree; what its jobs write stays in ``work``."""
    made = {"platform": platform(tree)}
    for name in (name for name in SECTIONS if name in only):
        began_s = time.monotonic()
        made[name] = SECTIONS[name](tree, work)
        print(f"{tree.path}: {name}, {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    return json.loads(json.dumps(made))


def platform(tree):
    """What decides bits on this machine, as Holdfast itself says."""
    return tree.script("traced.py", "platform")


def say(lines):
    """Print differences; return the exit code."""
    lines = list(lines)
    print("\n".join(lines) if lines else "no difference")
    return int(bool(lines))


def compare(old, new):
    """Yield the differences of two records that are of the same machine."""
    sections = [name for name in old if name in new]
    for name in sorted(old.keys() ^ new.keys()):
        print(f"not compared, for only one of the two has it: {name}")
    yield from differences({name: old[name] for name in sections}, {name: new[name] for name in sections})


def check(new, kept):
    """Yield the differences from the record that is kept, in what this machine can repeat."""
    here, there = new.pop("platform"), kept.pop("platform")
    if here != there:
        print(
            f"not compared, for they were recorded on another machine: {', '.join(OF_THIS_MACHINE)}; use BASE=<revision>"
        )
        for name in OF_THIS_MACHINE:
            new.pop(name, None)
        traces.drop_bits(new.get("traces", {}))
        traces.drop_bits(kept["traces"])
    yield from compare(kept, new)


def judge(base, new, work, only):
    """Yield all differences of two trees: of their records, of their runs, and of what each reads of the other's files."""
    trees = {"base": base, "new": new}
    made = {name: record(tree, _folder(work, name), only) for name, tree in trees.items()}
    for name, one in made.items():
        (work / f"{name}.json").write_text(json.dumps(one, indent=1))
    yield from compare(made["base"], made["new"])
    if "runs" in only:
        yield from runs.judge(new, work / "base", work / "new")
    if "files" in only:
        for reader, writer in (("new", "base"), ("base", "new")):
            found = json.loads(
                json.dumps(files.read(trees[reader], work / writer, work / f"{writer}-read-by-{reader}"))
            )
            yield from differences(made[writer]["files"], found, f"{writer}'s files, read by {reader}")


def _folder(work, name):
    (work / name).mkdir(parents=True)
    return work / name


@contextlib.contextmanager
def checkout(base):
    """Give a tree: a folder, or a revision in a worktree that goes again."""
    if Path(base).is_dir():
        yield Tree(Path(base).resolve())
        return
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        path = Path(folder) / "tree"
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "--quiet", "--detach", str(path), base], check=True)
        try:
            yield Tree(path)
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(path)], check=True)


@contextlib.contextmanager
def workplace(given):
    """Give the folder that was asked for, which stays, or one that goes again."""
    if given is None:
        with tempfile.TemporaryDirectory(prefix="golden-") as folder:
            yield Path(folder)
    else:
        given.mkdir(parents=True)
        yield given.resolve()


def _read(path):
    return json.loads(Path(path).read_text())


def main():
    """Do what is asked; exit code 1 if there is a difference."""
    options = parse()
    only = tuple(options.only.split(",")) if getattr(options, "only", "") else tuple(SECTIONS)
    if odd := set(only) - set(SECTIONS):
        sys.exit(f"--only takes {', '.join(SECTIONS)}, got {', '.join(sorted(odd))}")
    if options.command == "compare":
        return say(compare(_read(options.a), _read(options.b)))
    tree = Tree(options.tree.resolve())
    if options.command == "trace":
        print("\n".join(traces.trace(tree, options.seed)))
        return 0
    with workplace(options.work) as work:
        if options.command == "record":
            options.out.write_text(json.dumps(record(tree, work, only), indent=1) + "\n")
        elif options.command == "files":
            print(json.dumps(files.read(tree, options.corpus.resolve(), work / "read"), indent=1))
        elif options.command == "check":
            return say(check(record(tree, work, only), _read(KEPT)))
        elif options.command == "judge":
            with checkout(options.base) as base:
                return say(judge(base, tree, work, only))
    return 0


def parse():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "judge", "check", "files", "trace"):
        command = commands.add_parser(name)
        command.add_argument("--tree", type=Path, default=ROOT, help="the checkout under test [this one]")
        command.add_argument("--work", type=Path, help="keep what is written in this new folder")
        if name in ("record", "judge", "check"):
            command.add_argument("--only", default="", help=f"some of {','.join(SECTIONS)}")
        for option, kind in {"record": [("--out", Path)], "judge": [("--base", str)], "files": [("corpus", Path)], "trace": [("seed", int)]}.get(name, ()):  # fmt: skip
            command.add_argument(option, type=kind, **({"required": True} if option.startswith("-") else {}))
    command = commands.add_parser("compare")
    command.add_argument("a", type=Path)
    command.add_argument("b", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
