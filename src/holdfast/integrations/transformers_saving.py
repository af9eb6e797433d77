"""What the Trainer saves: the lead writes it, and if the lead fails meanwhile, its successor does."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.trainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from holdfast.integrations.folders import complete_folder, remove_unfinished
from holdfast.integrations.transformers_files import read_job, write_job

_CHECKPOINT = "checkpoint "


class SavingTrainer(transformers.Trainer):  # type: ignore[misc]
    """The part of :class:`~holdfast.integrations.transformers_trainer.Trainer` that saves models and checkpoints."""

    _owed: dict[str, Callable[[], None]]
    _best: dict[str, torch.Tensor] | None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; the lead does, and if it fails meanwhile, the next one at the end of the script."""
        if _internal_call:
            super().save_model(output_dir, _internal_call=True)
            return
        folder = output_dir or self.args.output_dir
        self._save_once(f"model {folder}", lambda: self._write_model(folder))

    def _save_once(self, name: str, write: Callable[[], None]) -> None:
        """Let the lead write something; the others keep in mind that it may fail before it is complete."""
        self._follow_lead()
        self._owed[name] = write
        if self._is_lead:
            self._complete_saves()

    def _complete_saves(self) -> None:
        """As the lead, write what was not completed; elsewhere nothing."""
        if not (self._owed and self._is_lead):
            return
        with self._busy():
            while self._owed:
                name = next(iter(self._owed))
                self._owed[name]()
                del self._owed[name]

    def _write_model(self, folder: str) -> None:
        with complete_folder(Path(folder)) as part:
            super().save_model(str(part))
            if self._holdfast is not None:
                self._holdfast.session.reach("save")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint; its folder appears once it is complete."""
        state = self.state
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        folder = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(folder)
            if self.args.load_best_model_at_end:  # the lead may fail before it has written them
                self._best = _copied(self.model.state_dict())
        self._save_once(f"{_CHECKPOINT}{folder}", lambda: self._write_checkpoint(folder))

    def _write_checkpoint(self, folder: Path) -> None:
        session = self.holdfast_loop.session
        if session.job_name and read_job(folder).get("job") == session.job_name:
            return  # the previous lead failed after it had written it
        remove_unfinished(folder.parent, PREFIX_CHECKPOINT_DIR)
        with complete_folder(folder, replaces=True) as part:
            self.save_model(str(part), _internal_call=True)
            session.reach("save")
            if not self.args.save_only_model:
                self._save_optimizer_and_scheduler(str(part))
                self._save_rng_state(str(part))
            write_job(part, job=session.job_name, slices=session.num_slices)
            self._note_callbacks()
            self.state.save_to_json(str(part / transformers.trainer.TRAINER_STATE_NAME))
        rotate_checkpoints(
            output_dir=str(folder.parent),
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=True,
        )

    def _note_callbacks(self) -> None:
        """Put the state of callbacks into that of the Trainer."""
        kept: dict[str, Any] = {}
        for callback in [*self.callback_handler.callbacks, self.control]:
            if not isinstance(callback, ExportableState):
                continue
            name, callback_state = type(callback).__name__, callback.state()
            if isinstance(self.state.stateful_callbacks.get(name), list):
                kept.setdefault(name, []).append(callback_state)
            else:
                kept[name] = callback_state
        self.state.stateful_callbacks |= kept

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the model, with the arguments as the script gave them."""
        steps, self.args.gradient_accumulation_steps = self.args.gradient_accumulation_steps, self._accumulate
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.args.gradient_accumulation_steps = steps

    def _load_best_model(self) -> None:
        """Load the best model: from memory, because the lead may have failed while it wrote that checkpoint."""
        if self._best is not None and self.state.best_global_step == self.state.global_step:
            return  # the model has these weights
        self._owed = {name: functools.partial(_report_lost, name) for name in self._owed}  # it has other weights now
        if self._best is None:
            super()._load_best_model()
        else:
            self.model.load_state_dict(self._best)


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a model's state, in which tied weights stay one tensor."""
    copies: dict[tuple[int, Any], Any] = {}
    return {
        name: copies.setdefault((value.data_ptr(), value.shape), value.detach().clone())
        if isinstance(value, torch.Tensor)
        else value
        for name, value in state.items()
    }


def _report_lost(name: str) -> None:
    folder = Path(name.removeprefix(_CHECKPOINT))
    if not folder.exists():
        remove_unfinished(folder.parent, PREFIX_CHECKPOINT_DIR)
        sys.stderr.write(f"holdfast: {name} is missing, because its writer was lost\n")
