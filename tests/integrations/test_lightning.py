"""Lightning and Fabric over Holdfast: the bits of the undisturbed run, whatever a failure interrupts."""

import csv
import datetime
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

from jobs import clean_env, holdfast
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler
from torchmetrics.classification import MulticlassAccuracy

from holdfast.errors import CheckpointCorrupt, ConfigError, JobError, ScriptError
from holdfast.integrations.lightning import (
    HoldfastCheckpointIO,
    HoldfastEnvironment,
    HoldfastStrategy,
    agreement,
    support,
)
from holdfast.session.session import forget_sessions

HERE = Path(__file__).parent
SCRIPT = HERE / "train_lightning.py"
sys.path.insert(0, str(HERE))
import train_fabric  # noqa: E402
import train_lightning  # noqa: E402

pytestmark = [pytest.mark.chaos, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(150)]


FABRICS = pytest.mark.parametrize("fabric", ["gloo", "ulfm"])


def job(script, out, *arguments, fabric="gloo", env=None):
    """Run a script on several workers; return what the surviving ones wrote, by rank."""
    out.mkdir(exist_ok=True)
    done = holdfast("run", "--fabric", fabric, *arguments, script, out, timeout=120, env=env)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return {int(path.stem.split("-")[1]): json.loads(path.read_text()) for path in out.glob("done-*.json")}


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_SLICES", "5")
    monkeypatch.chdir(tmp_path)
    train_lightning.seen.clear()
    yield
    forget_sessions()  # of trainings that a test has interrupted


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder and the result of one process."""
    out = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_SLICES", "5")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        trainer, recorder = train_lightning.fit(out)
        torch.set_num_threads(threads)
    return out, json.loads(json.dumps(train_lightning.result(trainer, recorder)))


def rows(out):
    with (out / "logs" / "version_0" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def checkpoints(out):
    return {str(path.relative_to(out)): torch.load(path, weights_only=False) for path in sorted(out.rglob("*.ckpt"))}


def same(a, b):
    """Whether two checkpoints are equal to the bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@FABRICS
def test_one_worker_of_five_survives_kills_in_every_phase_and_nothing_differs(alone, tmp_path, fabric):
    out, expected = alone

    done = job(
        SCRIPT,
        tmp_path / "job",
        *("-n", "5", "--inject", "kill:rank=2,step=3,phase=allreduce"),
        fabric=fabric,
        env={"KILL": "0:save:3,1:evaluate:3,3:forward:2"},
    )

    assert done.keys() == {4}, "ranks 0 (saving), 1 (evaluating), 2 (in the sum) and 3 (forward) were killed"
    own = {"best": done[4]["best"].replace(str(tmp_path / "job"), str(out))}
    assert done[4] | own == expected
    assert rows(tmp_path / "job") == rows(out), "each row once, though the lead was killed twice"
    found, known = checkpoints(tmp_path / "job"), checkpoints(out)
    assert found.keys() == known.keys()
    for name, one in known.items():
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "holdfast"):
            assert same(one[part], found[name][part]), f"{part} of {name}"
        assert HoldfastCheckpointIO(fallback=False).load_checkpoint(tmp_path / "job" / name, weights_only=False)


def test_two_undisturbed_workers_have_the_bits_of_one_process(alone, tmp_path):
    out, expected = alone

    done = job(SCRIPT, tmp_path / "job", "-n", "2", "--slices", "5")

    assert done.keys() == {0, 1}
    for one in done.values():
        assert one | {"best": one["best"].replace(str(tmp_path / "job"), str(out))} == expected
    assert rows(tmp_path / "job") == rows(out)


def test_negative_control_under_ddp_a_killed_rank_ends_the_job(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT, tmp_path],
        env=clean_env(STRATEGY="ddp", DEVICES="2", KILL="1:backward:4"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode != 0
    assert "Signal 9 (SIGKILL)" in done.stderr, done.stderr[-2000:]
    assert list(tmp_path.glob("done-*.json")) == []


@FABRICS
def test_fabric_survives_and_ends_with_the_bits_of_one_process(tmp_path, fabric):
    (tmp_path / "one").mkdir()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = json.loads(json.dumps(train_fabric.train(tmp_path / "one")))
    torch.set_num_threads(threads)
    train_lightning.seen.clear()

    done = job(
        HERE / "train_fabric.py",
        tmp_path / "job",
        *("-n", "5", "--inject", "kill:rank=3,step=1", "--inject", "kill:rank=2,step=2,phase=allreduce"),
        fabric=fabric,
        env={"KILL": "0:save:2,1:evaluate:1", "PYTHONPATH": str(HERE)},
    )

    assert done == {4: expected}, "ranks 0 (saving), 1 (evaluating), 2 and 3 were killed"
    assert len(expected["losses"]) == 12
    assert all(one["half"] == pytest.approx(one["loss"] / 2) for one in expected["losses"])
    assert expected["gathered"] == 1.0


def test_what_training_step_logs_is_the_mean_over_the_mini_batch(alone):
    out, expected = alone

    logged = [row for row in rows(out) if row["size"]]

    assert [float(row["size"]) for row in logged] == [4.0] * 12, "five slices of a mini-batch of 20"
    assert [float(row["batch"]) for row in logged] == [0.0, 1.0, 2.0, 3.0] * 3
    assert [loss for loss, _ in expected["losses"]] == pytest.approx([float(row["train_loss_step"]) for row in logged])
    epochs = [float(row["train_loss_epoch"]) for row in rows(out) if row["train_loss_epoch"]]
    steps = [float(row["train_loss_step"]) for row in logged]
    assert epochs == pytest.approx([sum(steps[i : i + 4]) / 4 for i in (0, 4, 8)])
    assert len(expected["norms"]) == 12, "on_before_optimizer_step runs once a step"
    assert [float(row["grad_norm"]) for row in logged] == pytest.approx(expected["norms"])


@pytest.mark.parametrize("step", [3, 6, 9])
def test_a_checkpoint_of_lightning_resumes_at_its_position_in_the_data(alone, tmp_path, step):
    out, expected = alone
    torch.set_num_threads(1)

    trainer, recorder = train_lightning.fit(tmp_path, ckpt_path=str(out / "each" / f"step={step}.ckpt"))

    assert train_lightning.sha256(trainer.lightning_module) == expected["sha256"]
    assert recorder.norms == expected["norms"][step:]


def test_a_stopped_job_resumes_in_lightning(alone, tmp_path):
    _, expected = alone
    torch.set_num_threads(1)
    with pytest.raises(SystemExit) as stopped:
        train_lightning.fit(tmp_path, HoldfastStrategy(stop_after=5), default_root_dir=tmp_path)
    assert stopped.value.code == 4
    forget_sessions()

    trainer, _ = train_lightning.fit(tmp_path, default_root_dir=tmp_path, ckpt_path="hpc")

    assert train_lightning.sha256(trainer.lightning_module) == expected["sha256"]


def test_a_checkpoint_of_another_batch_size_is_refused(alone, tmp_path, monkeypatch):
    out, _ = alone
    monkeypatch.setattr(train_lightning, "BATCH", 10)
    monkeypatch.setattr(train_lightning.loaders, "__defaults__", (10,))

    with pytest.raises(ConfigError, match="batch_size=20 and this run has 10"):
        train_lightning.fit(tmp_path, ckpt_path=str(out / "each" / "step=6.ckpt"))


def test_a_checkpoint_without_a_position_is_refused(tmp_path):
    plugins = [HoldfastCheckpointIO()]
    train_lightning.fit(tmp_path, strategy="auto", plugins=plugins, max_epochs=1)

    with pytest.raises(ConfigError, match="load_from_checkpoint"):
        train_lightning.fit(tmp_path / "on", ckpt_path=str(tmp_path / "checkpoints" / "last.ckpt"))


# -- what is not supported


class Manual(train_lightning.Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(train_lightning.Module):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


class Lbfgs(train_lightning.Module):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class MetricObject(train_lightning.Module):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.accuracy(self.net(x), y)
        self.log("accuracy", self.accuracy)
        return super().training_step(batch, batch_idx)


class Summed(train_lightning.Module):
    def training_step(self, batch, batch_idx):
        self.log("samples", float(len(batch[0])), reduce_fx="sum")
        return super().training_step(batch, batch_idx)


class Nothing(train_lightning.Module):
    def training_step(self, batch, batch_idx):
        return None


class OwnClosure(train_lightning.Module):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer_closure()


@pytest.mark.parametrize(
    ("module", "options", "error", "match"),
    [
        (Manual, {}, ConfigError, "manual optimization"),
        (TwoOptimizers, {}, Exception, "optimizer"),
        (Lbfgs, {}, ConfigError, "LBFGS"),
        (MetricObject, {}, ScriptError, "torchmetrics.functional"),
        (Summed, {}, ScriptError, "reduce_fx=sum"),
        (Nothing, {}, ScriptError, "returned None"),
        (OwnClosure, {}, ScriptError, "closure=optimizer_closure"),
        (None, {"accumulate_grad_batches": 2}, ConfigError, "larger batch_size"),
        (None, {"sync_batchnorm": True}, ConfigError, "sync_batchnorm"),
        (None, {"max_time": "00:01:00:00"}, ConfigError, "max_time"),
        (None, {"callbacks": GradientAccumulationScheduler({1: 2})}, ConfigError, "GradientAccumulationScheduler"),
        (None, {"callbacks": StochasticWeightAveraging(0.1)}, ConfigError, "StochasticWeightAveraging"),
        (None, {"callbacks": ModelCheckpoint(train_time_interval=datetime.timedelta(1))}, ConfigError, "clock"),
        (None, {"strategy": HoldfastStrategy(spares=1)}, ConfigError, "--spares"),
        (None, {"strategy": HoldfastStrategy(strategy="restart")}, ConfigError, "--strategy restart"),
        (None, {"strategy": HoldfastStrategy(guard="heal")}, ConfigError, "--guard heal"),
        (None, {"strategy": HoldfastStrategy(resume=True, checkpoint_dir="x")}, ConfigError, "ckpt_path"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_what_is_not_supported_is_one_clear_line(module, options, error, match, tmp_path):
    given = {
        "strategy": "holdfast",
        "accelerator": "cpu",
        "max_steps": 2,
        "logger": False,
        "default_root_dir": tmp_path,
    }
    given |= {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}

    with pytest.raises(error, match=match) as refused:
        Trainer(**(given | options)).fit((module or train_lightning.Module)(), *train_lightning.loaders())

    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"HOLDFAST_RESPAWNS": "16"}, "--respawn"),
        ({"HOLDFAST_RANK": "7"}, "--respawn"),
        ({"HOLDFAST_CHECKPOINT_DIR": "x"}, "--checkpoint-dir"),
    ],
    ids=["job", "newcomer", "checkpoints"],
)
def test_what_a_job_is_started_with_is_checked_at_the_start(more, match, tmp_path, monkeypatch):
    worker = {"HOLDFAST_RUN_DIR": str(tmp_path), "HOLDFAST_RANK": "0", "HOLDFAST_RANKS": "0"}
    for name, value in (worker | more).items():
        monkeypatch.setenv(name, value)

    with pytest.raises(ConfigError, match=match):
        train_lightning.fit(tmp_path)


def test_a_second_training_in_a_job_is_refused(monkeypatch):
    monkeypatch.setattr(support, "_trainings", [])
    monkeypatch.setenv("HOLDFAST_RUN_DIR", "x")
    support.check_first_training()

    with pytest.raises(ConfigError, match=r"a second trainer\.fit"):
        support.check_first_training()


def test_prepare_data_runs_in_one_process_after_another(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(agreement, "_LONGEST_TURN_S", 0.1)

    assert agreement.in_turn(agreement.in_turn(lambda: "done"))() == "done", "wrapped again by trainer.validate"
    with pytest.raises(JobError, match="prepare_data"):
        agreement.in_turn(lambda: agreement.in_turn(print)())()  # the first turn has not ended


def test_a_scheduler_that_fabric_does_not_know_is_refused():
    fabric = Fabric(accelerator="cpu", strategy="holdfast")
    fabric.launch()
    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(train_lightning.loaders()[0])

    x, y = next(iter(loader))
    fabric.backward(torch.nn.functional.cross_entropy(model(x), y))

    with pytest.raises(ConfigError, match="scheduler=scheduler"):
        optimizer.step()


def test_a_reduction_of_a_slice_in_fabric_is_refused():
    fabric = Fabric(accelerator="cpu", strategy="holdfast")
    fabric.launch()
    model = torch.nn.Linear(8, 3)
    model, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    slices = iter(fabric.setup_dataloaders(train_lightning.loaders()[0]))
    loss = model(next(slices)[0]).mean()

    with pytest.raises(ScriptError, match=r"loader\.holdfast\.log"):
        fabric.all_reduce(loss)


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.utils.data.default_convert([([0.0] * 8, 1)] * 40)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda data: DataLoader(data, batch_size=20, sampler=WeightedRandomSampler([1.0] * 80, 80)), "sampler"),
        (lambda data: DataLoader(Stream(), batch_size=20), "IterableDataset"),
        (lambda data: {"a": DataLoader(data, batch_size=20), "b": DataLoader(data, batch_size=20)}, "one training"),
    ],
    ids=["sampler", "stream", "several"],
)
def test_data_that_cannot_be_sliced_is_refused(change, match, tmp_path):
    loader, _ = train_lightning.loaders()
    trainer = Trainer(strategy="holdfast", accelerator="cpu", max_steps=2, logger=False, default_root_dir=tmp_path)

    with pytest.raises(ConfigError, match=match):
        trainer.fit(train_lightning.Module(), change(loader.dataset))


# -- the checkpoint plugin, alone


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_the_checkpoint_plugin_works_with_any_strategy_and_falls_back(tmp_path, capfd):
    def trainer(**options):
        return Trainer(
            strategy="auto",
            accelerator="cpu",
            plugins=[HoldfastCheckpointIO()],
            callbacks=[ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=2)],
            max_steps=6,
            logger=False,
            enable_progress_bar=False,
            **options,
        )

    trainer().fit(train_lightning.Module(), *train_lightning.loaders())
    damage(tmp_path / "step=6.ckpt")
    resumed = trainer()
    resumed.fit(train_lightning.Module(), *train_lightning.loaders(), ckpt_path=tmp_path / "step=6.ckpt")

    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("holdfast: ")]
    assert len(said) == 1
    assert "step=6.ckpt is damaged" in said[0]
    assert "loading" in said[0]
    assert "step=4.ckpt" in said[0]
    assert resumed.global_step == 6


class Bomb:
    def __reduce__(self):
        return (os.kill, (os.getpid(), signal.SIGKILL))


def test_nothing_is_unpickled_before_its_digest_is_verified(tmp_path):
    path, plugin = tmp_path / "a.ckpt", HoldfastCheckpointIO()
    torch.save(Bomb(), path)
    with pytest.raises(CheckpointCorrupt, match="has no digest"):
        plugin.load_checkpoint(path, weights_only=False)
    plugin.save_checkpoint({"x": 1}, path)
    torch.save(Bomb(), path)

    with pytest.raises(CheckpointCorrupt, match="is damaged"):
        plugin.load_checkpoint(path, weights_only=False)


def test_a_checkpoint_without_a_digest_can_be_loaded_on_request(tmp_path):
    torch.save({"x": 1}, tmp_path / "a.ckpt")

    assert HoldfastCheckpointIO(require_digest=False).load_checkpoint(tmp_path / "a.ckpt") == {"x": 1}


@pytest.mark.parametrize("strikes", range(1, 7))
def test_a_save_that_is_killed_anywhere_leaves_the_old_checkpoint_or_the_new_one(tmp_path, monkeypatch, strikes):
    path, plugin = tmp_path / "last.ckpt", HoldfastCheckpointIO()
    plugin.save_checkpoint({"x": "old"}, path)
    calls = []

    def strike(original):
        def called(*arguments):
            calls.append(original)
            if len(calls) == strikes:
                raise KeyboardInterrupt
            return original(*arguments)

        return called

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", strike(os.fsync))
        patch.setattr(Path, "replace", strike(Path.replace))
        with pytest.raises(KeyboardInterrupt):
            plugin.save_checkpoint({"x": "new"}, path)

    found = HoldfastCheckpointIO(fallback=False).load_checkpoint(path)
    assert found in ({"x": "old"}, {"x": "new"})
    plugin.save_checkpoint({"x": "newer"}, path)
    assert plugin.load_checkpoint(path) == {"x": "newer"}
    assert {one.name for one in tmp_path.iterdir()} == {"last.ckpt", "last.ckpt.digest.json"}


def test_a_link_to_a_checkpoint_is_verified_like_the_checkpoint(tmp_path):
    plugin = HoldfastCheckpointIO(fallback=False)
    plugin.save_checkpoint({"x": 1}, tmp_path / "a.ckpt")
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")

    assert plugin.load_checkpoint(tmp_path / "last.ckpt") == {"x": 1}
    damage(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointCorrupt, match="is damaged"):
        plugin.load_checkpoint(tmp_path / "last.ckpt")


def test_a_checkpoint_that_was_never_saved_is_not_replaced_by_another(tmp_path):
    plugin = HoldfastCheckpointIO()
    plugin.save_checkpoint({"x": 1}, tmp_path / "a.ckpt")

    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(tmp_path / "b.ckpt")


def test_a_checkpoint_and_its_digest_are_removed_together(tmp_path):
    plugin = HoldfastCheckpointIO()
    plugin.save_checkpoint({"x": 1}, tmp_path / "a.ckpt")

    plugin.remove_checkpoint(tmp_path / "a.ckpt")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("strategy", "variables"),
    [
        (lambda: "holdfast", {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "4"}),
        (lambda: "holdfast", {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4", "SLURM_JOB_NAME": "job"}),
        (HoldfastStrategy, {"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "job"}),  # Lightning refuses --ntasks otherwise
    ],
)
def test_lightning_sees_a_world_of_one_under_any_launcher(strategy, variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    trainer = Trainer(strategy=strategy(), accelerator="cpu", logger=False)

    assert isinstance(trainer._accelerator_connector.cluster_environment, HoldfastEnvironment)
    assert trainer.world_size == 1
    assert trainer.num_devices == 1
