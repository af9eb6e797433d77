"""Runs a plan: starts the job, attacks it, waits for its end, and resumes it if it stopped."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaign import jobs
from campaign.attacks import KINDS
from campaign.attacks.base import Found, Launch, Running
from campaign.attacks.mechanisms import two_nodes
from campaign.attacks.mechanisms.afterwards import afterwards
from campaign.attacks.mechanisms.two_nodes import Second
from campaign.plan import Attack, Job, Plan
from campaign.victims import MARK, Processes
from holdfast.checkpoint import steps, verify
from holdfast.errors import HoldfastError

FOLDERS_OF_TORCH = "torchinductor_"
PROBE_OF_PYTHON = re.compile("[a-z0-9_]{8}")
"""An empty file that ``tempfile`` makes and removes to see where it can write; a process may be killed between."""


@dataclass
class Ended:
    """How a run of ``holdfast run`` ended.

    Args:
        code: Exit code of the launcher, None if it ran past its deadline.
        said: All that launchers and workers printed.
        report: The report, None if there is none.
        events: Its records.
        waits: For a run past its deadline, what each of its processes waits for.
        left: Processes that went on after the launcher's end and had to be killed.
        files: What the run left in its temporary directory and in shared memory.
        took_s: Time to the launcher's end.
        second: The launcher of the second node, None if there is one node.
        launchers: PIDs of all launchers.
    """

    code: int | None
    said: str
    took_s: float
    report: dict[str, Any] | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    waits: str = ""
    left: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    second: Second | None = None
    launchers: list[int] = field(default_factory=list)

    def of_kind(self, name: str) -> list[dict[str, Any]]:
        """The records of one kind."""
        return [event for event in self.events if event["event"] == name]


@dataclass
class Outcome:
    """All that a plan gave; :func:`campaign.judge.judge` says whether it is right.

    Args:
        plan: The plan.
        first: The run that was attacked.
        resumed: The run that went on from its checkpoints, if it had stopped.
        intact: The newest intact checkpoint before that, None if there was none.
        landed: For each attack, whether it landed.
        found: What attacks themselves found wrong.
        notes: What they did.
        others: Other jobs that attacks ran, with the hashes of their ends.
    """

    plan: Plan
    first: Ended
    resumed: Ended | None = None
    intact: int | None = None
    landed: list[bool] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    others: list[tuple[Job, str]] = field(default_factory=list)

    def acted(self) -> tuple[Attack, ...]:
        """The attacks that landed, or to which the job was exposed from its start on."""
        both = zip(self.plan.attacks, self.landed, strict=True)
        return tuple(each for each, landed in both if landed or KINDS[each.kind].acts_from_start(each))

    @property
    def took_s(self) -> float:
        return self.first.took_s + (self.resumed.took_s if self.resumed else 0.0)


def run(plan: Plan, folder: Path) -> Outcome:
    """Run a plan in a folder of its own, which is kept."""
    launch = launch_of(plan, folder)
    with launch.undo:
        for attack in plan.attacks:
            KINDS[attack.kind].prepare(attack, launch)
        outcome = _attacked(plan, launch)
        if outcome.first.code not in (None, 0):
            for attack in plan.attacks:
                KINDS[attack.kind].repair(attack, launch)
            outcome.intact = newest_intact(launch.checkpoints)
            outcome.resumed = _resumed(plan, launch, outcome.first.launchers)
    return outcome


def launch_of(plan: Plan, folder: Path) -> Launch:
    """How the job of a plan is started if nothing attacks it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "t").mkdir(exist_ok=True)
    words = [sys.executable, "-m", "holdfast", "run"]
    env = jobs.clean_env(TMPDIR=str(folder / "t"), **{MARK: str(folder)})
    return Launch(folder, words, env, str(folder / "saved"))


def words_of(plan: Plan, launch: Launch, report: Path, *more: str) -> list[str]:
    """The whole command."""
    options = [*jobs.options_of(plan.job, launch.checkpoints), *launch.options, "--report", str(report), *more]
    return [*launch.words, *options, *jobs.script_of(plan.job)]


def _attacked(plan: Plan, launch: Launch) -> Outcome:
    flips = ("--inject", plan.job.flip) if plan.job.flip else ()
    limit_s = jobs.deadline_s(plan.job, plan.attacks)
    with started(plan, launch, launch.report, *flips) as running:
        threads: list[Striker] = []
        for attack in plan.attacks:
            threads.append(Striker(attack, running, threads[-1] if threads else None))
        for thread in threads:
            thread.start()
        first = end_of(running, launch.report, limit_s, threads)
    if errors := [thread.error for thread in threads if thread.error is not None]:
        raise errors[0]
    found = [thread.found for thread in threads if thread.found is not None]
    landed = [thread.landed for thread in threads]
    return Outcome(plan, first, landed=landed, found=found, notes=running.notes, others=running.others)


def _resumed(plan: Plan, launch: Launch, before: list[int]) -> Ended:
    """Run the job again, which also removes what the launchers ``before`` left."""
    report = launch.folder / "report-resumed"
    with started(plan, launch, report, "--resume") as running:
        ended = end_of(running, report, jobs.deadline_s(plan.job, ()))
    ended.files += left_files(launch.temporary, before)
    return ended


@contextlib.contextmanager
def started(plan: Plan, launch: Launch, report: Path, *more: str) -> Iterator[Running]:
    """Start a job; kill what is left of it at the end."""
    output = launch.folder / f"{report.name}.output"
    (launch.folder / two_nodes.SECOND).unlink(missing_ok=True)
    with output.open("wb") as file:
        process = subprocess.Popen(
            words_of(plan, launch, report, *more),
            env=launch.env,
            cwd=launch.folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = Running(launch, process, Processes([process.pid], launch.temporary, launch.env[MARK]))
    try:
        yield running
    finally:
        running.processes.kill()
        process.kill()
        process.wait()


def end_of(running: Running, report: Path, limit_s: float, strikers: Sequence[threading.Thread] = ()) -> Ended:
    """Wait for the end of a run, of its attacks and of all its processes, and look at what it left."""
    code, waits = jobs.wait(running.process, limit_s), ""
    if code is None:
        waits = running.processes.describe()
        running.processes.kill()
        running.process.wait()
    took_s = time.monotonic() - running.began_s
    for striker in strikers:
        striker.join()
    second = two_nodes.read_second(running.launch.folder)
    is_alone = second is None and code is not None and code >= 0
    ends_s = time.monotonic() + (jobs.ENDS_S if is_alone else jobs.end_s())
    while code is not None and (left := running.processes.all()) and time.monotonic() < ends_s:
        time.sleep(0.02)
    left = running.processes.all() if code is not None else []
    waits = waits or (running.processes.describe() if left else "")
    running.processes.kill()
    second = two_nodes.read_second(running.launch.folder)
    launchers = [*running.processes.launchers, *([second.pid] if second else [])]
    ended = Ended(code, _said(running, report), took_s, waits=waits, left=waits.splitlines() if left else [])
    with contextlib.suppress(OSError, json.JSONDecodeError):
        ended.events = [json.loads(line) for line in (report / "events.jsonl").read_text().splitlines()]
    with contextlib.suppress(OSError, json.JSONDecodeError):
        ended.report = json.loads((report / "report.json").read_text())
    ended.second, ended.launchers = second, launchers
    ended.files = left_files(running.launch.temporary, launchers)
    return ended


def _said(running: Running, report: Path) -> str:
    paths = [running.launch.folder / f"{report.name}.output", *sorted(report.glob("*.log"))]
    return "\n".join(path.read_text(errors="replace") for path in paths if path.exists())


def left_files(temporary: Path, launchers: list[int]) -> list[str]:
    """What a job has left in its temporary directory and in shared memory."""
    mine = tuple(f"holdfast-{pid}-" for pid in launchers)
    others = ("holdfast-", FOLDERS_OF_TORCH)  # of other jobs, and what torch keeps for the next process
    found = [path for path in temporary.iterdir() if path.name.startswith(mine) or not path.name.startswith(others)]
    found = [path for path in found if not (PROBE_OF_PYTHON.fullmatch(path.name) and is_empty(path))]
    files = [*found, *(path for start in mine for path in Path("/dev/shm").glob(f"{start}*"))]
    return sorted(map(str, files))


def is_empty(path: Path) -> bool:
    """Whether a path is a file of no bytes."""
    return path.is_file() and path.stat().st_size == 0


def newest_intact(checkpoints: str) -> int | None:
    """The newest complete checkpoint of which every byte is right, None if there is none."""
    for step in sorted(steps(checkpoints), reverse=True):
        with contextlib.suppress(HoldfastError):
            verify(checkpoints, step)
            return step
    return None


class Striker(threading.Thread):
    """Waits for the time of an attack, and attacks; ``before`` is the striker of the attack before it in the plan."""

    def __init__(self, attack: Attack, running: Running, before: Striker | None = None) -> None:
        super().__init__(name=str(attack), daemon=True)
        self.attack, self.running, self.before = attack, running, before
        self.landed = False
        self.found: Found | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            if self._wait():
                self.landed = KINDS[self.attack.kind].strike(self.attack, self.running)
        except Found as found:
            self.found, self.landed = found, True
        except BaseException as error:  # raised again by the thread that runs the plan
            self.error = error

    def _wait(self) -> bool:
        """Wait until it is time; return False if the job has ended before."""
        attack, running = self.attack, self.running
        word, _, count = attack.since.partition(" ")
        if word == "exists" and running.processes.wait_for(attack.victim, running) is None:
            return False
        while word == "commit" and running.commits() < int(count):
            if not running.sleep(0.01):
                return False
        while word == "landed" and self.before is not None and self.before.is_alive():
            if not running.sleep(0.01):
                return False
        since_s = running.began_s if word == "start" else time.monotonic()
        return running.sleep(max(0.0, since_s + attack.ms / 1000 - time.monotonic()))


KILL = """
for _ in $(seq 60); do
    found=$(grep -lsazF "MARK=$1" /proc/[0-9]*/environ)
    for path in $found; do pid=${path#/proc/}; kill -KILL "${pid%/environ}"; done
    [ -e "$1/kept" ] || rm -rf "$1"
    [ -z "$found" ] && { [ -e "$1/kept" ] || ! [ -e "$1" ]; } && exit
    sleep 0.1
done
"""
KEPT = "kept"
"""A file with which a folder stays."""


def ended_afterwards(folder: Path) -> contextlib.AbstractContextManager[None]:
    """After the block, or if this process is killed: end the jobs whose mark is a folder, and remove the folder."""
    return afterwards(KILL.replace("MARK", MARK), folder)


def name_of_code(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "past its deadline"
    return signal.Signals(-code).name if code < 0 else f"exit {code}"
