"""The command line that says a job again, and what is refused before anything starts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import typer

from holdfast.comm.fabrics import ulfm
from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.launch.command_line import command_line, resume_command
from holdfast.launch.fleet.hostlist import Host
from holdfast.launch.job import Job
from holdfast.launch.job_rules import HOST_RULES, JOB_RULES, NODE_RULES, check
from holdfast.observe.loggers.targets import LogTarget
from holdfast.setting_checks import RULES


def job(script="train.py", **fields):
    options = {key: fields.pop(key) for key in tuple(fields) if key in Job.__dataclass_fields__}
    return Job(script=Path(script), settings=Settings(**{"fabric": "ulfm", "workers": 4} | fields), **options)


NOT_DEFAULT = [
    (
        job(args=("--epochs", "3"), strategy="forward", seed=7, max_restarts=1, report_dir=Path("out dir")),
        "-n 4 --strategy forward --seed 7 --max-restarts 1 --report 'out dir' train.py --epochs 3",
    ),
    (job("package/train.py", module="package.train", args=("-x",)), "-n 4 -m package.train -x"),
    (
        job(checkpoint_dir="s3://b/run", checkpoint_auto=True, keep_last=3, keep_every=100, grace_s=5.0),
        "-n 4 --checkpoint-dir s3://b/run --keep-last 3 --keep-every 100 --checkpoint-every auto --grace 5 train.py",
    ),
    (
        job(fabric="gloo", spares=1, max_respawns=3, nnodes=2, node_rank=1, rdzv="etcd://h:2379/j", node_timeout_s=5.0,
            hang_timeout_s=1.5, stragglers="replace", straggler_factor=3.0, stall_timeout_s=20.0),
        "-n 4 --fabric gloo --spares 1 --hang-timeout 1.5 --respawn --max-respawns 3 --nnodes 2 --node-rank 1 --rdzv "
        "etcd://h:2379/j --node-timeout 5 --stragglers replace --straggler-factor 3 --stall-timeout 20 train.py",
    ),
    (job(auto_slices=2), "-n 4 --slices auto:2 train.py"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "line"), NOT_DEFAULT, ids=range(len(NOT_DEFAULT)))
def test_a_command_line_holds_what_is_not_the_default(given, line):
    assert command_line(given) == f"holdfast run {line}"


RESUMED = {
    "on the survivors with the slices that it had": (job(mtbf_s=3.0), 3, "-n 3 --slices 4 {} train.py"),
    "with the slices of the checkpoint where they were chosen": (job(auto_slices=2), 3, "-n 3 {} train.py"),
    "on as many as it needs": (job(min_workers=3), 2, "-n 3 --min-workers 3 --slices 4 {} train.py"),
    "on all its nodes alike": (
        job(workers=2, fabric="gloo", nnodes=2, rdzv="holdfast://h:1"), 3,
        "-n 2 --fabric gloo --slices 4 {} --nnodes 2 --rdzv holdfast://h:1 train.py",
    ),
    "with a spare that is left": (job(spares=2), 5, "-n 4 --spares 2 --slices 4 {} train.py"),
}  # fmt: skip


@pytest.mark.parametrize("how", RESUMED)
def test_a_job_is_resumed(how):
    given, left, line = RESUMED[how]

    assert resume_command(given, left, "ckpt") == "holdfast run " + line.format("--checkpoint-dir ckpt --resume")


@pytest.mark.parametrize(
    ("target", "published"),
    [
        ("mlflow:https://user:pw@host", "'mlflow:https://user:***@host'"),
        ("mlflow:postgresql+psycopg2://me:a@b:c@db:5432/runs", "'mlflow:postgresql+psycopg2://me:***@db:5432/runs'"),
        ("otel:http://s3cret@collector:4318/v1?x=a@b", "'otel:http://***@collector:4318/v1?x=a@b'"),
        ("otel:http://collector:4318/a@b", "otel:http://collector:4318/a@b"),
        ("tensorboard:runs/a:b@c", "tensorboard:runs/a:b@c"),
    ],
)
def test_a_command_line_publishes_no_password(target, published):
    given = job(log_to=(target,))

    assert f"--log-to {published} " in command_line(given)
    assert f"--log-to {published} " in resume_command(given, 3, "ckpt")
    if "***" in published:
        with pytest.raises(ConfigError, match=r"\*\*\* stands for a password, which is kept nowhere"):
            LogTarget.parse(published.strip("'"))


def test_every_option_is_said_again_but_for_the_secret():
    from holdfast.cli import app

    params = typer.main.get_command(app).commands["run"].params
    flags = {max(p.opts, key=len) for p in params if p.opts[0].startswith("-")}
    fields = {
        "spares": 1, "strategy": "partial", "order": "tree", "split": "even", "batch": "local", "rescale": "original", "overlap": "off", "overlap_optimizer": True, "guard": "heal", "guard_sums": True, "require_same_platform": False, "certificate": False, "stop_after": 5,
        "mirror": 2, "mirror_every": 8, "mirror_fraction": 0.5, "mirror_choice": "random", "mirror_predictor": "line", "mirror_distance": "scaled",
        "mirror_codec": "int8", "mirror_optimizer": "reset", "reinit_from": "root",
        "empty_seats": "raise", "min_workers": 2, "seed": 1, "slices": 9, "checkpoint_dir": "c", "checkpoint_every": 2, "checkpoint_format": "npz",
        "incremental_checkpoints": False, "keep_last": 2, "keep_every": 2, "hang_timeout_s": 1.0, "start_timeout_s": 5.0, "resume": True, "fabric": "gloo", "max_restarts": 1, "max_no_progress": 1, "no_requeue_code": 1, "left_code": 4,
        "max_respawns": 1, "nnodes": 2, "node_rank": 1, "rdzv": "r", "rdzv_timeout_s": 1.0, "node_timeout_s": 1.0,
        "stragglers": "ignore", "straggler_factor": 3.0, "stall_timeout_s": 1.0, "grace_s": 1.0, "log_dir": Path("l"),
        "report_dir": Path("r"), "token": "s3cret", "hosts": (Host("h", 1),), "launch_agent": "a", "network": "n",
        "run_dir": Path("d"), "gpus": "none", "health_check": "true", "metrics_port": "9", "dashboard": "8", "between_hosts": "nccl", "metrics_file": Path("m.prom"), "debug_bundles": "b", "debug_handlers": True, "events_max": "1GB", "log_to": ("tensorboard:t",),
    }  # fmt: skip
    words = command_line(job(**fields), faults=["kill:rank=0,step=1"]).split()
    words += command_line(Job(script=Path("s"), settings=Settings(mtbf_s=5.0, wire="bf16"), mtbf_s=2.0)).split()

    unsaid = "--workers --rdzv-token --json --page --preload --baseline --help-all --module"
    assert flags - set(words) == set(unsaid.split())
    assert not any("s3cret" in word for word in words)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_respawns", -1, "--max-respawns must be at least 0, got -1"),
        ("max_respawns", 1, "--respawn needs --fabric gloo: the ulfm fabric cannot add workers"),
        ("rdzv_timeout_s", 0.0, "--rdzv-timeout must be more than 0 seconds and finite, got 0"),
        ("stragglers", "shoot", "--stragglers must be one of ignore, warn, rebalance, replace, got 'shoot'"),
        ("stragglers", "replace", "--stragglers replace needs --spares or --respawn"),
        ("straggler_factor", 1.0, "--straggler-factor must be more than 1 and finite, got 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(tmp_path, field, value, message):
    (tmp_path / "train.py").touch()

    with pytest.raises(ConfigError) as caught:
        check(job(tmp_path / "train.py", **{field: value}))

    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("rule", [*RULES, *NODE_RULES, *JOB_RULES, *HOST_RULES], ids=lambda rule: " ".join(rule.fields))
def test_a_rule_is_about_options_that_there_are_and_its_message_can_be_made(rule):
    given = job()

    assert {*rule.fields} <= {*Job.__dataclass_fields__, *Settings.__dataclass_fields__}
    assert "{" not in rule.message(given.settings if rule in RULES else given)


def test_a_message_about_settings_begins_with_the_one_at_fault_so_that_a_command_can_say_its_option():
    assert [rule.fields[0] for rule in RULES if rule.message(Settings()).split()[0] != rule.fields[0]] == [
        "checkpoint_every"  # "set either checkpoint_every ..."
    ]


def test_a_job_that_can_start_passes(tmp_path):
    (tmp_path / "train.py").touch()

    check(job(tmp_path / "train.py", report_dir=tmp_path / "new" / "out", log_dir=tmp_path / "logs", fabric="virtual"))


@pytest.mark.parametrize("missing", ["mpirun", "mpi4py"])
def test_missing_mpi_is_refused_with_what_to_install(monkeypatch, tmp_path, missing):
    if missing == "mpirun":
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setattr(ulfm.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError) as caught:
        ulfm.find_mpirun()

    assert str(caught.value) == (
        f"MPI is not installed (no {missing}): run with --fabric gloo, which needs none, or pip install 'holdfast[mpi]'"
    )


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("mpirun (Open MPI) 4.1.6", "is of Open MPI 4.1.6, which has no ULFM; it came with version 5"),
        ("HYDRA build details:", "is not of Open MPI"),
        ("mpirun (Open MPI) 5.0.11", ""),
    ],
)
def test_an_mpirun_on_the_path_that_cannot_survive_a_failure_is_refused(monkeypatch, tmp_path, said, why):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\necho '{said}'\n")
    mpirun.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    if not why:
        assert ulfm.find_mpirun() == str(mpirun)
        return
    with pytest.raises(ConfigError, match=re.escape(f"{mpirun} {why}: run with --fabric gloo")):
        ulfm.find_mpirun()
