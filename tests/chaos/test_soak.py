"""Random plans, judged by one hash: some in every run of the tests, a long campaign with ``make chaos``; see ``soak.py``.

HOLDFAST_SOAK_RUNS and HOLDFAST_SOAK_SEED choose the campaign.
"""

import os
import time

import pytest
import soak

pytestmark = pytest.mark.chaos

RUNS = int(os.environ.get("HOLDFAST_SOAK_RUNS", "300"))
FIRST_SEED = int(os.environ.get("HOLDFAST_SOAK_SEED", "1000"))
SHORT_S = 60


@pytest.mark.parametrize("fabric", ["ulfm", "gloo"])
def test_for_half_a_minute_random_faults_change_no_bit(fabric, tmp_path):
    ends_s, seed = time.monotonic() + SHORT_S / 2, 1

    while time.monotonic() < ends_s:
        folder = tmp_path / str(seed)
        folder.mkdir()
        plan = soak.draw(seed, folder, fabric)
        print(f"seed {seed}: {plan}")
        print(soak.describe(plan, soak.run(plan, folder)))
        seed += 1


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + RUNS))
def test_random_faults_change_no_bit(seed, tmp_path):
    plan = soak.draw(seed, tmp_path)
    print(f"seed {seed}: {plan}")

    report = soak.run(plan, tmp_path)

    print(soak.describe(plan, report))
