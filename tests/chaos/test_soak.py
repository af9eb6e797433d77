"""A long campaign: random plans on real processes. ``make chaos``; HOLDFAST_SOAK_RUNS and HOLDFAST_SOAK_SEED choose.

Each run draws a model, an optimizer, a strategy that promises the bits, the number of workers, and one to three deaths:
planned ones (any phase, also at once, also during recovery) or real-time ones (--mtbf). The judge is one hash.
"""

import functools
import os
import random

import pytest
import reference
from jobs import run_report

from holdfast.faults.plan import FaultPlan

pytestmark = [pytest.mark.chaos, pytest.mark.soak]

RUNS = int(os.environ.get("HOLDFAST_SOAK_RUNS", "100"))
FIRST_SEED = int(os.environ.get("HOLDFAST_SOAK_SEED", "1000"))
SCRIPT = os.path.join(os.path.dirname(__file__), "..", "support", "train_reference.py")
NUM_BUCKETS = 3
reference_hash = functools.cache(reference.train)


def draw(seed, folder):
    """Return the case and the options of one run."""
    rng = random.Random(seed)
    case = (rng.choice(reference.MODELS), rng.choice(reference.OPTIMIZERS))
    workers = rng.choice([3, 4, 4, 5])
    options = ["-n", workers]
    if rng.random() < 0.3:
        options += [
            "--strategy",
            "restart",
            "--checkpoint-dir",
            folder / "ckpt",
            "--checkpoint-every",
            rng.choice([2, 5]),
        ]
    if rng.random() < 0.2:
        return case, [*options, "--mtbf", rng.choice([0.03, 0.1]), "--seed", reference.SEED]
    plan = FaultPlan.random(seed, workers, reference.STEPS, rng.randint(1, min(3, workers - 1)), NUM_BUCKETS)
    return case, options + [word for spec in plan.to_specs() for word in ("--inject", spec)]


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + RUNS))
def test_random_deaths_change_no_bit(seed, tmp_path):
    case, options = draw(seed, tmp_path)
    print(f"seed {seed}: {case} {' '.join(map(str, options))}")

    report = run_report(tmp_path, *options, SCRIPT, *case, timeout=150)

    print(
        f"SOAK seed={seed} lost={len(report['failures'])} restarts={report['restarts']} "
        f"recover_ms={[round(1e3 * f['recover_s']) for f in report['failures'] if f['recover_s'] is not None]}"
    )
    assert report["replicas"]["state_sha256"] == reference_hash(*case)
    assert report["replicas"]["identical"] is True
    assert report["samples"] == {"planned": 406, "committed": 406, "lost": 0, "repeated": 0}
