"""Bad input to ``holdfast run``: one clear line, exit code 2, nothing started."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast.cli import main

BAD = {
    "unknown strategy": (["--strategy", "hope"], "--strategy must be one of rollback, forward, restart, reinit, partial, got 'hope'"),
    "stop before the first step": (["--stop-after", "-1"], "--stop-after must be at least 0, got -1"),
    "unknown guard": (["--guard", "cure"], "--guard must be one of stop, warn, heal, off, got 'cure'"),
    "checksums that nobody looks at": (["--guard", "off", "--guard-sums"], "--guard-sums needs guard stop, warn or heal"),
    "unknown fabric": (["--fabric", "smoke"], "--fabric must be one of ulfm, gloo, virtual, got 'smoke'"),
    "replacing the dead where nobody can join": (["--respawn"], "--respawn needs --fabric gloo"),
    "less than no spares": (["--spares", "-1"], "--spares must be at least 0, got -1"),
    "a hang before it began": (["--hang-timeout", "-1"], "--hang-timeout must be at least 0.1 seconds and finite, or 0 for never, got -1"),
    "a hang between two pulses": (["--hang-timeout", "0.001"], "--hang-timeout must be at least 0.1 seconds"),
    "an exit code that means resume": (["--no-requeue-code", "4"], "--no-requeue-code must be 1, or from 5 to 125, got 4"),
    "a node that left and failed": (["--left-code", "2"], "--left-code must be 0, or from 4 to 125, got 2"),
    "less than no progress": (["--max-no-progress", "-1"], "--max-no-progress must be at least 0, got -1"),
    "no nodes": (["--fabric", "gloo", "--nnodes", "0"], "--nnodes must be at least 1, got 0"),
    "a limit to nothing": (["--fabric", "gloo", "--max-respawns", "2"], "--max-respawns 2 needs --respawn"),
    "nobody to replace the slow": (["--stragglers", "replace"], "--stragglers replace needs --spares or --respawn"),
    "unknown policy": (["--stragglers", "shoot"], "--stragglers must be one of ignore, warn, rebalance, replace, got 'shoot'"),
    "slower than as fast": (["--straggler-factor", "1"], "--straggler-factor must be more than 1 and finite, got 1"),
    "nodes that cannot meet": (["--fabric", "gloo", "--nnodes", "2"], "--nnodes needs --rdzv"),
    "nodes of Open MPI": (["--nnodes", "2", "--rdzv", "holdfast://h:1"], "--nnodes and --rdzv need --fabric gloo"),
    "a node too many": (["--fabric", "gloo", "--nnodes", "2", "--node-rank", "2", "--rdzv", "holdfast://127.0.0.1:29400"], "--node-rank must be from 0 to 1"),
    "an open door": (["--fabric", "gloo", "--nnodes", "2", "--rdzv", "holdfast://h:1"], "needs a secret that all nodes share"),
    "no workers": (["-n", "0"], "--workers must be at least 1, got 0"),
    "workers by the million": (["-n", "9" * 20], f"--workers must be at most 65536, got {'9' * 20}"),
    "spares by the million": (["--spares", "9" * 20], f"--spares must be at most 65536, got {'9' * 20}"),
    "nodes by the million": (["--fabric", "gloo", "--nnodes", "9" * 20, "--inject", "kill:rank=1,step=1"], f"--nnodes must be at most 65536, got {'9' * 20}"),
    "workers by the million on all nodes": (
        ["--fabric", "gloo", "-n", "60000", "--spares", "2", "--nnodes", "60000", "--rdzv", "holdfast://127.0.0.1:1"],
        "workers and spares must be at most 65536 on all 60000 nodes together, got 3600120000",
    ),
    "newcomers by the million": (
        ["--fabric", "gloo", "--respawn", "--max-respawns", "9" * 20, "--inject", "kill:rank=1,step=1"],
        f"--max-respawns must be at most 65536, got {'9' * 20}",
    ),
    "a hang after the end of time": (["--hang-timeout", "1e300"], "--hang-timeout must be at most 1e+09 seconds, or 0 for never, got 1e+300"),
    "workers not a number": (["-n", "two"], "--workers must be a whole number, got 'two'"),
    "a unit": (["--hang-timeout", "5s"], "--hang-timeout must be a number of seconds, without a unit, got '5s'"),
    "unknown option": (["--hope"], "No such option: --hope"),
    "unknown option, where all are": (["--hope"], "holdfast run --help-all lists every option"),
    "rank out of range": (["-n", "2", "--inject", "kill:rank=5,step=1"], "rank must be one of 0..1, got 5"),
    "malformed fault": (["--inject", "kill:rank=1"], "step is missing"),
    "flip of nothing": (["--inject", "flip:rank=0,step=1"], "--inject flip:rank=0,step=1: target is missing"),
    "flip of no such bits": (["--inject", "flip:rank=0,step=1,target=weights,bits=top"], "bits must be one of all, sign"),
    "unknown fault": (["--inject", "tickle:rank=0,step=1"], "got 'tickle'"),
    "restart without checkpoints": (["--strategy", "restart"], "--strategy restart needs --checkpoint-dir"),
    "resume without checkpoints": (["--resume"], "--resume needs --checkpoint-dir"),
    "interval without checkpoints": (["--checkpoint-every", "5"], "--checkpoint-every needs --checkpoint-dir"),
    "checkpoints in a file": (["--checkpoint-dir", __file__], "--checkpoint-dir must be a directory, and "),
    "endless mtbf": (["--mtbf", "inf"], "--mtbf must be more than 0 seconds and finite, got inf"),
    "min-workers too large": (["-n", "2", "--min-workers", "3"], "--min-workers must be at most the number of workers"),
    "no mtbf": (["--mtbf", "0"], "--mtbf must be more than 0 seconds, got 0"),
    "negative mtbf": (["--mtbf=-1"], "--mtbf must be more than 0 seconds, got -1"),
    "mtbf without processes": (["--fabric", "virtual", "--mtbf", "1"], "--mtbf kills processes"),
    "no checkpoint interval": (["--checkpoint-every", "0"], "--checkpoint-every must be at least 1, got 0"),
    "interval in words": (["--checkpoint-every", "often"], "--checkpoint-every must be a number of steps, at least 1, or auto, got often"),
    "auto without checkpoints": (["--checkpoint-every", "auto"], "--checkpoint-every needs --checkpoint-dir"),
    "unknown format": (["--checkpoint-dir", "c", "--checkpoint-format", "pickle"], "--checkpoint-format must be one of safetensors, hdf5, npz, dcp, got 'pickle'"),
    "one checkpoint": (["--checkpoint-dir", "c", "--keep-last", "1"], "--keep-last must be at least 2, because the newest may turn out to be damaged, got 1"),
    "keeping nothing": (["--keep-last", "3"], "--keep-last needs --checkpoint-dir"),
    "keeping some of all": (["--checkpoint-dir", "c", "--keep-every", "5"], "--keep-every needs --keep-last"),
    "no grace": (["--grace", "0"], "--grace must be more than 0 seconds and finite, got 0"),
    "endless grace": (["--grace", "inf"], "--grace must be more than 0 seconds and finite, got inf"),
    "no expected mtbf": (["--expected-mtbf", "0"], "--expected-mtbf must be more than 0 seconds, got 0"),
    "negative slices": (["--slices", "-1"], "--slices must be at least 0, got -1"),
    "slices in words": (["--slices", "some"], "--slices must be a number, auto, or auto:F to bear the loss of F workers"),
    "nobody would be left": (["-n", "3", "--slices", "auto:3"], "--slices auto:F must leave a worker: F must be below"),
    "negative restarts": (["--max-restarts", "-1"], "--max-restarts must be at least 0, got -1"),
    "no patience": (["--stall-timeout", "0"], "--stall-timeout must be more than 0 seconds, got 0"),
}  # fmt: skip


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("open('it_ran', 'w')\n")
    return path


@pytest.fixture(autouse=True)
def no_process(monkeypatch, tmp_path):
    """Nothing may be started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail(f"it started {args}"))


def refusal(args, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", *map(str, args)])
    said = capsys.readouterr()
    assert caught.value.code == 2
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    assert said.err.startswith("error: ")
    return said.err


@pytest.mark.parametrize("what", BAD)
def test_bad_options_are_refused_in_one_line(what, script, capsys):
    options, message = BAD[what]

    assert message in refusal([*options, script], capsys)


def test_doctor_takes_no_more_workers_than_a_job_may_have(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "-n", "9" * 20])

    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: --workers must be at most 65536, got {'9' * 20}\n"


def test_a_missing_script_is_named(capsys):
    assert "there is no script 'nowhere.py'" in refusal(["nowhere.py"], capsys)


@pytest.mark.parametrize("command", ["run", "doctor", "status"])
def test_a_working_directory_that_was_removed_is_named(command, script, capsys, monkeypatch, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()

    with pytest.raises(SystemExit) as caught:
        main([command, str(script)])

    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: the working directory was removed; change to another one (cd)\n"


def test_a_script_is_asked_for(capsys):
    assert "SCRIPT" in refusal(["-n", "2"], capsys)


@pytest.mark.parametrize("option", ["--report", "--log-dir"])
def test_a_folder_that_cannot_be_written_is_found_before_anything_starts(option, script, capsys):
    folder = script / "inside-a-file"

    assert f"{option} {folder} cannot be written" in refusal([option, folder, script], capsys)


def test_missing_mpi_says_what_to_install(script, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))

    said = refusal(["-n", "2", script], capsys)

    assert (
        "MPI is not installed (no mpirun): run with --fabric gloo, which needs none, or pip install 'holdfast[mpi]'"
        in said
    )


def test_a_bad_variable_is_refused_like_an_option(script, capsys, monkeypatch):
    monkeypatch.setenv("HOLDFAST_MIN_WORKERS", "many")

    assert "HOLDFAST_MIN_WORKERS must be of type int, got 'many'" in refusal([script], capsys)


def test_the_command_line_starts_without_torch():
    code = "import sys, holdfast.cli; sys.exit('torch' in sys.modules)"
    assert not [name for name in ("torch",) if name in _modules_after(code)]


def _modules_after(code):
    import os

    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)
    return ["torch"] if os.waitpid(pid, 0)[1] else []


def test_debug_shows_where_an_error_was_raised(script, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--debug", "run", "--resume", str(script)])

    assert caught.value.code == 2
    assert "Traceback" in capsys.readouterr().err
