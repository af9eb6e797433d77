from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import campaigns
import pytest

from holdfast.errors import ConfigError
from holdfast_lab.studies.campaign import run_campaign
from holdfast_lab.studies.campaign_table import read_rows

DEADLINE_S = 90


def table(path: Path) -> list[dict]:
    """The rows, without the time they took and where notes were made."""
    return [{name: value for name, value in row.items() if name not in ("seconds", "notes")} for row in read_rows(path)]


@pytest.fixture
def start():
    """Start a campaign as a leader of processes, and return when it is at it; nobody outlives the test."""
    leaders = []

    def started(kind: str, path: Path, notes: Path, is_at_it) -> subprocess.Popen[bytes]:
        command = [sys.executable, campaigns.__file__, kind, str(path), str(notes)]
        leader = subprocess.Popen(command, start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        leaders.append(leader)
        wait_for(lambda: leader.poll() is not None or is_at_it(), "the campaign does not begin")
        assert leader.poll() is None, f"the campaign has ended before it was killed, with {leader.returncode}"
        return leader

    yield started
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)
        leader.wait(DEADLINE_S)


def made(path: Path) -> int:
    try:
        return len(read_rows(path))
    except ConfigError:  # it is not there yet, or was not begun
        return 0


def wait_for(is_so, what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end_s, what
        time.sleep(0.02)


def workers_of(notes: Path) -> set[int]:
    if not notes.exists():
        return set()
    return {int(line.split()[0]) for line in notes.read_text().splitlines()}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    place = tmp_path_factory.mktemp("undisturbed")
    run_campaign(campaigns.long_one(str(place / "notes")), place / "rows.db", 2)
    rows = table(place / "rows.db")
    assert {row["outcome"] for row in rows} == {"RWC", "AccR", "NaN", "TF"}
    return rows


def test_a_campaign_that_is_killed_again_and_again_gives_the_table_of_the_undisturbed_one(undisturbed, start, tmp_path):
    path, notes = tmp_path / "rows.db", tmp_path / "notes"

    leader = start("long", path, notes, lambda: made(path) >= 8)
    leader.kill()  # the leader alone: the others must end by themselves
    assert leader.wait(DEADLINE_S) == -signal.SIGKILL
    wait_for(lambda: not any(map(is_alive, workers_of(notes))), "workers outlive the leader")
    first = made(path)

    leader = start("long", path, notes, lambda: made(path) >= first + 8)
    stranger = next(pid for pid in workers_of(notes) if is_alive(pid))
    os.kill(stranger, signal.SIGKILL)
    wait_for(lambda: not is_alive(stranger), "a worker outlives SIGKILL")
    there = made(path)
    wait_for(lambda: made(path) > there + 8, "the campaign stands still without that worker")
    os.killpg(leader.pid, signal.SIGKILL)  # everything at once
    assert leader.wait(DEADLINE_S) == -signal.SIGKILL
    second = made(path)
    run_campaign(campaigns.long_one(str(notes)), path, 2)

    assert 8 <= first < second < len(undisturbed)
    assert table(path) == undisturbed


def test_nobody_goes_on_with_a_trial_when_the_leader_is_killed(start, tmp_path):
    notes = tmp_path / "notes"
    leader = start("endless", tmp_path / "rows.db", notes, lambda: len(workers_of(notes)) == 2)

    leader.kill()

    assert leader.wait(DEADLINE_S) == -signal.SIGKILL
    wait_for(lambda: not any(map(is_alive, workers_of(notes))), "workers outlive the leader")
