"""How a process waits for memory that other processes write: it reacts soon in a short wait, and sleeps most of a long one."""

from types import SimpleNamespace

import pytest

from holdfast.comm import waiting
from holdfast.comm.waiting import AMONG_FEW, AMONG_MANY, wait_until


class Clock:
    """Sleeps take as long as they are asked to."""

    def __init__(self, monkeypatch):
        self.now_s = 0.0
        self.naps = []
        self.looks_s = []
        monkeypatch.setattr(
            waiting, "time", SimpleNamespace(sleep=self.sleep)
        )  # not the module: other threads sleep, too

    def sleep(self, seconds):
        self.now_s += seconds
        self.naps.append((self.now_s, seconds))

    def wait(self, seconds, patience):
        wait_until(lambda: self.now_s >= seconds, lambda: self.looks_s.append(self.now_s), patience)


@pytest.mark.parametrize("patience", [AMONG_FEW, AMONG_MANY])
def test_a_long_wait_is_mostly_sleep_and_late_by_a_64th_at_most(monkeypatch, patience):
    clock = Clock(monkeypatch)

    clock.wait(10.0, patience)

    assert len([end_s for end_s, _ in clock.naps if end_s > 5.0]) <= 5.0 / 2e-3 + 1
    assert all(nap_s <= max(patience.longest_nap_s, end_s / 64) for end_s, nap_s in clock.naps)
    assert all(later - earlier < 2.5e-3 for earlier, later in zip(clock.looks_s, clock.looks_s[1:], strict=False))


@pytest.mark.parametrize("patience", [AMONG_FEW, AMONG_MANY])
def test_a_short_wait_has_short_sleeps(monkeypatch, patience):
    clock = Clock(monkeypatch)

    clock.wait(1e-3, patience)

    assert max(nap_s for _, nap_s in clock.naps) <= patience.longest_nap_s
