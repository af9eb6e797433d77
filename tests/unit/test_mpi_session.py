"""Where Open MPI's library puts its session directory in a process whose mpirun is gone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mpi4py", exc_type=ImportError)

ROOT = Path(__file__).parents[2]
START = """
import os
from holdfast.comm.ulfm import _load_mpi
_load_mpi()
print(os.environ.get("TMPDIR"), flush=True)
os._exit(0)  # as a worker that is killed
"""


@pytest.mark.parametrize("of_a_run", [True, False])
def test_a_session_directory_without_mpirun_is_in_the_run_folder(tmp_path, of_a_run):
    temporary, run_dir = tmp_path / "t", tmp_path / "run"
    temporary.mkdir()
    run_dir.mkdir()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HOLDFAST_", "OMPI_", "PMIX_", "PRTE_"))}
    env |= {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_MCA_mpi_ft_enable": "1", "TMPDIR": str(temporary)}
    env |= {"PYTHONPATH": str(ROOT / "src")} | ({"HOLDFAST_RUN_DIR": str(run_dir)} if of_a_run else {})

    done = subprocess.run(
        [sys.executable, "-c", START], env=env, capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stdout) == (0, f"{temporary}\n"), done.stderr
    found = {folder.name: [path.name.partition(".")[0] for path in folder.iterdir()] for folder in (temporary, run_dir)}
    assert found == ({"t": [], "run": ["ompi"]} if of_a_run else {"t": ["ompi"], "run": []})
