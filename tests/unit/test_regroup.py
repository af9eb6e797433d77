"""The sequence by which survivors regroup, and how the ``torch.distributed`` backend goes through it."""

import pytest

from holdfast.engine.regroup import Regrouping
from holdfast.errors import PeerFailed
from holdfast.recovery.messages import Done, Progress
from holdfast.recovery.regroup import RegroupLine

MINE = Progress(7, computed=True)
ONCE = ["revoke", "agree 0", "shrink", "agree 1", "share", "agree 1"]


class Played(Regrouping):
    """A driver, and its communicator, whose agreements and sums go as they are listed; it writes down what is called."""

    def __init__(self, *agreed, shares=(), has_atomic_shrink=False):
        self.has_atomic_shrink = has_atomic_shrink
        self.calls = []
        self._agreed = list(agreed)
        self._shares = list(shares)

    @property
    def _comm(self):
        return self

    def revoke(self):
        self.calls.append("revoke")

    def agree(self, flag):
        self.calls.append(f"agree {flag:d}")
        return flag and (self._agreed.pop(0) if self._agreed else True)

    def _shrink(self):
        self.calls.append("shrink")
        return True

    def _share(self, progress):
        assert progress is MINE
        self.calls.append("share")
        if self._shares and not self._shares.pop(0):
            raise PeerFailed("somebody died")
        return Done()


@pytest.mark.parametrize(
    ("driver", "told", "calls"),
    [
        (Played(), False, ONCE),
        (Played(), True, ONCE[2:]),
        (Played(False), False, [*ONCE[:4], *ONCE[2:]]),
        (Played(True, False), False, [*ONCE, *ONCE[2:]]),
        (Played(shares=[False]), False, [*ONCE[:5], *ONCE]),
        (Played(False, shares=[False]), True, [*ONCE[2:4], *ONCE[2:5], *ONCE]),
        (Played(has_atomic_shrink=True), False, [*ONCE[:3], *ONCE[4:]]),
    ],
    ids=["at once", "told", "the fence", "the confirmation", "the sum", "the fence, then the sum", "no fence"],
)
def test_further_failures_are_gone_through_until_all_know_the_same(driver, told, calls):
    driver._regroup(RegroupLine.SHRINK if told else RegroupLine.REVOKE, MINE)

    assert driver.calls == calls
