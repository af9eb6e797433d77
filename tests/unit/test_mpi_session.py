"""Processes whose mpirun is gone: where Open MPI's library puts its session directory, and that none trains alone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.engine import mpi_start
from holdfast.launch.supervise.processes import Process

pytest.importorskip("mpi4py", exc_type=ImportError)

ROOT = Path(__file__).parents[2]
START = """
import os
from holdfast.comm.ulfm import _load_mpi
_load_mpi()
print(os.environ.get("TMPDIR"), flush=True)
os._exit(0)  # as a worker that is killed
"""


def python(*words, **variables):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HOLDFAST_", "OMPI_", "PMIX_", "PRTE_"))}
    env |= {"PYTHONPATH": str(ROOT / "src")} | {name: str(value) for name, value in variables.items()}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_a_session_directory_without_mpirun_is_in_the_run_folder(tmp_path):
    temporary, run_dir = tmp_path / "t", tmp_path / "run"
    temporary.mkdir()
    run_dir.mkdir()
    done = python(
        "-c", START, OMPI_COMM_WORLD_SIZE="1", OMPI_MCA_mpi_ft_enable="1", TMPDIR=temporary, HOLDFAST_RUN_DIR=run_dir
    )

    assert (done.returncode, done.stdout) == (0, f"{temporary}\n"), done.stderr
    found = {folder.name: [path.name.partition(".")[0] for path in folder.iterdir()] for folder in (temporary, run_dir)}
    assert found == {"t": [], "run": ["ompi"]}


def test_mpi_that_begins_alone_after_the_end_of_mpirun_is_given_up(tmp_path):
    done = python("-c", START, OMPI_COMM_WORLD_SIZE="2", OMPI_MCA_mpi_ft_enable="1", TMPDIR=tmp_path)

    assert done.returncode == -signal.SIGABRT
    assert "mpirun started 2 processes, and MPI_Init found 1: mpirun has ended" in done.stderr


@pytest.mark.parametrize("is_orphan", [True, False])
def test_a_worker_whose_mpirun_ended_before_it_looked_does_not_start(tmp_path, is_orphan):
    """Its parent is then a process that knows nothing of the launcher."""
    (tmp_path / "script.py").write_text("print('it started')")
    env = {"HOLDFAST_LAUNCHER": Process.of(os.getpid())} | ({"OMPI_COMM_WORLD_SIZE": 2} if is_orphan else {})

    done = python("-m", "holdfast.launch.supervise.starter", tmp_path / "script.py", **env)

    assert (done.returncode, done.stdout) == ((-9, "") if is_orphan else (0, "it started\n")), done.stderr


@pytest.mark.parametrize("namespace", ["", "of another job"])
def test_where_the_processes_of_the_job_are_not_known_none_is_said_to_be_gone(monkeypatch, capsys, namespace):
    """Without PMIX_NAMESPACE, all of them would be."""
    env = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    monkeypatch.delenv("PMIX_NAMESPACE", raising=False)
    for name, value in (env | ({"PMIX_NAMESPACE": namespace} if namespace else {})).items():
        monkeypatch.setenv(name, value)

    mpi_start._say("for 10 s", "waits for", "then the job ends")

    assert capsys.readouterr().err == (
        "holdfast: for 10 s rank 1 waits for processes that have not called MPI_Init of 3 processes of mpirun;"
        " then the job ends\n"
    )
