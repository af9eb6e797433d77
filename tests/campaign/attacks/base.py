"""What a kind of attack is. One small module for each family; ``attacks/__init__.py`` lists them all.

A kind is drawn, prepares the command that starts the job, and strikes while the job runs. It never knows how the job is
judged: it declares which end of the job is right, and ``judge.py`` compares.
"""

from __future__ import annotations

import contextlib
import enum
import math
import random
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from campaign.plan import Attack, Job
    from campaign.victims import Processes


class End(enum.IntEnum):
    """The worst end of a job that is right, after an attack. A plan allows the worst of its attacks."""

    SURVIVES = 0
    """The job ends with exit code 0 and with the bits of the undisturbed run."""
    MAY_STOP = 1
    """It may also stop, with one clear line; resumed without the attack, it ends with those bits."""
    REFUSES = 2
    """It may also refuse to start, with one clear line, exit code 1 or 2, or 93 after starts in vain; started without the attack, the same."""


class Found(AssertionError):
    """An attack found something wrong by itself: ``kind`` is a class of verdicts of ``judge.py``."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass
class Launch:
    """How a job is going to be started; :meth:`Kind.prepare` may change all of it.

    Args:
        folder: A folder of this plan alone, removed after the judgement.
        words: The command, ``python -m holdfast run ...``; a kind may put another command before it,
            such as ``prlimit --nofile=99``.
        env: Environment of the launcher and of all that it starts.
        options: Options of ``holdfast run`` that are added before the script.
        checkpoints: Folder or URL of checkpoints.
        undo: What to undo after the plan, its resumed run included: mounts, namespaces, servers.
    """

    folder: Path
    words: list[str]
    env: dict[str, str]
    checkpoints: str
    options: list[str] = field(default_factory=list)
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def temporary(self) -> Path:
        """``TMPDIR`` of the job."""
        return self.folder / "t"

    @property
    def report(self) -> Path:
        """The folder of ``--report``."""
        return self.folder / "report"


@dataclass
class Running:
    """A job that runs.

    Args:
        launch: How it was started.
        process: The launcher.
        processes: All processes of this job, and no other.
        began_s: When the launcher was started, on the monotonic clock.
        notes: What attacks did, for the account of the plan.
        others: Other jobs on the machine that ended well, with the hashes of their ends, which are judged, too.
    """

    launch: Launch
    process: subprocess.Popen[bytes]
    processes: Processes
    began_s: float = field(default_factory=time.monotonic)
    notes: list[str] = field(default_factory=list)
    others: list[tuple[Job, str]] = field(default_factory=list)

    def is_over(self) -> bool:
        """Whether the launcher has ended."""
        return self.process.poll() is not None

    def sleep(self, seconds: float) -> bool:
        """Wait; return at once, with False, if the job ends meanwhile."""
        ends_s = time.monotonic() + seconds
        while (left_s := ends_s - time.monotonic()) > 0:
            if self.is_over():
                return False
            time.sleep(min(left_s, 0.005))
        return True

    def commits(self) -> int:
        """The number of steps that the workers have recorded as committed, of all workers together the largest."""
        try:
            paths = list(self.launch.temporary.glob("holdfast-*/records-*.jsonl"))
        except OSError:  # the job has just removed the folder
            return 0
        return max(map(_count, paths), default=0)


def _count(path: Path) -> int:
    try:
        return path.read_bytes().count(b'"StepCommitted"')
    except OSError:  # the job has just ended
        return 0


class Kind:
    """A kind of attack. Subclasses override what they need; one instance is registered in ``attacks/__init__.py``.

    All methods get the attack that was drawn, so that a plan can be run again from its JSON alone: a kind has no state,
    and draws no random numbers but in :meth:`draw`.
    """

    name = ""
    """As in ``Attack.kind``; FAMILY-WHAT, such as "signal" or "net-delay". The summary has a row for each."""

    weight = 1.0
    """How often it is drawn, relative to others."""

    takes: frozenset[str] = frozenset()
    """What of the job it replaces, or what it needs as it is: its nodes, its checkpoints, the loopback that nodes share,
    its ``TMPDIR``.

    Two kinds of two families with something in common are in no plan together."""

    def missing(self) -> str:
        """Why it cannot be done on this machine, "" if it can: not root, no such command. Asked once a campaign."""
        return ""

    def suits(self, job: Job) -> bool:
        """Whether it makes sense for this job; the campaign draws another kind if not."""
        return True

    def draw(self, rng: random.Random, job: Job) -> Attack:
        """Return an attack of this kind on the job; :func:`moment` draws its time."""
        raise NotImplementedError

    def end(self, attack: Attack, job: Job) -> End:
        """The worst end of the job that is right."""
        raise NotImplementedError

    def acts_from_start(self, attack: Attack) -> bool:
        """Whether the job is under attack by how it is started, whatever :meth:`strike` returns."""
        return False

    def codes(self, attack: Attack) -> frozenset[int]:
        """Exit codes of a launcher that the attack itself ends, so that it can say nothing: -9 for SIGKILL."""
        return frozenset()

    def also(self, rng: random.Random, attack: Attack, job: Job) -> tuple[Attack, ...]:
        """Draw what should happen after it, so that it has an effect: damage is found only by a job that resumes."""
        return ()

    def adjust(self, attack: Attack, job: Job) -> Job:
        """Return the job as the attack needs it, for example with checkpoints; used when the plan is drawn."""
        return job

    def prepare(self, attack: Attack, launch: Launch) -> None:
        """Prepare the start of the job; what must be undone goes to ``launch.undo``. Not called for the resumed run."""

    def strike(self, attack: Attack, running: Running) -> bool:
        """Attack at the time of the attack; return whether it landed. Runs in a thread of its own.

        An attack that lasts waits with ``running.sleep`` and ends what it did before it returns. It may raise
        :class:`Found`. All else that it raises is an error of the campaign, which then ends.
        """
        return True

    def leaves_files(self, attack: Attack) -> bool:
        """Whether the job cannot remove its temporary files after it."""
        return False

    def fails_script(self, attack: Attack) -> bool:
        """Whether the script's own statements may fail, such as its imports: the job then shows the script's traceback."""
        return False

    def repair(self, attack: Attack, launch: Launch) -> None:
        """Remove the cause before the job is resumed, as an operator would: free the disk, mount it again."""

    def simpler(self, attack: Attack) -> Iterable[Attack]:
        """Simpler attacks of the kind, the simplest first, for the shrinking of a plan; times are rounded elsewhere."""
        return ()


def moment(rng: random.Random, victim: str = "", *, longest_ms: float = 4000, commits: int = 12) -> dict[str, Any]:
    """Draw the time of an attack: ``Attack(kind, victim, **moment(rng, victim))``.

    A third counts from the start of the launcher, log-uniformly from its first millisecond; a third from the first
    millisecond of the victim, if there is one; the rest from a commit.
    """
    since = rng.choice(("start", "exists" if victim else "start", f"commit {rng.randint(1, commits)}"))
    longest_ms = longest_ms if since == "start" else 1500 if since == "exists" else 120
    return {"since": since, "ms": round(math.exp(rng.uniform(0, math.log(longest_ms))), 1)}
