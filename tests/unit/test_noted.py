"""Which scripts this user has run here: what ``holdfast verify`` runs again without being told."""

import os

import pytest

from holdfast.launch import provenance
from holdfast.launch.provenance import is_noted, note

JOB = {"path": "/srv/train.py", "sha256": "ab" * 32, "args": ["--epochs", "3"], "threads": "1"}


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.mark.parametrize(
    "other", [{"path": "/tmp/train.py"}, {"sha256": "cd" * 32}, {"args": ["--epochs", "4"]}], ids=str
)
def test_what_was_run_is_known_again_and_nothing_else(state, other):
    note(JOB)

    assert is_noted(JOB | {"threads": "2"})
    assert not is_noted(JOB | other)


def test_only_this_user_can_read_what_was_noted(state):
    note(JOB)

    folder = state / "holdfast" / "runs"
    assert [path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())] == [0o700, 0o600]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_a_note_of_another_user_does_not_count(state):
    note(JOB)
    (made,) = (state / "holdfast" / "runs").iterdir()

    os.chown(made, 12345, 12345)

    assert not is_noted(JOB)


def test_the_newest_are_kept(state, monkeypatch):
    monkeypatch.setattr(provenance, "_MOST", 2)
    jobs = [JOB | {"args": [str(number)]} for number in range(4)]
    for moment, job in enumerate(jobs):
        note(job)
        os.utime(state / "holdfast" / "runs" / provenance._digest(job), (moment, moment))

    assert [is_noted(job) for job in jobs] == [False, False, True, True]


def test_where_nothing_can_be_written_nothing_is_noted_and_nothing_fails(state):
    state.write_text("no folder")

    note(JOB)

    assert not is_noted(JOB)
