"""A Lightning script with what users have: ``train_lightning.py OUT``; ``STRATEGY`` is that of its trainer.

Every process that reaches the end writes ``OUT/done-RANK.json``. ``KILL`` names bare kills, as ``RANK:PLACE:TIME`` with
commas between: the process kills itself at the TIME-th save, evaluation, forward or backward pass.
"""

import hashlib
import json
import os
import signal
import sys
from collections import OrderedDict
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH, EPOCHS = 80, 20, 3
RANK = os.environ.get("RANK", "0")
seen: dict[str, int] = {}


def reach(place):
    """Kill this process if its environment says so."""
    seen[place] = seen.get(place, 0) + 1
    if f"{RANK}:{place}:{seen[place]}" in os.environ.get("KILL", "").split(","):
        os.kill(os.getpid(), signal.SIGKILL)


class Saving:
    """What is saved with each checkpoint; pickling it is a place to be killed at."""

    def __reduce__(self):
        reach("save")
        return (OrderedDict, ())  # what torch.load allows by itself


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return (x + 0.01 * torch.randn_like(x) if self.trainer.training else x), y

    def training_step(self, batch, batch_idx):
        x, y = batch
        reach("forward")
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log_dict({"size": float(len(x)), "batch": float(batch_idx)}, on_step=True, on_epoch=False)
        return {"loss": loss, "more": 1}

    def on_after_backward(self):
        reach("backward")

    def on_before_optimizer_step(self, optimizer):
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])
        self.log("grad_norm", norm, on_step=True, on_epoch=False)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        if batch_idx:
            reach("evaluate")
        self.log("val_loss", F.cross_entropy(self.net(x), y), sync_dist=True)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["saving"] = Saving()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [
            {"scheduler": scheduler, "interval": "step"},
            {"scheduler": plateau, "monitor": "val_loss"},
        ]


class Recorder(Callback):
    """Keeps what callbacks receive."""

    def __init__(self):
        self.losses = []
        self.norms = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append((float(outputs["loss"]), float(trainer.callback_metrics["train_loss"])))


def loaders(batch=BATCH):
    source = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(SAMPLES, 8, generator=source), torch.randint(0, 3, (SAMPLES,), generator=source))
    return DataLoader(data, batch_size=batch, shuffle=True), DataLoader(data, batch_size=40)


def sha256(module):
    state = module.state_dict()
    return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()


def fit(out, strategy="holdfast", ckpt_path=None, **options):
    """Train; return the trainer and what callbacks received."""
    seed_everything(0, verbose=False)
    recorder = Recorder()
    best = ModelCheckpoint(f"{out}/checkpoints", monitor="val_loss", save_top_k=2, save_last=True)
    each = ModelCheckpoint(f"{out}/each", filename="{step}", every_n_train_steps=3, save_top_k=-1)
    defaults = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "gradient_clip_val": 0.5,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "log_every_n_steps": 1,
        "devices": int(os.environ.get("DEVICES", "1")),
    }
    logger = CSVLogger(out, name="logs", flush_logs_every_n_steps=1)
    callbacks = [recorder, best, each, LearningRateMonitor("step")]
    trainer = Trainer(strategy=strategy, logger=logger, callbacks=callbacks, **(defaults | options))
    trainer.fit(Module(), *loaders(), ckpt_path=ckpt_path)
    return trainer, recorder


def result(trainer, recorder):
    best = next(one for one in trainer.checkpoint_callbacks if one.monitor)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "sha256": sha256(trainer.lightning_module),
        "metrics": metrics,
        "losses": recorder.losses,
        "norms": recorder.norms,
        "best": best.best_model_path,
        "steps": trainer.global_step,
    }


if __name__ == "__main__":
    out = Path(sys.argv[1])
    done = result(*fit(out, os.environ.get("STRATEGY", "holdfast"), os.environ.get("FROM") or None))
    (out / f"done-{RANK}.json").write_text(json.dumps(done))
