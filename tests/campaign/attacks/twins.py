"""A second job on the machine, which shares the temporary directory and the folder of the first."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from campaign import jobs
from campaign.attacks.base import End, Found, Kind, Running, moment
from campaign.plan import Attack, Job
from campaign.victims import MARK, Processes


class Twin(Kind):
    """Another job starts while the first one runs, with the same ``TMPDIR``; both must end right."""

    name = "twin"

    def draw(self, rng: random.Random, job: Job) -> Attack:
        values = {"fabric": rng.choice(("gloo", "ulfm")), "kills": rng.random() < 0.3}
        return Attack(self.name, values=values, **moment(rng))

    def end(self, attack: Attack, job: Job) -> End:
        return End.SURVIVES

    def strike(self, attack: Attack, running: Running) -> bool:
        launch = running.launch
        twin = Job(workers=2, fabric=attack.values["fabric"], pause_ms=20)
        mark = f"{launch.env[MARK]}-twin"
        words = [sys.executable, "-m", "holdfast", "run", *jobs.options_of(twin, str(launch.folder / "saved-twin"))]
        output = launch.folder / "twin.output"
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
            code = process.wait(jobs.deadline_s(twin, ()))
        except subprocess.TimeoutExpired:
            raise Found("hang", f"the second job\n{processes.describe()}\n{_tail(output)}") from None
        finally:
            processes.kill()
            process.kill()
            process.wait()
        running.notes.append(f"a second job over {twin.fabric} ended with {code}")
        if code != 0 and not attack.values["kills"]:
            raise Found("stopped", f"the second job ended with {code}: {_tail(output)}")
        return True


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-1500:]


KINDS: tuple[Kind, ...] = (Twin(),)
