"""The judge of the golden record: what differs is said, and the record that is kept is whole."""

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[1] / "golden"
RUN = {"exit": 0, "end": {"restarts": 0, "replicas": {"state_sha256": "ab"}}, "steps": ["0: x", "1: y"]}
RECORD = {
    "platform": {"torch": "2"},
    "runs": dict.fromkeys(("one", "step", "text", "yes", "gone"), RUN),
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


def test_every_difference_is_one_line_and_fails(tmp_path):
    assert compared(tmp_path, RECORD) == (0, ["no difference"])
    new = json.loads(json.dumps(RECORD))
    del new["runs"]["gone"]
    new["runs"] |= {"three": 1, "text": RUN | {"exit": "0"}, "yes": RUN | {"exit": False}}
    new["runs"]["one"]["end"] = {"restarts": 0, "replicas": {"state_sha256": "cd"}, "new": None}
    new["runs"]["one"]["steps"] = ["0: x", "1: y", "2: z"]
    new["runs"]["step"]["steps"][0] = "0: z"
    new["platform"]["torch"] = "3"
    new["traces"]["0"]["bits"]["links"] = "e"

    code, lines = compared(tmp_path, new)

    assert code == 1
    wanted = [
        "runs/gone: missing, was ",
        "runs/three: additional, 1",
        'runs/text/exit: 0 -> "0"',
        "runs/yes/exit: 0 -> false",
        'runs/one/end/replicas/state_sha256: "ab" -> "cd"',
        "runs/one/end/new: additional, null",
        "runs/one/steps: 2 entries -> 3",
        'runs/step/steps[0]: "0: x" -> "0: z"',
        'platform/torch: "2" -> "3"',
        'traces/0/bits/links: "d" -> "e"',
    ]
    assert len(lines) == len(wanted)
    assert [line for line in wanted if not any(each.startswith(line) for each in lines)] == []


def test_the_kept_record_has_all_sections_and_every_job_has_run():
    kept = json.loads((TOOL / "record.json").read_text())

    assert set(kept) == {"platform", "runs", "files", "surface", "traces", "explored", "simulated"}
    assert len(kept["traces"]) == 200
    assert all("end" in run for run in kept["runs"].values())
    assert {violation for _, violation in kept["explored"].values()} == {None}
