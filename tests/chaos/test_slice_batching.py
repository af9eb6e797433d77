"""Real workers that die while slices go through the model at once: the bits are those of one process that knows nothing of it."""

import pytest
import reference
from exact import SCRIPT, check_nothing_lost, reference_hash
from jobs import assert_landed, run_report

from holdfast.models.slice_batching import TRIALS

pytestmark = pytest.mark.chaos
SLICES = 6


def test_who_dies_while_slices_go_at_once_changes_no_bit(tmp_path):
    faults = ["kill:rank=1,step=5,phase=backward", "kill:rank=0,step=10,phase=forward"]
    inject = [word for fault in faults for word in ("--inject", fault)]

    report = run_report(
        tmp_path, "-n", 3, "--fabric", "gloo", *inject, SCRIPT, reference.ROWS, "adam", "--slices", SLICES, "--compute"
    )

    assert_landed(report, 0, 1)
    check_nothing_lost(report, reference_hash(reference.ROWS, "adam", (), SLICES), [2])
    tried = [event for event in report["_events"] if event["event"] == "SlicesTried"]
    print(f"tried: {[(event['rank'], event['samples'], event['why_not']) for event in tried]}")
    assert {event["rank"] for event in tried} == {0, 1, 2}, "each looks for itself"
    # Whether slices keep their bits is up to the processor, and whether that is faster to the machine.
    same = [event for event in tried if event["why_not"] != "the bits differ"]
    assert all(event["at_once_s"] > 0 and event["one_by_one_s"] > 0 and event["step"] >= TRIALS - 1 for event in same)
