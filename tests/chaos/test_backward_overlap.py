"""All-reduces that begin during the backward pass, under real kills: what was begun and not counted changes no bit."""

import re
import subprocess
import sys

import gloo
import pytest
from jobs import ROOT, assert_landed, clean_env, holdfast, run_report
from netns import make_hosts

from holdfast.faults.plan import FaultPlan, parse
from holdfast.records.files import read_run
from holdfast.records.types import WorkerEnded

pytestmark = pytest.mark.chaos

SCRIPT = ROOT / "tests" / "support" / "train_begun.py"
FIRST, BETWEEN = "kill:rank=0,step=3,phase=allreduce", "kill:rank=0,step=3,phase=allreduce,bucket=0"
"""During the first all-reduce of a step; and during the second, when the first is complete and not counted."""
MESSAGES = {"HOLDFAST_SHARED_BYTES": "0"}
SAYS = re.compile(r"says (\d+) (\d+) ([0-9a-f]{64})")


@pytest.fixture(scope="module")
def expected():
    """The hash that one process ends with, by order."""
    found = {}
    for order in ("fold", "tree"):
        env = clean_env(HOLDFAST_ORDER=order)
        done = subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, text=True, timeout=60, check=True)
        ((_, early, found[order]),) = SAYS.findall(done.stdout)
        assert early == "0"
    assert len(set(found.values())) == 2, "the order shows"
    return found


def check(output, state, survivors):
    assert "let go" not in output, "rank 0 was not killed in its backward pass"
    found = {int(rank): (int(early), its) for rank, early, its in SAYS.findall(output)}
    assert sorted(found) == survivors
    for early, its in found.values():
        assert early > 0, "nothing was begun early"
        assert its == state


@pytest.mark.parametrize(
    ("fault", "words"), [(BETWEEN, ()), (FIRST, ("--prepare",))], ids=["between", "first-prepared"]
)
def test_a_worker_that_dies_in_what_it_has_begun_changes_no_bit(tmp_path, expected, fault, words):
    report = run_report(
        tmp_path, "-n", 3, "--fabric", "gloo", "--inject", fault, SCRIPT, "--hold", *words, env=MESSAGES
    )

    assert_landed(report, 0)
    check(report["_stdout"], expected["fold"], [1, 2])


def test_it_is_so_between_hosts(tmp_path, expected):
    hosts = make_hosts(3, net="10.204.0")
    try:
        commands = [[*hosts.inside(place), *gloo.command(SCRIPT, "--hold")] for place in (1, 2, 3)]
        launcher = [*hosts.inside(1), *gloo.launcher(commands, hosts.address(1))]
        env = clean_env(
            HOLDFAST_RUN_DIR=str(tmp_path),
            HOLDFAST_ORDER="tree",
            HOLDFAST_FAULTS=FaultPlan((parse(BETWEEN),)).to_json(),
        )
        done = subprocess.run(launcher, env=env, capture_output=True, text=True, timeout=100, check=False)
    finally:
        hosts.remove()

    ended = {r.rank: r.exit_code for r in read_run(tmp_path) if isinstance(r, WorkerEnded)}
    assert ended == {0: -9, 1: 0, 2: 0}, done.stdout + done.stderr
    check(done.stdout, expected["tree"], [1, 2])


def test_an_exception_of_the_script_ends_the_job_although_all_reduces_have_begun():
    done = holdfast("run", "-n", 2, "--fabric", "gloo", SCRIPT, "--raise", timeout=60, env=MESSAGES)

    assert done.returncode not in (0, -9)
    assert "ValueError: the script has a bug" in done.stdout + done.stderr
