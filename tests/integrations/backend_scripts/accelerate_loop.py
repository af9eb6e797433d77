"""A training loop with Accelerate that gathers losses, metrics and objects."""

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import gather_object
from common import BACKEND, finished, samples, small_model

accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=BACKEND)])
model = small_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = torch.utils.data.DataLoader(samples(48), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps, losses = 0, []
for x, y in loader:
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    steps += 1
    losses.append(accelerator.gather_for_metrics(loss.repeat(2)).mean().item())
    mean = accelerator.reduce(loss.detach(), reduction="mean").item()
    objects = gather_object([f"rank {accelerator.process_index}"])
    accelerator.wait_for_everyone()
finished(accelerator.unwrap_model(model), steps=steps, losses=losses, last_mean=mean, objects=objects)
