"""What a long run of the tests says of its progress."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import time_left
from time_left import TimeLeft, TimeLeftLines, folder_of


def state(*finished, tests):
    left = TimeLeft()
    left.expect(tests)
    for nodeid, seconds in finished:
        left.finish(nodeid, seconds)
    return left


CHAOS = [f"tests/chaos/test_a.py::test_{n}" for n in range(100)]
UNIT = [f"tests/unit/test_b.py::test_{n}" for n in range(1000)]


@pytest.mark.parametrize(
    ("nodeid", "folder"),
    [("tests/chaos/test_a.py::test_b[tests/unit]", "chaos"), ("tests/lab/cli/test_a.py::test_b", "lab"), ("test_a.py::b", "")],
)  # fmt: skip
def test_a_test_belongs_to_its_folder(nodeid, folder):
    assert folder_of(nodeid) == folder


def test_short_tests_that_come_last_are_not_taken_to_be_as_long_as_the_first():
    left = state(*((test, 10.0) for test in CHAOS), tests=CHAOS + UNIT)

    assert left.left_s(500.0) == pytest.approx(1000 * time_left.OTHERS_S / 2)  # two at once
    assert left.line(500.0) == "100 of 1,100 tests done, about 1 min left"


def test_a_folder_that_has_begun_is_judged_by_its_own_tests():
    left = state(*((test, 30.0) for test in CHAOS[:50]), tests=CHAOS)

    assert 50 * 25 < left.left_s(1500.0) < 50 * 30


def test_a_line_comes_every_half_minute_and_counts_each_test_once(monkeypatch):
    clock, lines = SimpleNamespace(now_s=0.0), []
    monkeypatch.setattr(time_left.time, "monotonic", lambda: clock.now_s)
    plugin = TimeLeftLines(SimpleNamespace(ensure_newline=lambda: None, write_line=lines.append))
    plugin.pytest_xdist_node_collection_finished(None, UNIT)
    plugin.pytest_xdist_node_collection_finished(None, UNIT)

    for number in range(130):
        for when in ("setup", "call", "teardown"):
            failed = number == 7 and when == "call"
            longrepr = "first\nE   assert 1 == 2" if failed else None
            report = SimpleNamespace(nodeid=UNIT[number], when=when, duration=0.1, failed=failed, longrepr=longrepr)
            plugin.pytest_runtest_logreport(report)
        clock.now_s += 0.5

    assert lines.pop(0) == f"failed: {UNIT[7]}: E   assert 1 == 2"
    assert [line.partition(" tests")[0] for line in lines] == ["61 of 1,000", "121 of 1,000"]
    assert all(", 1 failed, about " in line for line in lines)


def test_a_run_without_an_end_of_a_test_ends_itself_and_names_what_runs(tmp_path):
    (tmp_path / "conftest.py").write_text(
        f"import sys; sys.path.insert(0, {str(Path(time_left.__file__).parent)!r})\n"
        "import time_left; time_left.SILENT_S = 1.0\n"
        "def pytest_configure(config):\n"
        "    reporter = config.pluginmanager.getplugin('terminalreporter')\n"
        "    config.pluginmanager.register(time_left.TimeLeftLines(reporter))\n"
    )
    (tmp_path / "test_hang.py").write_text("import time\ndef test_hang(): time.sleep(120)\n")

    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", tmp_path]
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert run.returncode == 1
    assert "no test has ended for 1 s, the run ends here; still running: test_hang.py::test_hang" in run.stdout
