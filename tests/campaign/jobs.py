"""From a plan's job to the command that runs it, and what its end promises."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

from campaign.plan import Attack, Job
from campaign.victims import MARK

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
SPLIT = ("pipeline", "sharded")
_COMPUTING = threading.Lock()

HANG_S, START_S, GRACE_S, STALL_S, NODE_S = 1.0, 10.0, 8.0, 6.0, 4.0
"""Short limits, so that a plan takes seconds."""
MAX_RESTARTS = 3
IMPORTS_S = 25.0
"""The limit of a start where each worker imports torch itself."""
LONGEST_TIMES = 30.0
"""The longest phase in which a stuck worker holds the others is saving, at so many times the hang timeout."""
ENDS_S = 5.0
"""How long processes of a job may take to end after its launcher, which waits for them itself."""
LOOKS_S = 1.0
CROWDED = 3.0
"""With more processes for each core that want to run, the machine is overloaded; the campaign itself causes two or three."""
BUSY_S = 25.0
"""What a busy machine may take for the start of Python and torch, and for the training itself."""


def options_of(job: Job, checkpoints: str) -> list[str]:
    """Options of ``holdfast run``."""
    words = ["-n", job.workers, "--fabric", job.fabric, "--strategy", job.strategy, "--guard", job.guard, "--no-page"]
    start_s = START_S if job.preload else IMPORTS_S
    words += ["--hang-timeout", HANG_S, "--start-timeout", start_s, "--grace", GRACE_S, "--stall-timeout", STALL_S]
    words += ["--max-restarts", MAX_RESTARTS, "--debug-bundles", "off", "--checkpoint-dir", checkpoints]
    words += ["--order", "fold"] if job.script != "ddp" else []
    words += ["--checkpoint-every", job.every] if job.every else []
    words += ["--spares", job.spares] if job.spares else []
    words += ["--respawn"] if job.respawn else []
    words += [] if job.preload else ["--no-preload"]
    words += ["--reinit-from", "checkpoint"] if job.strategy == "reinit" and job.model in SPLIT else []
    words += ["--mirror-every", 4] if job.strategy == "partial" else []
    return [str(word) for word in words]


def script_of(job: Job) -> list[str]:
    """The script and its arguments."""
    pause = str(job.pause_ms / 1000)
    if job.script == "ddp":
        return [str(Path(__file__).with_name("train_ddp.py")), pause]
    if job.script == "prepared":
        return [str(Path(__file__).with_name("train_prepared.py")), pause]
    if job.model in SPLIT:
        return [str(SUPPORT / "train_split.py"), job.model, "--optimizer", job.optimizer, "--pause", pause]
    return [str(SUPPORT / "train_reference.py"), job.model, job.optimizer, "--pause", pause]


def flipped_rank(job: Job) -> int | None:
    """The rank in which the job's own fault is, None if it has none."""
    found = re.search(r"rank=(\d+)", job.flip)
    return int(found[1]) if found else None


def with_workers(job: Job, workers: int) -> Job:
    """The job with other workers; its own fault is in one of them."""
    rank = flipped_rank(job)
    flip = job.flip if rank is None else job.flip.replace(f"rank={rank}", f"rank={min(rank, workers - 1)}")
    return replace(job, workers=workers, flip=flip)


def is_exact(job: Job, attacks: tuple[Attack, ...]) -> bool:
    """Whether the job promises the bits of the undisturbed run, and every sample once, whatever happens to it."""
    return not attacks or (job.script != "ddp" and job.strategy not in ("forward", "partial"))


def deadline_s(job: Job, attacks: tuple[Attack, ...]) -> float:
    """How long a job may take, from its options: a start for each attempt, the longest limit for each attack."""
    lasts_s = sum(float(each.values.get("lasts_s", each.values.get("thaw_s", 0))) for each in attacks)
    attempts = 1 + min(len(attacks), MAX_RESTARTS)
    stuck_s = LONGEST_TIMES * HANG_S + STALL_S + NODE_S
    start_s = START_S if job.preload else IMPORTS_S
    return attempts * (start_s + BUSY_S) + len(attacks) * stuck_s + 1.5 * GRACE_S + lasts_s


def end_s() -> float:
    """How long workers whose launcher is dead may take to save and end, from the options."""
    return 1.5 * GRACE_S + LONGEST_TIMES * HANG_S + 10.0


def wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Wait for a launcher, and return its exit code; None if the limit is over.

    While more processes want to run than the machine has cores for, time counts less: a job is slow then, and not stuck.
    """
    cores = len(os.sched_getaffinity(0))
    while limit_s > 0:
        began_s = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(LOOKS_S, limit_s))
        limit_s -= (time.monotonic() - began_s) * min(1.0, CROWDED * cores / max(os.getloadavg()[0], 0.01))
    return None


def clean_env(**extra: str) -> dict[str, str]:
    """The environment of a job: one thread a worker, a quick start as in tests, nothing of other jobs."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HOLDFAST_", "OMPI_", "PMIX_", "PRTE_"))}
    path = os.pathsep.join((str(SUPPORT / "quick_start"), str(ROOT / "src")))
    return env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTEST_CURRENT_TEST": "campaign"} | extra


def case_of(job: Job) -> Job:
    """The job of whose end the bits are compared: only what decides them differs from the default."""
    workers = job.workers if job.script == "ddp" else 1
    plain = Job(script=job.script, model=job.model, optimizer=job.optimizer, workers=workers, every=0, pause_ms=0)
    return plain if job.script == "ddp" else replace(plain, fabric="virtual")


def undisturbed(case: Job, cache: Path) -> str:
    """The hash with which an undisturbed job ends; kept in a file of the folder.

    That of a replicated model is computed by the reference, which has no line of Holdfast; that of a split model by one
    worker that has all of its parts.
    """
    with _COMPUTING:
        return _undisturbed(case, cache)


def _undisturbed(case: Job, cache: Path) -> str:
    said = json.dumps([case.script, case.model, case.optimizer, case.workers])
    kept = cache / f"reference-{hashlib.sha256(said.encode()).hexdigest()[:16]}"
    if kept.exists():
        return kept.read_text()
    if case.script == "session" and case.model not in SPLIT:
        code = "import sys, reference; print('state', reference.train(*sys.argv[1:]))"
        env = clean_env() | {"PYTHONPATH": os.pathsep.join((clean_env()["PYTHONPATH"], str(SUPPORT)))}
        words = [sys.executable, "-c", code, case.model, case.optimizer]
        found = hash_in(subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=True).stdout)
    else:
        found = _hash_of_a_run(case)
    cache.mkdir(parents=True, exist_ok=True)
    kept.with_suffix(".draft").write_text(found)
    kept.with_suffix(".draft").replace(kept)
    return found


def _hash_of_a_run(case: Job) -> str:
    from campaign.runner import ended_afterwards  # which imports this module

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ended_afterwards(Path(folder)):
        words = [sys.executable, "-m", "holdfast", "run", *options_of(case, f"{folder}/saved")]
        words += ["--report", f"{folder}/report", *script_of(case)]
        env = clean_env(TMPDIR=folder, **{MARK: folder})
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            msg = f"the undisturbed run ended with exit code {done.returncode}: {done.stderr[-2000:]}"
            raise RuntimeError(msg)
        if case.script == "ddp":
            return hash_in(done.stdout)
        return str(json.loads(Path(folder, "report", "report.json").read_text())["replicas"]["state_sha256"])


def hash_in(said: str) -> str:
    """The hash that a script printed, "" if it printed none; of several, which must be equal, all that differ.

    Of a job that was started again, those of its last start: DDP may have lost another rank there.
    """
    last = said.rpartition(" of the job, on ")[2]
    found = {line.rpartition("state ")[2].split()[0] for line in last.splitlines() if "state " in line}
    return "/".join(sorted(each for each in found if len(each) == 64))
