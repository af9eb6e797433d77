"""A second job on the machine, which shares the temporary directory and the folder of the first."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import subprocess
import sys
import time
from pathlib import Path

from campaign import jobs
from campaign.attacks.base import End, Found, Kind, Running, moment
from campaign.plan import Attack, Job
from campaign.victims import MARK, Processes

_NUMBERS = itertools.count()


class Twin(Kind):
    """Another job starts while the first one runs, with the same ``TMPDIR``; both must end right."""

    name = "twin"
    takes = frozenset(("temporary",))

    def draw(self, rng: random.Random, job: Job) -> Attack:
        values = {"fabric": rng.choice(("gloo", "ulfm")), "kills": rng.random() < 0.3}
        return Attack(self.name, values=values, **moment(rng))

    def end(self, attack: Attack, job: Job) -> End:
        return End.SURVIVES

    def strike(self, attack: Attack, running: Running) -> bool:
        launch = running.launch
        twin = Job(workers=2, fabric=attack.values["fabric"], pause_ms=20)
        number = next(_NUMBERS)  # a plan may have several
        mark = f"{launch.env[MARK]}-twin-{number}"
        report, output = launch.folder / f"report-twin-{number}", launch.folder / f"twin-{number}.output"
        saved = str(launch.folder / f"saved-twin-{number}")
        words = [sys.executable, "-m", "holdfast", "run", *jobs.options_of(twin, saved), "--report", str(report)]
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*words, *jobs.script_of(twin)],
                env=jobs.clean_env(TMPDIR=str(launch.temporary), **{MARK: mark}),
                cwd=launch.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        processes = Processes([process.pid], launch.temporary, mark)
        try:
            if attack.values["kills"]:
                running.sleep(2.0)
                process.kill()
            code = jobs.wait(process, jobs.deadline_s(twin, ()))
            if code is None:
                raise Found("hang", f"the second job\n{processes.describe()}\n{_tail(output)}")
            _await_the_others(processes, jobs.ENDS_S if code >= 0 else jobs.end_s())
        finally:
            processes.kill()
            process.kill()
            process.wait()
        running.notes.append(f"a second job over {twin.fabric} ended with {code}")
        said = output.read_text(errors="replace")
        if "Traceback (most recent call last)" in said:
            raise Found("traceback", f"the second job: {said[said.index('Traceback') :][:2000]}")
        if code == 0:
            running.others.append((twin, _hash_in(report)))
        elif not attack.values["kills"]:
            raise Found("stopped", f"the second job ended with {code}: {_tail(output)}")
        return True


def _await_the_others(processes: Processes, limit_s: float) -> None:
    """Wait for the processes that a launcher leaves for a moment."""
    ends_s = time.monotonic() + limit_s
    while processes.all():
        if time.monotonic() > ends_s:
            raise Found("left-overs", f"of the second job\n{processes.describe()}")
        time.sleep(0.02)


def _hash_in(report: Path) -> str:
    """The hash of a job that says that it is done, "" if it reported none."""
    with contextlib.suppress(OSError, json.JSONDecodeError):
        return str(json.loads((report / "report.json").read_text())["replicas"]["state_sha256"])
    return ""


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-1500:]


KINDS: tuple[Kind, ...] = (Twin(),)
