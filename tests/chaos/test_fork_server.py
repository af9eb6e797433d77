"""Workers are forked from a process that has imported torch, where that changes nothing for them; it may die at any time."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
import start_strikes
from jobs import clean_env, holdfast

from holdfast.launch.supervise.fork_protocol import connect_to, surroundings
from holdfast.launch.supervise.fork_server import ForkServer, is_useful
from holdfast.launch.supervise.processes import children_of

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(170)]

SCRIPT = """
import os, sys
print("loaded", "torch" in sys.modules, flush=True)
{line}
import numpy, torch, random
print("drawn", numpy.random.rand(), random.random(), flush=True)
print("place", os.getcwd(), sys.argv[1:], sys.path[0], os.environ["RANK"], os.environ.get("HOLDFAST_FORK_SERVER"), flush=True)
"""


def meet(workers):
    """The end of a script, in which each worker waits until all have printed: the job ends with the first that ends."""
    return f"""
import pathlib, time
here = pathlib.Path(__file__).parent
(here / ("printed-" + os.environ["RANK"])).touch()
ends_s = time.monotonic() + 60
while len(list(here.glob("printed-*"))) < {workers} and time.monotonic() < ends_s:
    time.sleep(0.01)
"""


def said(tmp_path, line=""):
    """What each of three workers printed, by its first word."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(line=line) + meet(3))
    done = holdfast("run", "-n", 3, "--fabric", "gloo", "--no-page", "--report", tmp_path / "r", script, "--word", "x")
    assert "ended without training" in done.stderr, "it printed what it had to, and ended in order"
    logs = [(tmp_path / "r" / "logs" / f"rank-{rank}.log").read_text().splitlines() for rank in range(3)]
    return [dict(text.split(" ", 1) for text in log) for log in logs]


def test_a_forked_worker_is_as_if_it_had_been_started(tmp_path):
    workers = said(tmp_path)

    assert [worker["loaded"] for worker in workers] == ["True"] * 3
    assert len({word for worker in workers for word in worker["drawn"].split()}) == 6, "each seeds its own generators"
    places = [f"{os.getcwd()} ['--word', 'x'] {tmp_path} {rank} None" for rank in range(3)]
    assert [worker["place"] for worker in workers] == places


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes a PID namespace without a user namespace")
def test_workers_are_forked_where_the_launcher_is_the_first_process_of_a_container(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(line='print("launcher", os.environ["HOLDFAST_LAUNCHER"].split()[0])') + meet(2))
    words = ("run", "-n", "2", "--fabric", "gloo", "--no-page", "--report", tmp_path / "r", script)
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-m", "holdfast", *map(str, words)],
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert "ended without training" in done.stderr
    for rank in range(2):
        said = (tmp_path / "r" / "logs" / f"rank-{rank}.log").read_text()
        assert "loaded True\nlauncher 1\n" in said


def test_a_worker_imports_torch_itself_where_its_script_sets_torch_up(tmp_path):
    workers = said(tmp_path, line='os.environ["OMP_NUM_THREADS"] = "2"')

    assert [worker["loaded"] for worker in workers] == ["False"] * 3


@pytest.mark.parametrize("begun", [False, True], ids=["while-it-imports", "when-all-run"])
def test_a_job_goes_on_without_its_fork_server(tmp_path, begun):
    with start_strikes.StartingJob(tmp_path, "gloo", script=("--note", tmp_path, "--prepare", 0.5)) as job:
        plan = start_strikes.Plan(0, "gloo", "fork server", 0, signal.SIGKILL, 0.0, 0.0, 0)
        server = job.until(lambda: start_strikes.find(plan, job.process.pid))
        if begun:
            job.until(lambda: all((tmp_path / f"runs-{rank}").exists() for rank in range(3)))
        assert server.send(signal.SIGKILL)
        job.end()

    report = job.check_bits()
    assert (report["restarts"], report["workers"]["finished"]) == (0, 3)


def test_only_a_process_in_the_same_surroundings_is_served(tmp_path):
    log = tmp_path / "log"
    with contextlib.closing(ForkServer(tmp_path, clean_env(), log)) as server:
        path = next(iter(server.variables.values()))
        elsewhere = json.dumps({"surroundings": surroundings() | {"net": "net:[1]"}}).encode()
        for request in (b"", b"not JSON", b"{}", elsewhere):
            with connect_to(path) as connection:
                connection.sendall(len(request).to_bytes(4, "big") + request)
                connection.settimeout(60)
                assert connection.recv(1) == b""
        assert server.process.poll() is None
        assert children_of(server.process.pid) == []
    assert log.read_text() == ""


@pytest.mark.parametrize(
    ("text", "useful"),
    [
        ("import torch", True),
        ("import holdfast", True),
        ("print(1)", False),
        ("import os, torch\nprint(os.environ['RANK'])", True),
        ("import os\nos.environ.setdefault('MKL_NUM_THREADS', '4')\nimport torch", False),
        ("# OMP_NUM_THREADS is not set here\nimport torch", True),
    ],
)
def test_a_script_that_does_not_set_torch_up_has_it_imported(tmp_path, text, useful):
    script = tmp_path / "s.py"
    script.write_text(text)

    assert is_useful(script) == useful
    assert not is_useful(tmp_path / "none.py")
