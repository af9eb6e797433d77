"""Strikes at a job during its start: ``python tests/support/start_strikes.py [--seed S] [--plans N]``.

A seed determines a plan: fabric, spares, the target (a worker, a watcher, mpirun, the fork server, the launcher), the
signal, and the time. The job must end within the start timeout and a minute, with the bits of the undisturbed run or
with one line that gives the reason. It must leave nothing behind: no process, nothing in ``TMPDIR`` and in ``/dev/shm``.
"""

import argparse
import functools
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import reference
from jobs import ROOT, clean_env

from holdfast.launch.supervise.processes import Process, WatchedWorker, children_of, name_of, value_of

SCRIPT = Path(__file__).with_name("train_slow_start.py")
WORKERS = 3
START_S, HANG_S = 8.0, 4.0
LIMIT_S = START_S + 60.0
DEADLINE_S = 120.0
TARGETS = ("worker",) * 4 + ("watcher",) * 2 + ("mpirun",) * 2 + ("fork server",) * 2 + ("launcher",)
SIGNALS = (signal.SIGKILL,) * 3 + (signal.SIGSTOP,) * 3 + (signal.SIGTERM, signal.SIGINT, signal.SIGSEGV, signal.SIGHUP)
reference_hash = functools.cache(reference.train)


@dataclass(frozen=True)
class Plan:
    """The plan of one seed: ``after_s`` counts from when the target exists."""

    seed: int
    fabric: str
    target: str
    rank: int
    number: signal.Signals
    after_s: float
    prepare_s: float
    spares: int

    @classmethod
    def of(cls, seed):
        rng = random.Random(seed)
        fabric = rng.choice(("ulfm", "ulfm", "gloo"))
        target = rng.choice([target for target in TARGETS if fabric == "ulfm" or target != "mpirun"])
        return cls(
            seed,
            fabric,
            target,
            rng.randrange(WORKERS),
            rng.choice(SIGNALS),
            rng.choice((0.0, rng.uniform(0, 0.3), rng.uniform(0, 2.5))),
            rng.choice((0.0, rng.uniform(0, 1.5))),
            rng.choice((0, 0, 1)),
        )

    def __str__(self):
        whom = self.target if self.target in ("mpirun", "launcher", "fork server") else f"{self.target} {self.rank}"
        return f"seed {self.seed}: {self.fabric}, {self.number.name} to {whom} after {self.after_s:.2f} s, {self.spares} spares"


def processes_in(temporary):
    """IDs of all processes of a job, recognised by their folder."""
    mark, found = f"TMPDIR={temporary}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def files_in(temporary):
    """The content of a temporary directory, without torch's own folder."""
    return [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]


def rank_of(pid):
    """The rank that the launcher or mpirun gave to a process, None if it has none."""
    try:
        variables = dict(v.partition(b"=")[::2] for v in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return None
    word = variables.get(b"HOLDFAST_RANK") or variables.get(b"OMPI_COMM_WORLD_RANK")
    return None if word is None else int(word)


def find(plan, launcher):
    """The process to strike, None if it does not exist yet."""
    if plan.target == "launcher":
        return Process.of(launcher)
    below = children_of(launcher)
    mpiruns = [pid for pid in below if name_of(pid) in ("mpirun", "prterun")]
    if plan.target == "mpirun":
        return Process.of(mpiruns[0]) if mpiruns else None
    if plan.target == "fork server":
        return next(
            (Process.of(pid) for pid in below if b"holdfast.launch.supervise.fork_server" in words_of(pid)), None
        )
    starter = starter_of(launcher, plan.fabric, plan.rank)
    return None if starter is None else watched(launcher, starter, plan)


def starter_of(launcher, fabric, rank):
    """The process that mpirun or the launcher started for a rank, None if it does not exist yet."""
    below = children_of(launcher)
    if fabric == "ulfm":
        below = [pid for mpirun in below if name_of(mpirun) in ("mpirun", "prterun") for pid in children_of(mpirun)]
    return next((pid for pid in below if rank_of(pid) == rank), None)


def watched(launcher, starter, plan):
    """The watcher or worker of a starter; the starter itself is the watcher without a fork server, or not yet replaced."""
    for path in Path(value_of(launcher, "TMPDIR") or "/tmp").glob(f"holdfast-*/process-{plan.rank}"):
        if (pair := WatchedWorker.read(path)) is not None:
            return pair.watcher if plan.target == "watcher" else pair.worker
    return Process.of(starter) if plan.target == "watcher" else None


def words_of(pid):
    """The command line of a process, nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


class StartingJob:
    """A job that is being started."""

    def __init__(self, folder, fabric, *options, script=(), workers=WORKERS):
        self.folder = folder
        self.report = folder / "report"
        self.temporary = folder / "t"
        self.temporary.mkdir(exist_ok=True)
        words = ("run", "-n", workers, "--fabric", fabric, "--no-page", "--report", self.report)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", *map(str, (*words, *options, SCRIPT, *script))],
            env=clean_env(TMPDIR=str(self.temporary)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )
        self.plan = Plan(0, fabric, "worker", 1, signal.SIGKILL, 0.0, 0.0, 0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def until(self, is_so):
        ends_s = time.monotonic() + DEADLINE_S
        while not (found := is_so()):
            assert time.monotonic() < ends_s
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.005)
        return found

    def end(self):
        """Its records, once it has ended and nothing of it is left."""
        self.said, _ = self.process.communicate(timeout=DEADLINE_S)
        assert processes_in(self.temporary) == []
        assert files_in(self.temporary) == []
        assert list(Path("/dev/shm").glob(f"holdfast-{self.process.pid}-*")) == []
        return [json.loads(line) for line in (self.report / "events.jsonl").read_text().splitlines()]

    def check_bits(self):
        report = json.loads((self.report / "report.json").read_text())
        assert self.process.returncode == 0
        assert report["replicas"]["state_sha256"] == reference.train("mlp", "sgd")
        return report


def strike(plan, job, ends_s):
    """Send the signal at its time; return whether it was delivered."""
    while (process := find(plan, job.pid)) is None:
        if job.poll() is not None or time.monotonic() > ends_s:
            return False
        time.sleep(0.002)
    time.sleep(plan.after_s)
    landed = process.send(plan.number)
    if plan.target == "launcher" and plan.number == signal.SIGSTOP:
        time.sleep(3.0)  # nothing monitors the launcher of a single node: it continues on SIGCONT
        process.send(signal.SIGCONT)
    return landed


def left_over(temporary, launcher, deadline_s):
    """Everything left of a job after a while; a launcher that was killed leaves its folders to the next one."""
    ends_s = time.monotonic() + deadline_s
    while (left := processes_in(temporary)) and time.monotonic() < ends_s:
        time.sleep(0.05)
    sweep = "from holdfast.launch.run_paths import RunPaths; RunPaths.make(None).clear()"
    subprocess.run([sys.executable, "-c", sweep], env=clean_env(TMPDIR=str(temporary)), check=True, timeout=60)
    folders = [*files_in(temporary), *Path("/dev/shm").glob(f"holdfast-{launcher}-*")]
    return [*left, *map(str, folders)]


def run(plan):
    """Run a plan; return the result in one line.

    Raises:
        AssertionError: if it hung, ended wrongly or left something behind.
    """
    folder = Path(tempfile.mkdtemp(prefix="start-strikes-"))
    temporary = folder / "t"
    temporary.mkdir()
    words = ["run", "-n", WORKERS, "--fabric", plan.fabric, "--spares", plan.spares, "--slices", reference.SLICES]
    words += ["--start-timeout", START_S, "--hang-timeout", HANG_S, "--grace", 10, "--no-page", SCRIPT]
    words += ["--prepare", plan.prepare_s]
    began_s = time.monotonic()
    job = subprocess.Popen(
        [sys.executable, "-m", "holdfast", *map(str, words)],
        env=clean_env(TMPDIR=str(temporary)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
    )
    try:
        landed = strike(plan, job, began_s + LIMIT_S)
        struck_s = time.monotonic()
        said, _ = job.communicate(timeout=LIMIT_S)
        took_s = time.monotonic() - struck_s
    except subprocess.TimeoutExpired:
        for pid in processes_in(temporary):
            if (process := Process.of(pid)) is not None:
                process.send(signal.SIGKILL)
        said, _ = job.communicate()
        raise AssertionError(f"{plan}: hung\n{said}") from None
    left = left_over(temporary, job.pid, LIMIT_S)
    assert not left, f"{plan}: left {left}\n{said}"
    if job.returncode == 0:
        assert f"state {reference_hash('mlp', 'sgd')}" in said, f"{plan}: other bits\n{said}"
    elif not (plan.target == "launcher" and job.returncode == -plan.number):
        why = [line for line in said.splitlines() if line.startswith(("error: ", "holdfast: stopped", "stopped"))]
        assert job.returncode in (1, 4), f"{plan}: exit {job.returncode}\n{said}"
        assert len(why) == 1, f"{plan}: {len(why)} lines give a reason\n{said}"
        assert "Traceback" not in said, f"{plan}\n{said}"
    shutil.rmtree(folder)
    last = said.splitlines()[-1] if job.returncode and said else "the undisturbed bits"
    return f"{plan}, {'landed' if landed else 'not there'}: exit {job.returncode} after {took_s:.1f} s: {last}"


def main():
    """Run plans one after another; stop at the first one that fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plans", type=int, default=60)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    failed = 0
    for seed in range(options.seed, options.seed + options.plans):
        try:
            print(run(Plan.of(seed)), flush=True)
        except AssertionError as error:
            failed += 1
            print(f"FAILED {error}", flush=True)
    print(f"{options.plans - failed} passed, {failed} failed", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    main()
