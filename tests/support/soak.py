"""Random plans on real processes: everything that can go wrong, mixed, over both fabrics; each plan is its seed.

    python tests/support/soak.py --seed 17              # one plan again
    python tests/support/soak.py --runs 300             # a campaign, from --seed on
    python tests/support/soak.py --minutes 20

A plan draws a model, an optimizer, a strategy that promises the bits, the fabric, 2 to 8 workers, spares, whether the
dead are replaced, and one to four faults: deaths of several kinds, workers that get stuck, are slow, or are told to
leave; in any phase, also at once, during recovery, while somebody joins, and while a checkpoint is written. The judge is
one hash, and the account of all samples.
"""

import argparse
import functools
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import reference
from jobs import run_report

from holdfast.faults.plan import PHASES, Fault

SCRIPT = Path(__file__).with_name("train_reference.py")
NUM_BUCKETS = 3
LIMIT_S = 170
HANG_S = 2
KINDS = ("kill",) * 5 + ("oom", "segfault", "hang", "hang", "gil", "deadlock", "spin", "slow", "leave")
reference_hash = functools.cache(reference.train)


@dataclass(frozen=True)
class Plan:
    """What one seed stands for."""

    seed: int
    case: tuple[str, str]
    fabric: str
    options: tuple[str, ...]
    pause: float


def draw(seed, folder, fabric=None):
    """Return the plan of a seed."""
    rng = random.Random(seed)
    case = (rng.choice(reference.MODELS), rng.choice(reference.OPTIMIZERS))
    fabric = fabric or rng.choice(("ulfm", "gloo"))
    workers, spares = rng.choice((2, 3, 3, 4, 4, 5, 8)), rng.choice((0, 0, 0, 1, 2))
    respawn = fabric == "gloo" and rng.random() < 0.5
    options = ["-n", workers, "--spares", spares, "--fabric", fabric, "--hang-timeout", HANG_S]
    options += ["--respawn"] if respawn else []
    options += ["--strategy", rng.choice(("rollback", "rollback", "restart"))]
    options += ["--checkpoint-dir", Path(folder) / "checkpoints", "--checkpoint-every", rng.choice((2, 5))]
    for fault in _faults(rng, workers + spares):
        options += ["--inject", fault.to_spec()]
    return Plan(seed, case, fabric, tuple(map(str, options)), pause=0.4 if respawn else 0.0)


def _faults(rng, workers):
    """Yield faults of different workers, one of whom is spared."""
    last = None
    for rank in rng.sample(range(workers), min(rng.randint(1, 4), workers - 1)):
        if last is not None and rng.random() < 0.4:
            # With the one before: in the same phase, in another, or while the others recover from it.
            step, phase = last.step, rng.choice((last.phase, "recovery", rng.choice(PHASES)))
        else:
            step, phase = (
                rng.randrange(reference.STEPS),
                rng.choice([p for p in PHASES if p not in ("recovery", "rejoin")]),
            )
        kind = rng.choice(KINDS)
        bucket = rng.choice((None, *range(NUM_BUCKETS))) if phase == "allreduce" else None
        seconds = rng.choice((0.3, 1.0)) if kind == "slow" else None
        last = Fault(kind, rank, step, phase, bucket, seconds)
        yield last


def run(plan, folder):
    """Run a plan, check everything, and return its report."""
    report = run_report(folder, *plan.options, SCRIPT, *plan.case, "--pause", plan.pause, timeout=LIMIT_S)
    assert report["replicas"]["state_sha256"] == reference_hash(*plan.case), "the run ended with other bits"
    assert report["replicas"]["identical"] is True, "the replicas differ"
    assert report["samples"] == {"planned": 406, "committed": 406, "lost": 0, "repeated": 0}, report["samples"]
    return report


def describe(plan, report):
    """Return a line about a run."""
    events = report["_events"]
    joined = sum(
        len(e.get("joined", ())) for e in events if e["event"] == "Recovered" and e["rank"] == e["survivors"][0]
    )
    fenced = sum(e["event"] == "WorkerFenced" for e in events)
    left = sum(e["event"] == "Left" for e in events)
    return (
        f"SOAK seed={plan.seed} fabric={plan.fabric} lost={len(report['failures'])} joined={joined} left={left} "
        f"fenced={fenced} restarts={report['restarts']}"
    )


def main():
    """Run a campaign and say what came out of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the first plan")
    parser.add_argument("--runs", type=int, help="how many; one, if no time is given")
    parser.add_argument("--minutes", type=float, help="no run is begun after so long")
    parser.add_argument("--fabric", choices=("ulfm", "gloo"))
    options = parser.parse_args()
    runs = options.runs or (1 if options.minutes is None else 1 << 30)
    ends_s = time.monotonic() + 60 * (options.minutes or 1e9)
    done, failed, restarts = 0, [], {"ulfm": [0, 0], "gloo": [0, 0]}
    for seed in range(options.seed, options.seed + runs):
        if time.monotonic() > ends_s:
            break
        with tempfile.TemporaryDirectory() as folder:
            plan = draw(seed, folder, options.fabric)
            print(f"seed {seed}: {' '.join(plan.case)} {' '.join(plan.options)}", flush=True)
            try:
                report = run(plan, folder)
            except Exception as error:
                failed.append(seed)
                print(f"FAILED seed={seed} fabric={plan.fabric}: {str(error)[-3000:]}", flush=True)
                continue
            finally:
                done += 1
            restarts[plan.fabric][0] += 1
            restarts[plan.fabric][1] += report["restarts"] > 0
            print(describe(plan, report), flush=True)
    print(f"{done} plans, {len(failed)} failed: {failed}")
    for fabric, (count, again) in restarts.items():
        print(f"{fabric}: {count} ended right, {again} of them after the launcher had started the job again")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
