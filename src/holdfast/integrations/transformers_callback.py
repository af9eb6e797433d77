"""A callback for a plain ``transformers.Trainer`` over DDP with the backend ``holdfast``."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from holdfast.distributed import BACKEND, alive
from holdfast.errors import ConfigError, RanksLost
from holdfast.integrations.folders import complete_folder


class HoldfastCallback(TrainerCallback):  # type: ignore[misc]
    """Saves and stops in order, where a plain Trainer over DDP would fail.

    The gradients of DDP survive the loss of a rank, but Transformers also gathers losses and metrics from all ranks of
    the start. So the callback ends training after the step: the lowest survivor saves a checkpoint, which
    ``resume_from_checkpoint`` takes on as many ranks as are left. To continue without a stop, use
    :class:`holdfast.integrations.transformers.Trainer`.

    After SIGTERM on any rank, all ranks save a checkpoint after the same step and stop.

    ::

        dist.init_process_group("holdfast")
        args = TrainingArguments(...)
        Trainer(model=model, args=args, train_dataset=dataset, callbacks=[HoldfastCallback()]).train()
    """

    def __init__(self) -> None:
        self._is_asked = False
        self._before: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the backend, and begin to listen for SIGTERM.

        Raises:
            ConfigError: if the process group has another backend.
        """
        if not dist.is_initialized() or dist.get_backend() != BACKEND:
            raise ConfigError(
                f'HoldfastCallback needs dist.init_process_group("{BACKEND}") before TrainingArguments is created'
            )
        self._is_asked = False
        self._before = signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, *_: Any) -> None:
        self._is_asked = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let all ranks stop if one was asked to, and end training if ranks were lost.

        Raises:
            SystemExit: if ranks were lost; the lowest survivor has saved a checkpoint.
        """
        flag = torch.tensor([int(self._is_asked)])
        with contextlib.suppress(RanksLost):  # `alive` knows it, too
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        survivors = alive()
        if len(survivors) < dist.get_world_size():
            self._end(Path(args.output_dir), state, survivors, **kwargs)
        if flag.item():
            control.should_save = control.should_training_stop = True
            if dist.get_rank() == 0:
                sys.stderr.write(f"holdfast: received SIGTERM: saving and stopping after step {state.global_step}\n")

    def _end(self, output_dir: Path, state: Any, survivors: tuple[int, ...], **kwargs: Any) -> None:
        folder = output_dir / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if dist.get_rank() == survivors[0]:
            _save(folder, state, **kwargs)
        dist.barrier()  # no rank leaves before the checkpoint is complete
        lost = sorted(set(range(dist.get_world_size())) - set(survivors))
        named = ", ".join(map(str, lost))
        raise SystemExit(
            f"holdfast: lost rank {named}; the state after step {state.global_step} is in {folder}: resume from it on"
            f" {len(survivors)} ranks"
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the handler of SIGTERM."""
        signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)


def _save(folder: Path, state: Any, *, model: Any, optimizer: Any, lr_scheduler: Any, **_: Any) -> None:
    """Save a checkpoint as the Trainer does; only the random states are missing, which each rank has its own of."""
    whole = getattr(model, "module", model)
    save: Callable[[Path], Any] = whole.save_pretrained
    with complete_folder(folder, replaces=True) as part:
        save(part)
        torch.save(optimizer.state_dict(), part / "optimizer.pt")
        torch.save(lr_scheduler.state_dict(), part / "scheduler.pt")
        state.save_to_json(str(part / "trainer_state.json"))
