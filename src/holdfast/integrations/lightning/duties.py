"""What the lead alone writes, and how the next lead completes it if the first one fails meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from holdfast.integrations.lightning.loggers import LoggerRelay
from holdfast.session.session import Session


class LeadDuties:
    """Saves and removes checkpoints on the lead; the other workers remember them until the next step is committed.

    All workers call the same methods in the same order. If the lead fails in between, the step that follows is not
    committed with it, so the new lead notices, and its model is still the one that was to be saved.
    """

    def __init__(self, session: Session, model: nn.Module) -> None:
        self._session = session
        self._was_lead = session.is_lead
        self._loggers = LoggerRelay(lambda: self._was_lead)
        self._model = model
        self._undone: list[Callable[[], None]] = []
        self._initial_files: frozenset[str] = frozenset()
        self._exists: dict[str, bool] = {}

    def begin(self, trainer: Trainer) -> None:
        """Prepare the callbacks and loggers for a lead that may change."""
        self._loggers.begin(trainer.loggers)
        for callback in trainer.callbacks:
            if isinstance(callback, ModelCheckpoint):
                # As Lightning has it, the lead alone looks at the directory and broadcasts. Here each worker knows which
                # files there were before training, and which ones the job has saved or removed since.
                paths = Path(callback.dirpath or ".").glob("*")
                self._initial_files |= {str(path) for path in paths}
                callback.file_exists = lambda filepath, trainer: self._knows(filepath)

    def _knows(self, filepath: str | Path) -> bool:
        return self._exists.get(str(filepath), str(filepath) in self._initial_files)

    def save(self, checkpoint_io: Any, checkpoint: dict[str, Any], path: str | Path, options: Any) -> None:
        """Write a checkpoint, on the lead."""
        self._exists[str(path)] = True
        arguments = {} if options is None else {"storage_options": options}
        if self._session.is_lead:
            with self._session.busy():
                checkpoint_io.save_checkpoint(checkpoint, path, **arguments)
            return
        kept = _frozen(checkpoint, {buffer.data_ptr() for buffer in self._model.buffers()})
        self._undone.append(lambda: checkpoint_io.save_checkpoint(kept, path, **arguments))

    def remove(self, checkpoint_io: Any, path: str | Path) -> None:
        """Remove a checkpoint, on the lead."""
        self._exists[str(path)] = False
        if self._session.is_lead:
            checkpoint_io.remove_checkpoint(path)
        else:
            self._undone.append(lambda: checkpoint_io.remove_checkpoint(path))

    def take_over(self, checkpoint_io: Any) -> None:
        """If this worker has become the lead, do what the previous one may not have completed."""
        if not self._session.is_lead or self._was_lead:
            return
        self._was_lead = True
        with self._session.busy():
            for do in self._undone:
                do()
            self._loggers.take_over()

    def forget(self) -> None:
        """A step is committed with this lead, which has completed everything before the step."""
        self._undone.clear()
        self._loggers.forget()


def _frozen(state: Any, buffers: set[int]) -> Any:
    """Return a state that stays as it is until the next update: before it, forward passes change buffers."""
    if isinstance(state, torch.Tensor):
        return state.clone() if state.data_ptr() in buffers else state
    if isinstance(state, dict):
        return {key: _frozen(value, buffers) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_frozen(value, buffers) for value in state)
    return state
