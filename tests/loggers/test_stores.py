"""W&B offline and MLflow's file store: what they have is read back, and each step is there once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import clean_env

pytest.importorskip("wandb", reason="make loggers")
pytest.importorskip("mlflow", reason="make loggers")
from logged import STEPS, Start

from holdfast.observe.loggers.mlflow import MlflowLogger
from holdfast.observe.loggers.steps import LoggedStep
from holdfast.observe.loggers.wandb import WandbLogger, run_files, steps_in


def steps(numbers, **more):
    return [
        LoggedStep(step=step, time_s=1.0 + step, metrics={"loss": step / 8, "mean": 1.0}, **more) for step in numbers
    ]


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    import wandb

    wandb.teardown()  # it reads its variables once a process
    yield tmp_path
    wandb.teardown()


def history_of(folder, run_id):
    """What the files of W&B have of each step, as W&B's own classes read them."""
    from wandb.proto.wandb_internal_pb2 import Record

    from holdfast.observe.loggers.wandb import _records

    found = []
    for file in run_files(folder, run_id):
        for data in _records(file.read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
                found.append((int(items["_step"]), float(items["loss"]), float(items["mean"])))
    return found


def test_a_run_of_wandb_is_continued_where_it_ended(offline):
    many = 2000  # more than one block of its file
    first = WandbLogger("project", "abc")
    assert first.open() == {}
    first.write(steps(range(many)))
    first.close(is_done=False)

    second = WandbLogger("project", "abc")
    assert second.open() == {"": many - 1}
    second.write(steps([many]))
    second.write([LoggedStep(step=many, time_s=1.0, metrics={"accuracy": 0.5}, is_final=True)])
    second.close(is_done=True)

    assert history_of(offline, "abc") == [(step, step / 8, 1.0) for step in range(many + 1)]
    assert len(run_files(offline, "abc")) == 2
    assert run_files(offline, "ab") == []


def test_a_file_of_wandb_may_end_at_any_byte(offline):
    logger = WandbLogger("project", "abc")
    logger.open()
    logger.write(steps(range(3)))
    logger.close(is_done=False)
    (file,) = run_files(offline, "abc")
    data, found = file.read_bytes(), set()

    for size in range(len(data)):
        file.write_bytes(data[:size])
        read = list(steps_in(file))
        assert read == list(range(len(read)))
        found.add(len(read))

    assert found == {0, 1, 2, 3}


def histories(logger, *names):
    client, run = logger._client, logger._run
    return {name: [(each.step, each.value) for each in client.get_metric_history(run, name)] for name in names}


def test_a_run_of_mlflow_is_found_again_also_if_a_step_lacks_a_metric(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    first = MlflowLogger(str(tmp_path / "runs"), "abc")
    assert first.open() == {}
    first.write([*steps(range(3)), LoggedStep(step=3, time_s=4.0, metrics={"loss": 3 / 8})])

    second = MlflowLogger(str(tmp_path / "runs"), "abc")
    assert second.open() == {"loss": 3, "mean": 2}
    second.close(is_done=True)

    assert second._run == first._run
    assert histories(second, "loss")["loss"] == [(step, step / 8) for step in range(4)]
    assert second._client.get_run(second._run).info.status == "FINISHED"
    other = MlflowLogger(str(tmp_path / "runs"), "abd")
    assert other.open() == {}


def test_experiment_and_run_are_those_of_mlflows_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tests")
    monkeypatch.setenv("MLFLOW_RUN_NAME", "first")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MlflowLogger("", "abc")
    logger.open()

    run = logger._client.get_run(logger._run)
    assert logger._client.get_experiment(run.info.experiment_id).name == "tests"
    assert run.info.run_name == "first"


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_however_the_launcher_dies_both_have_each_step_once(tmp_path):
    targets = ("wandb:tests", f"mlflow:{tmp_path / 'mlruns'}")
    env = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "HOLDFAST_RUN_ID": "abc"}
    kill = ("--inject", "kill:rank=0,step=2")
    committed, _ = Start(tmp_path, targets, *kill, env=env).kill_after(6)
    assert 2 in committed
    Start(tmp_path, targets, "--resume", env=env).end()

    assert [step for step, _, _ in history_of(tmp_path, "abc")] == list(range(STEPS))
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MlflowLogger(str(tmp_path / "mlruns"), "abc")
    assert logger.open() == {"loss": STEPS - 1, "mean": STEPS - 1, "accuracy": STEPS - 1}
    found = histories(logger, "loss", "mean", "accuracy")
    assert {name: [step for step, _ in values] for name, values in found.items()} == {
        "loss": list(range(STEPS)),
        "mean": list(range(STEPS)),
        "accuracy": [STEPS - 1],
    }
    assert [(step, loss) for step, loss, _ in history_of(tmp_path, "abc")] == found["loss"]


def test_the_launcher_imports_no_torch(tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from holdfast.observe.loggers.mlflow import MlflowLogger\n"
        "from holdfast.observe.loggers.steps import LoggedStep\n"
        "from holdfast.observe.loggers.tensorboard import TensorBoardLogger\n"
        "from holdfast.observe.loggers.wandb import WandbLogger\n"
        "step = LoggedStep(step=0, time_s=1.0, metrics={'loss': 1.0})\n"
        "for logger in (TensorBoardLogger(Path('tb')), MlflowLogger('ml', 'abc'), WandbLogger('p', 'abc')):\n"
        "    logger.open(); logger.write([step]); logger.close(is_done=True)\n"
    )
    env = clean_env(WANDB_MODE="offline", PYTHONPATH=str(Path(__file__).parents[2] / "src"))

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
    )

    assert done.returncode == 0, done.stderr
