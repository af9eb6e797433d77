"""Random plans, judged by one hash: a few in every run of the tests, a long campaign with ``make chaos``; see ``soak.py``.

HOLDFAST_SOAK_RUNS and HOLDFAST_SOAK_SEED choose the campaign.
"""

import os

import pytest
import soak

pytestmark = pytest.mark.chaos

RUNS = int(os.environ.get("HOLDFAST_SOAK_RUNS", "300"))
FIRST_SEED = int(os.environ.get("HOLDFAST_SOAK_SEED", "1000"))
FEW = (1, 3, 7)
"""Between them, on three to five workers: two and three deaths, a stuck worker, one that leaves, spares, newcomers."""


def check(seed, folder, fabric=None):
    plan = soak.draw(seed, folder, fabric)
    print(f"seed {seed}: {plan}")
    print(soak.describe(plan, soak.run(plan, folder)))


@pytest.mark.parametrize("fabric", ["ulfm", "gloo"])
@pytest.mark.parametrize("seed", FEW)
def test_a_few_random_plans_change_no_bit(seed, fabric, tmp_path):
    check(seed, tmp_path, fabric)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + RUNS))
def test_random_faults_change_no_bit(seed, tmp_path):
    check(seed, tmp_path)
