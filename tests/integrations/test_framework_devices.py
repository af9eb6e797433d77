"""Frameworks choose a model's device. None of them is made to train on the CPU by Holdfast where the script wants a GPU."""

import pytest
import torch

NEEDS = ("accelerate", "lightning")


def test_lightning_on_another_device_than_the_cpu_is_refused_in_one_line():
    from lightning.fabric import Fabric
    from lightning.pytorch import Trainer
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.demos.boring_classes import BoringModel

    from holdfast.errors import ConfigError

    class OtherAccelerator(CPUAccelerator):
        """Stands for that of a GPU."""

    trainer = Trainer(
        accelerator=OtherAccelerator(),
        devices=1,
        strategy="holdfast",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
    )
    with pytest.raises(ConfigError, match=r"a device other than the CPU.*pass accelerator='cpu'"):
        trainer.fit(BoringModel())
    with pytest.raises(ConfigError, match=r'needs models in CPU memory: pass Fabric\(accelerator="cpu"\)'):
        Fabric(accelerator=OtherAccelerator(), devices=1, strategy="holdfast").launch()


@pytest.mark.parametrize(("options", "device"), [({}, "cuda"), ({"cpu": True}, "cpu")], ids=["default", "cpu"])
def test_accelerate_trains_on_a_gpu_unless_the_script_says_cpu(monkeypatch, options, device):
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from holdfast.integrations.accelerate import Accelerator

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    states = (AcceleratorState, GradientState, PartialState)
    for state in states:
        state._reset_state()
    try:
        assert Accelerator(**options).device.type == device
    finally:
        for state in states:
            state._reset_state()
