"""The scripts that measure on GPUs: how they are called, what they write, and that a figure of a CPU never counts."""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import gpu_cluster
import pytest
import torch
from generate import gpu_evidence
from gpus.results import COMPLETE, Results, facts_of, path_of
from jobs import ROOT

import gpu

BENCHMARKS = ROOT / "benchmarks"


def call(monkeypatch, script, *words):
    """Run a script's main in this process; return its exit code."""
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        script.main()
    return ended.value.code or 0


def test_a_run_on_the_cpu_leaves_files_that_do_not_count_and_is_resumed(monkeypatch, tmp_path, capfd):
    words = ("--device", "cpu", "--only", "kernel,memory", "--out", tmp_path)

    first, again = call(monkeypatch, gpu, *words), call(monkeypatch, gpu, *words)

    said = capfd.readouterr().out
    assert (first, again) == (0, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["cpu-kernel.json"]
    assert json.loads((tmp_path / "cpu-kernel.json").read_text())["ended"] == COMPLETE
    assert "memory: skipped, needs CUDA: it reads counters of the GPU's allocator" in said
    assert "kernel: complete for this commit; --again runs it again" in said
    assert "nothing of Holdfast was run on a GPU" in gpu_evidence(tmp_path)


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        (gpu, ("--only", "kernel,speed"), "--only must be of staged, step, .*, got speed"),
        (gpu_cluster, ("--device", "cpu", "--nnodes", 2, "--node-rank", 2), "--node-rank must be from 0 to 1, got 2"),
        (gpu_cluster, ("--device", "cpu", "--rdzv", "node0"), "--rdzv must be HOST:PORT, got node0"),
        (gpu_cluster, ("--device", "cpu", "-n", 1), "one worker in all has no other"),
    ],
)
def test_bad_options_are_one_line(monkeypatch, capsys, script, words, said):
    assert call(monkeypatch, script, *words) == 2
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA works here")
@pytest.mark.parametrize("script", [gpu, gpu_cluster], ids=lambda script: script.__name__)
def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys, script):
    assert call(monkeypatch, script) == 2
    assert "this process cannot use CUDA" in capsys.readouterr().err


def test_figures_of_a_changed_checkout_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "commit_of", lambda: ("0123456789", True))

    assert call(monkeypatch, gpu) == 2
    assert "commit the changes in this checkout first" in capsys.readouterr().err


def test_a_file_of_a_gpu_is_what_the_page_of_results_reads(tmp_path):
    facts = facts_of("a benchmark", "cpu", "0123456789abcdef") | {"card": "NVIDIA X", "cards": 1, "driver": "1.2"}
    results = Results(path_of(tmp_path, "cuda", "kernel"), facts)

    results.figure("speed", "3 TB/s")
    results.check("bits", False, "4 differ")

    rows = gpu_evidence(tmp_path).splitlines()
    assert "| a benchmark | speed: 3 TB/s |" in rows[2]
    assert "| a benchmark | bits: **fails**: 4 differ |" in rows[3]
    assert results.failed == ["bits"]
    assert json.loads(results.path.read_text())["ended"] == "cut short", "it is, until it is complete"


def test_a_section_that_ended_early_says_so_beside_its_figures(tmp_path):
    facts = facts_of("a benchmark", "cpu", "0123456789abcdef") | {"card": "NVIDIA X", "cards": 1, "driver": "1.2"}
    Results(path_of(tmp_path, "cuda", "step"), facts).figure("1 B", "1.01 of a plain loop")
    options = argparse.Namespace(out=tmp_path, device="cuda", commit="0123456789abcdef")

    assert gpu.unfinished("step", options, "time limit of 5 s") == "time limit of 5 s; the figures until then are kept"
    assert gpu.unfinished("kernel", options, "ended with -9") == "ended with -9; there is no figure"

    rows = gpu_evidence(tmp_path).splitlines()[2:]
    assert [row.split(" | ")[1] for row in rows] == ["1 B: 1.01 of a plain loop", "not complete: time limit of 5 s"]
    assert not gpu.is_complete(path_of(tmp_path, "cuda", "step"), options.commit)


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_section_that_is_ended_by_its_time_limit_leaves_no_process(tmp_path):
    process = subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True
    )
    child = int(process.stdout.readline())

    gpu.end_group(process)

    process.stdout.close()
    assert process.returncode == -15
    ends_s = time.monotonic() + 30
    while is_alive(child):  # its end is not waited for: it is not a child of this process
        assert time.monotonic() < ends_s
        time.sleep(0.01)


@pytest.mark.chaos
def test_a_cluster_of_processes_on_the_cpu_passes(tmp_path):
    words = ("--device", "cpu", "-n", "2", "--out", tmp_path)
    command = [sys.executable, BENCHMARKS / "gpu_cluster.py", *words]

    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=170, check=False)

    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "cpu-cluster.json").read_text())
    assert written["figures"]["2 workers, one killed in allreduce"].startswith("equal bits")
    assert "times" in written["figures"]["tiny-mlp, nodes x workers 1 x 2, step"]
