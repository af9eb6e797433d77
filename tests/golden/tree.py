"""The tree under test: every process runs its code, never that of this checkout."""

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_S = 170
SECTION_S = 900
"""For a process that does many things."""
PAIRS = 2
"""Jobs at a time: nothing that is recorded depends on how fast they are."""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Tree:
    """A checkout of the project.

    Args:
        path: Its root.
    """

    path: Path

    def env(self, tmp=None):
        """The environment of its processes: nothing of other jobs, one thread, no colour, lines of one width."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HOLDFAST_", "OMPI_", "PMIX_", "PRTE_"))}
        src = f"{self.path / 'src'}:{self.path / 'tests'}"  # where tests/model is the model checker
        fixed = {"PYTHONPATH": src, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}
        return env | fixed | {"PYTHONDONTWRITEBYTECODE": "1"} | ({"TMPDIR": str(tmp)} if tmp else {})

    def python(self, *words, cwd=None, given="", timeout=SECTION_S, tmp=None):
        """Run Python with the code of this tree."""
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            capture_output=True, text=True, input=given, timeout=timeout, cwd=cwd or self.path, env=self.env(tmp), check=False,
        )  # fmt: skip
        return Done(done.returncode, done.stdout, done.stderr)

    def script(self, name, *words, given=""):
        """Run a script of this folder; return what it prints as JSON."""
        done = self.python(HERE / name, *words, given=given)
        if done.code:
            raise SystemExit(f"{name} of {self.path} failed: exit {done.code}\n{done.err[-3000:]}")
        return json.loads(done.out)

    def holdfast(self, *words, cwd=None, timeout=LIMIT_S, tmp=None):
        """Run the command line."""
        return self.python("-m", "holdfast", *words, cwd=cwd, timeout=timeout, tmp=tmp)

    def each(self, commands, cwd=None):
        """Run many commands of the command line in one process, which imports everything once; such that start no job."""
        lines = json.dumps([[str(word) for word in command] for command in commands])
        done = self.python(HERE / "tree.py", cwd=cwd, given=lines)
        if done.code:
            raise SystemExit(f"the command line of {self.path} failed: exit {done.code}\n{done.err[-3000:]}")
        return [Done(*answer) for answer in json.loads(done.out)]


def in_pairs(work, jobs):
    """Do ``work`` for each job, two at a time; return what came of it by name."""
    with ThreadPoolExecutor(PAIRS) as pool:
        return dict(zip((job.name for job in jobs), pool.map(work, jobs), strict=True))


def _run_here(words):
    sys.argv = ["holdfast", *words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module("holdfast", run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            code = end.code or 0
    return code, out.getvalue(), err.getvalue()


if __name__ == "__main__":
    print(json.dumps([_run_here(words) for words in json.load(sys.stdin)]))
