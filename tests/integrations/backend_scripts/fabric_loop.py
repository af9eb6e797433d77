"""A training loop with Lightning Fabric that gathers the losses of the ranks."""

import lightning
import torch
from common import BACKEND, SIZE, finished, samples, small_model
from lightning.fabric.strategies import DDPStrategy

fabric = lightning.Fabric(accelerator="cpu", devices=SIZE, strategy=DDPStrategy(process_group_backend=BACKEND))
fabric.launch()
model = small_model()
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(samples(48), batch_size=2))
steps, losses = 0, []
for x, y in loader:
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    fabric.backward(loss)
    optimizer.step()
    steps += 1
    losses.append(fabric.all_gather(loss.detach()).mean().item())
    fabric.barrier()
finished(model.module, steps=steps, losses=losses, mean=fabric.all_reduce(loss.detach(), reduce_op="mean").item())
