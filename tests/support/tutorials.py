"""Execute the tutorials: save their scripts, run their console blocks, compare what these print with the page.

``python tests/support/tutorials.py docs/tutorials/*.md`` writes what the commands print into the pages.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(
    r"^```(?:\{code-block\} )?(?P<language>\w+)\n(?::caption: (?P<caption>[^\n]+)\n\n)?(?P<text>.*?)^```$", re.M | re.S
)
LIMIT_S = 240

# What differs from run to run, or from one kind of CPU to another: times, speeds, hashes, losses and accuracies.
VARIES = [
    (re.compile(r"^goodput .*$", re.M), ""),  # which causes took how long
    (re.compile(r"'(\w+_runtime|\w+_per_second)': '[^']*'"), "SPEED"),
    (re.compile(r"\b[0-9a-f]{12,64}\b"), "HASH"),
    (re.compile(r"\b\d+(\.\d+)? (s|ms|min)\b"), "TIME"),
    (re.compile(r"\b\d+\.\d{2,}\b"), "NUMBER"),
]


@dataclass(frozen=True)
class Command:
    """A command of a console block, and what the page says that it prints."""

    line: str
    printed: str


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; ``caption`` is the file of a script, or the node that a command runs on."""

    language: str
    caption: str
    text: str

    def commands(self) -> list[Command]:
        """Return the commands of a console block."""
        parts = re.split(r"^\$ ", self.text, flags=re.M)[1:]
        return [Command(*part.split("\n", 1)) for part in parts]


def blocks_of(page: str) -> list[Block]:
    """Return the scripts and console blocks of a page, in order."""
    found = [Block(m["language"], m["caption"] or "", m["text"]) for m in FENCE.finditer(page)]
    return [block for block in found if block.language == "console" or (block.language == "python" and block.caption)]


def start(line: str, folder: Path) -> subprocess.Popen[str]:
    """Start a command in ``folder`` as a reader would, with stderr among its output as on a terminal.

    A job is started by the module, not by the script of that name, so that a test has torch imported already.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "OMPI_", "PMIX_"))}
    environment = own | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "LC_ALL": "C.UTF-8",
    }
    words = ["bash", "-c", line]
    if line.startswith("holdfast run "):
        words = [sys.executable, "-m", "holdfast", *shlex.split(line)[1:]]
    return subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def outputs(blocks: list[Block], folder: Path) -> list[list[str]]:
    """Run console blocks beside each other, each one's commands in order; return what each command printed."""
    printed: list[list[str]] = [[] for _ in blocks]
    for turn in range(max(len(block.commands()) for block in blocks)):
        running = [
            (place, start(block.commands()[turn].line, folder))
            for place, block in enumerate(blocks)
            if turn < len(block.commands())
        ]
        for place, process in running:
            printed[place].append(process.communicate(timeout=LIMIT_S)[0])
    return printed


def groups_of(blocks: list[Block]) -> list[list[Block]]:
    """Put console blocks of several nodes that follow each other into one group; they run at the same time."""
    groups: list[list[Block]] = []
    for block in blocks:
        last = groups[-1] if groups else []
        beside = block.language == "console" and block.caption.startswith("node")
        if (
            beside
            and last
            and last[0].caption.startswith("node")
            and block.caption not in {one.caption for one in last}
        ):
            last.append(block)
        else:
            groups.append([block])
    return groups


OF_A_BUSY_MACHINE = re.compile(
    r"^(holdfast: (step \d+ of \d+ after|step \d+ after|after) |(holdfast: rank|worker) \d+ (is|was) slow).*\n",
    re.MULTILINE,
)
"""Lines every 30 s, and those about a slow worker."""


def comparable(text: str) -> list[str]:
    """Return the lines of an output without what varies; workers print in any order, so the lines are sorted."""
    text = OF_A_BUSY_MACHINE.sub("", text)
    for pattern, name in VARIES:
        text = pattern.sub(name, text)
    return sorted(line.rstrip() for line in text.splitlines() if line.strip())


def executed(page: str, folder: Path) -> list[tuple[Command, str]]:
    """Execute a page in ``folder``: return each command and what it printed."""
    done = []
    for group in groups_of(blocks_of(page)):
        if group[0].language == "python":
            (folder / group[0].caption).write_text(group[0].text)
            continue
        for block, printed in zip(group, outputs(group, folder), strict=True):
            done += list(zip(block.commands(), printed, strict=True))
    return done


def rewritten(page: str, folder: Path) -> str:
    """Return the page with what its commands print now."""
    for command, printed in executed(page, folder):
        page = page.replace(f"$ {command.line}\n{command.printed}", f"$ {command.line}\n{printed.rstrip()}\n", 1)
    return page


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            Path(name).write_text(rewritten(Path(name).read_text(), Path(folder)))
