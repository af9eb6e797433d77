"""The judge of the golden record: what differs is said, and the record that is kept is whole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "golden"
RUN = {"exit": 0, "end": {"restarts": 0, "replicas": {"state_sha256": "ab"}}, "steps": ["0: x", "1: y"]}
RECORD = {
    "platform": {"torch": "2"},
    "runs": {"one": RUN, "two": RUN},
    "traces": {"0": {"lines": 3, "sha256": "c", "bits": {"links": "d"}}},
}


def compared(tmp_path, new):
    """Compare a record with RECORD on the command line; return the exit code and the lines."""
    for name, record in (("a", RECORD), ("b", new)):
        (tmp_path / name).write_text(json.dumps(record))
    words = [sys.executable, str(TOOL), "compare", str(tmp_path / "a"), str(tmp_path / "b")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


def test_the_same_record_has_no_difference(tmp_path):
    assert compared(tmp_path, RECORD) == (0, ["no difference"])


def other_hash(record):
    record["runs"]["two"]["end"]["replicas"]["state_sha256"] = "cd"


def job_gone(record):
    del record["runs"]["two"]


def another_job(record):
    record["runs"]["three"] = 1


def another_key(record):
    record["runs"]["one"]["end"]["new"] = None


def another_step(record):
    record["runs"]["one"]["steps"].append("2: z")


def other_step(record):
    record["runs"]["one"]["steps"][0] = "0: z"


def number_as_text(record):
    record["runs"]["one"]["exit"] = "0"


def yes_for_a_number(record):
    record["runs"]["one"]["exit"] = False


def other_platform(record):
    record["platform"]["torch"] = "3"


def other_bits(record):
    record["traces"]["0"]["bits"]["links"] = "e"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (other_hash, 'runs/two/end/replicas/state_sha256: "ab" -> "cd"'),
        (job_gone, "runs/two: missing, was "),
        (another_job, "runs/three: additional, 1"),
        (another_key, "runs/one/end/new: additional, null"),
        (another_step, "runs/one/steps: 2 entries -> 3"),
        (other_step, 'runs/one/steps[0]: "0: x" -> "0: z"'),
        (number_as_text, 'runs/one/exit: 0 -> "0"'),
        (yes_for_a_number, "runs/one/exit: 0 -> false"),
        (other_platform, 'platform/torch: "2" -> "3"'),
        (other_bits, 'traces/0/bits/links: "d" -> "e"'),
    ],
)
def test_every_difference_is_one_line_and_fails(tmp_path, change, line):
    new = json.loads(json.dumps(RECORD))
    change(new)

    code, lines = compared(tmp_path, new)

    assert code == 1
    assert len(lines) == 1
    assert lines[0].startswith(line)


def test_the_kept_record_has_all_sections_and_every_job_has_run():
    kept = json.loads((TOOL / "record.json").read_text())

    assert set(kept) == {"platform", "runs", "files", "surface", "traces", "explored", "simulated"}
    assert len(kept["traces"]) == 200
    assert all("end" in run for run in kept["runs"].values())
    assert {violation for _, violation in kept["explored"].values()} == {None}
