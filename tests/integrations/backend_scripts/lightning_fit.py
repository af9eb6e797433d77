"""A LightningModule whose training loss has ``sync_dist=True``, with a metric of torchmetrics in validation."""

import lightning
import torch
import torchmetrics
from common import BACKEND, SIZE, finished, samples, small_model
from lightning.pytorch.strategies import DDPStrategy


class Module(lightning.LightningModule):
    """The network, its losses and its metric."""

    def __init__(self):
        super().__init__()
        self.net = small_model()
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch, index):
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.error(self.net(x), y)
        self.log("error", self.error)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


module = Module()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=SIZE,
    strategy=DDPStrategy(process_group_backend=BACKEND),
    max_epochs=2,
    limit_train_batches=4,
    limit_val_batches=2,
    num_sanity_val_steps=0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    use_distributed_sampler=True,
    log_every_n_steps=1,
)
loader = torch.utils.data.DataLoader(samples(48), batch_size=2)
trainer.fit(module, loader, torch.utils.data.DataLoader(samples(32), batch_size=2))
metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
finished(
    module.net,
    steps=trainer.global_step,
    metrics=metrics,
    environment=type(trainer.strategy.cluster_environment).__name__,
)
