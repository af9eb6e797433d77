"""A plain Lightning script: train on handwritten digits, evaluate after each epoch, keep the best checkpoint.

``lightning_after.py`` beside it is the same script with one line changed.

Run:
    python examples/frameworks/lightning_before.py
"""

import hashlib

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    raise SystemExit("the images of this example come with scikit-learn: pip install scikit-learn") from None


class Digits(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        accuracy = (self.net(x).argmax(1) == y).float().mean()
        self.log("accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)]


seed_everything(0)
images, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
training, held_out = torch.utils.data.Subset(dataset, range(1500)), torch.utils.data.Subset(dataset, range(1500, 1797))
best = ModelCheckpoint(monitor="accuracy", mode="max")
trainer = Trainer(max_epochs=4, accelerator="cpu", strategy="auto", gradient_clip_val=1.0, callbacks=[best])
model = Digits()
trainer.fit(model, DataLoader(training, batch_size=60, shuffle=True), DataLoader(held_out, batch_size=297))

if trainer.is_global_zero:
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print(f"{trainer.global_step} steps, best accuracy {best.best_model_score:.4f}, weights {weights}")
