"""How long a kill interrupts training: real workers that receive SIGKILL, beside torchft, torchrun, torch's ``_reconfigure`` and Ray Train.

    python benchmarks/recovery/kill.py [--kills 6] [--workers 4] [--systems rollback,torchrun] [--seed 0] [--json FILE]

From the SIGKILL to the first commit of a step that was not committed before, in three parts: ``detect``, until the
first survivor detects the failure; ``agree + rebuild``, until the survivors resume; ``redo``, until that commit. All
systems train the digits CNN, 128 samples a step. Their victims die at random ranks at the same four points of a step,
by a SIGKILL to themselves, recorded just before. Steps that a system recomputes (``restart``, torchrun) count as
``redo``.

rollback, forward, restart   Holdfast over Open MPI, one kill a job; ``restart`` with a checkpoint every ten steps
rollback-gloo, ...           the same over Gloo
torchft                      0.2.0 on Gloo, replica groups of one worker, its lighthouse at defaults
torchft-tuned                ``--heartbeat_timeout_ms 500`` and the best of several ``--join_timeout_ms``
torchrun                     plain DDP on Gloo, all workers restarted, torch.save every ten steps
reconfigure                  torch 2.14 or newer on Gloo: ``peers/reconfigure_worker.py`` keeps its processes and
                             reconfigures the group; a parent announces a death at once. Which settings matter was tried
                             there: the timeout of a collective does not, since the error of a dead neighbour runs round
                             the ring
ray                          Ray Train with ``FailureConfig(max_failures=-1)``: its controller restarts all workers, which
                             load the newest checkpoint, of every ten steps. Its workers are looked at every 0.1 s;
                             ``--health-check 2`` is its default

The last two are measured if they are named, in environments of their own (``make bench-peers``).

Peers have several kills a job: the next comes when all workers are back and have trained for a while. torchft keeps
the timeouts of its own example (5 s for Gloo, 30 s for the manager). Its DDP hook had to be repaired, otherwise a kill
in an all-reduce ends every survivor (peers/torchft_worker.py). Its first committed step may have fewer workers than
survive: on Gloo only the failed worker's neighbours detect the failure, and the others join a step or more later
(``workers`` in the JSON). torchrun needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which its second round hangs
(peers/driver.py). Loopback on few cores says nothing about a cluster.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import (
    cells,
    check_names,
    command_line,
    interval,
    listed,
    measure_each,
    ratio,
    spread,
    table,
    told,
    write_json,
)
from peers.driver import CHECKPOINT_EVERY, SCRIPT, TRAINING, Job, Line, Torchft, Torchrun, commits, installed, tuned
from peers.restarters import RayTrain, Reconfigure

PHASES = ("forward", "backward", "allreduce", "optimizer")
STRATEGIES = ("rollback", "forward", "restart")
FABRICS = ("ulfm", "gloo")
HOLDFAST = {
    strategy if fabric == "ulfm" else f"{strategy}-{fabric}": (strategy, fabric)
    for strategy in STRATEGIES
    for fabric in FABRICS
}
SYSTEMS = (*HOLDFAST, "torchft", "torchft-tuned", "torchrun")
NAMED = ("reconfigure", "ray")
"""Systems that are measured only if they are named."""
JOIN_TIMEOUTS_MS = (100, 200, 500, 1000, 2000)
SWEEP_KILLS = 2
"""Kills between all-reduces, and kills in the backward pass, which leave others blocked in an all-reduce."""
STEPS_BETWEEN = 10
"""Steps that a peer trains with all workers before the next kill; up to ten more are added."""

Row = dict[str, Any]


def main() -> None:
    """Kill, measure, print."""
    options = parse()
    os.environ["OMP_NUM_THREADS"] = "1"
    sweep: dict[int, list[Row]] = {}
    rows, failed = measure_each(options.systems, lambda system: measure(system, options, sweep))
    show(options, rows, sweep)
    found = {system: summary(measured) for system, measured in rows.items()}
    write_json(options.json, settings=vars(options), rows=rows, sweep=sweep, summary=found)
    sys.exit(failed)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(
        __doc__, kills=(6, "kills of each system; below about 100 the p99 is the maximum"), workers=4, seed=0
    )
    parser.add_argument("--systems", type=listed(), default=list(SYSTEMS))
    parser.add_argument("--strategy", choices=STRATEGIES, help="only Holdfast, with this strategy")
    parser.add_argument("--fabric", choices=FABRICS, help="only Holdfast, over this fabric")
    parser.add_argument("--health-check", type=float, default=0.1, metavar="SECONDS", help="of Ray Train's controller")
    options = parser.parse_args()
    if options.strategy or options.fabric:
        options.systems = [
            system
            for system, (strategy, fabric) in HOLDFAST.items()
            if options.strategy in (None, strategy) and options.fabric in (None, fabric)
        ]
    check_names(parser, "--systems", options.systems, [*SYSTEMS, *NAMED])
    options.systems = installed(options.systems)
    return options


def measure(system: str, options: argparse.Namespace, sweep: dict[int, list[Row]]) -> list[Row]:
    """Return a row for each kill of the system."""
    faults = draw(options.seed, options.workers, options.kills)
    if system in HOLDFAST:
        return [told(system, kill_once(*HOLDFAST[system], options.workers, fault)) for fault in faults]
    if system == "reconfigure":
        return kill_peer(system, lambda: Reconfigure(options.workers), torchft_times, faults)
    if system == "ray":
        return kill_peer(system, lambda: RayTrain(options.workers, options.health_check), torchrun_times, faults)
    if system == "torchrun":
        return kill_peer(system, lambda: Torchrun(options.workers), torchrun_times, faults)
    if system == "torchft":
        return kill_torchft(system, options.workers, {}, faults)
    few = draw(options.seed, options.workers, SWEEP_KILLS)
    for join_ms in JOIN_TIMEOUTS_MS:
        sweep[join_ms] = kill_torchft(f"{system} {join_ms}", options.workers, tuned(join_ms), few)
    best = min(sweep, key=lambda join_ms: statistics.fmean(row["recover_ms"] for row in sweep[join_ms]))
    return kill_torchft(f"{system} {best}", options.workers, tuned(best), faults)


def draw(seed: int, workers: int, kills: int) -> list[dict[str, Any]]:
    """Return the victims and phases; the same for every system. Each phase occurs equally often."""
    rng = random.Random(seed)
    phases = [PHASES[number % len(PHASES)] for number in range(kills)]
    rng.shuffle(phases)
    return [{"rank": rng.randrange(workers), "step": rng.randrange(20, 60), "phase": phase} for phase in phases]


def as_row(
    fault: dict[str, Any],
    fault_s: float,
    moments_s: tuple[float, float, float],
    step_times_s: Sequence[float],
    **more: Any,
) -> Row:
    """Return the cost of a kill, in milliseconds.

    Args:
        fault: The fault.
        fault_s: When it struck.
        moments_s: When the first survivor detected it, when the survivors resumed, when the next step was committed.
        step_times_s: Undisturbed step times of the survivors.
        more: Further values for the row.
    """
    seen_s, decided_s, resumed_s = moments_s
    step_ms = 1e3 * statistics.median(step_times_s)
    times_ms = {
        "detect_ms": 1e3 * (seen_s - fault_s),
        "agree_rebuild_ms": 1e3 * (decided_s - seen_s),
        "redo_ms": 1e3 * (resumed_s - decided_s),
        "recover_ms": 1e3 * (resumed_s - fault_s),
        "recover_less_step_ms": 1e3 * (resumed_s - fault_s) - step_ms,
        "step_ms": step_ms,
    }
    return fault | {name: round(value, 2) for name, value in times_ms.items()} | more


# ---------------------------------------------------------------------------------------------
# Holdfast


def kill_once(strategy: str, fabric: str, workers: int, fault: dict[str, Any]) -> Row:
    """Run one job with one kill, and return its cost."""
    from holdfast.config import Settings
    from holdfast.faults.plan import Fault, FaultPlan
    from holdfast.launch.job import Job as HoldfastJob
    from holdfast.launch.launcher import launch

    with tempfile.TemporaryDirectory() as folder:
        saving = {"checkpoint_dir": folder, "checkpoint_every": CHECKPOINT_EVERY} if strategy == "restart" else {}
        plan = FaultPlan((Fault("kill", **fault),)).to_json()
        settings = Settings(fabric=fabric, workers=workers, strategy=strategy, faults=plan, **saving)
        outcome = launch(HoldfastJob(script=SCRIPT, args=(*TRAINING, "6"), settings=settings))
    if outcome.exit_code:
        raise RuntimeError(f"holdfast ended with {outcome.exit_code}: {outcome.message}\n{outcome.mpirun_output}")
    return holdfast_times(fault, outcome.records)


def holdfast_times(fault: dict[str, Any], records: Sequence[Any]) -> Row:
    """Return the cost of the kill, from the records of the run."""

    def times_s(kind: str) -> list[float]:
        return [record.t_s for record in records if type(record).__name__ == kind]

    ended = [r.exit_code for r in records if type(r).__name__ == "WorkerEnded" and r.rank == fault["rank"]]
    if ended != [-9]:
        raise RuntimeError(f"the kill {fault} did not land: worker {fault['rank']} ended with {ended}")
    (fault_s,), seen_s, decided_s = times_s("FaultFired"), min(times_s("FailureSeen")), min(times_s("Recovered"))
    done = {r.step: r.t_s for r in reversed(records) if type(r).__name__ == "StepCommitted"}  # the first commit counts
    step = max(step for step, t_s in done.items() if t_s <= decided_s) + 1
    later = [done[number] for number in range(step, min(step + 8, max(done) + 1))]
    workers = next(r.workers for r in records if type(r).__name__ == "StepCommitted" and r.t_s == done[step])
    return as_row(fault, fault_s, (seen_s, decided_s, done[step]), gaps(later), workers=workers)


def gaps(times_s: Sequence[float]) -> list[float]:
    """Return the times between consecutive moments."""
    return [b - a for a, b in itertools.pairwise(times_s)]


# ---------------------------------------------------------------------------------------------
# The peers

Moments = tuple[float, float, float]


def kill_torchft(name: str, workers: int, options: dict[str, int], faults: Sequence[dict[str, Any]]) -> list[Row]:
    """Return a row for each kill, with a lighthouse started with ``options``."""
    return kill_peer(name, lambda: Torchft(workers, options), torchft_times, faults)


def kill_peer(
    name: str,
    make_job: Callable[[], Job],
    find_times: Callable[[list[Line], float, int], Moments | None],
    faults: Sequence[dict[str, Any]],
) -> list[Row]:
    """Return a row for each kill, all in one job."""
    rows = []
    with make_job() as job:
        since_s = 0.0
        for fault in faults:
            wait_until_full(job, since_s, STEPS_BETWEEN + fault["step"] % CHECKPOINT_EVERY)
            rows.append(told(name, kill_in(job, find_times, fault)))
            job.restore()
            since_s = job.diaries.refresh()[-1]["t_s"]
        if job.killed() != len(faults):
            raise RuntimeError(f"{name}: {len(faults)} kills were ordered, {job.killed()} workers ended by SIGKILL")
    return rows


def wait_until_full(job: Job, since_s: float, steps: int) -> None:
    """Wait until all workers have committed ``steps`` steps together."""

    def found(lines: list[Line]) -> bool:
        full = (1 for line in commits(lines) if line["t_s"] > since_s and line["workers"] == job.workers)
        return sum(full) >= steps * job.workers

    job.wait_for("training with all workers", found)


def kill_in(job: Job, find_times: Callable[[list[Line], float, int], Moments | None], fault: dict[str, Any]) -> Row:
    """Order one death and return its cost."""
    victim = job.alive()[fault["rank"]]
    job.order_death(fault["rank"], fault["phase"])
    struck = lambda lines: [line for line in lines if line["event"] == "fault" and line["pid"] == victim]  # noqa: E731
    job.wait_for("fault", lambda lines: bool(struck(lines)))
    (last,) = struck(job.diaries.lines)
    fault_s, found = last["t_s"], lambda lines: find_times(lines, last["t_s"], victim)
    job.wait_for("recovery", lambda lines: found(lines) is not None)
    moments = found(job.diaries.lines)
    assert moments is not None, "it was waited for"
    after = lambda lines: [line for line in commits(lines) if line["t_s"] >= moments[2]]  # noqa: E731
    job.wait_for("steps of the survivors", lambda lines: len(after(lines)) >= 8 * job.workers)
    goers = after(job.diaries.lines)
    times_s = [line["t_s"] for line in goers if line["rank"] == goers[0]["rank"]]
    return as_row(fault | {"step": last["step"]}, fault_s, moments, gaps(times_s), workers=goers[0]["workers"])


def torchft_times(lines: list[Line], fault_s: float, victim: int) -> Moments | None:
    """Return the moments of the recovery, None before its end, at which a new group has committed a step."""
    later = [line for line in lines if line["t_s"] > fault_s and line["pid"] != victim]
    first = {name: next((x["t_s"] for x in later if x["event"] == name), None) for name in ("error", "configure")}
    if first["configure"] is None:
        return None
    resumed_s = next((line["t_s"] for line in commits(later) if line["t_s"] > first["configure"]), None)
    if resumed_s is None:
        return None
    decided_s = max(line["t_s"] for line in later if line["event"] == "configured" and line["t_s"] < resumed_s)
    return min(first["configure"], first["error"] or first["configure"]), decided_s, resumed_s


def torchrun_times(lines: list[Line], fault_s: float, victim: int) -> Moments | None:
    """Return the moments of the recovery, None before its end, at which a later step than before is committed."""
    later = [line for line in lines if line["t_s"] > fault_s and line["pid"] != victim]
    starts = [line for line in later if line["event"] == "start"]
    if not starts:
        return None
    began_s = starts[0]["began_s"]
    top = max(line["step"] for line in commits(lines) if line["t_s"] < began_s)
    resumed_s = next((line["t_s"] for line in commits(later) if line["step"] > top and line["t_s"] > began_s), None)
    if resumed_s is None:
        return None
    seen_s = next((line["t_s"] for line in later if line["event"] == "error"), began_s)
    decided_s = max(line["t_s"] for line in later if line["event"] == "ready" and line["t_s"] < resumed_s)
    return min(seen_s, began_s), decided_s, resumed_s


# ---------------------------------------------------------------------------------------------
# The tables


def summary(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return the spread of each time."""
    return {name: spread([row[name] for row in rows]) for name in rows[0] if name.endswith("_ms")}


def show(options: argparse.Namespace, rows: dict[str, list[Row]], sweep: dict[int, list[Row]]) -> None:
    """Print the tables."""
    what = f"{options.workers} workers on {os.cpu_count()} cores, digits CNN, ms"
    whole = [[system, str(len(found)), *numbers(found), times_rollback(rows, system)] for system, found in rows.items()]
    head = ["SIGKILL to next commit", "kills", "p50", "p90", "p99", "max", "times rollback"]
    print(table(f"From the SIGKILL to the next committed step: {what}", head, whole))
    parts = ("detect_ms", "agree_rebuild_ms", "redo_ms", "step_ms")
    halves = [
        [system, *(cells([row[part] for row in found], 1, keys=["p50"])[0] for part in parts), workers_seen(found)]
        for system, found in rows.items()
    ]
    head = ["", "detect", "agree + rebuild", "redo", "one step", "workers"]
    print("\n" + table("Its parts, medians, ms, and the number of workers in the committed step", head, halves))
    if sweep:
        tried = [[str(ms), str(len(got)), *numbers(got)] for ms, got in sweep.items()]
        head = ["--join_timeout_ms", "kills", "p50", "p90", "p99", "max"]
        print("\n" + table("torchft-tuned: tuning, ms", head, tried))


def workers_seen(rows: Sequence[Row]) -> str:
    """Return the fewest and the most workers of the first step that was committed after a kill."""
    seen = {row["workers"] for row in rows}
    return " to ".join(map(str, sorted({min(seen), max(seen)})))


def numbers(rows: Sequence[Row]) -> list[str]:
    """Return the cells of some kills."""
    return cells([row["recover_ms"] for row in rows], 1, keys=("p50", "p90", "p99", "max"))


def times_rollback(rows: dict[str, list[Row]], system: str) -> str:
    """Return this system's median as a multiple of that of ``rollback``, with a 95 % interval."""
    if "rollback" not in rows or system == "rollback":
        return ""
    ours, theirs = ([row["recover_ms"] for row in rows[name]] for name in ("rollback", system))
    return interval(ratio(theirs, ours), 1)


if __name__ == "__main__":
    main()
