"""Hugging Face Accelerate on Holdfast: an ``Accelerator`` whose ``prepare`` makes the script's loop fault-tolerant.

To Accelerate each process trains alone, on the mini-batch of the whole job. Holdfast distributes its slices beneath.
So ``num_processes`` is 1, nothing has to be gathered, and every process evaluates alone with the same result.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import accelerate
from accelerate.state import DistributedType, PartialState
from torch import nn, optim
from torch.utils.data import BatchSampler, DataLoader

from holdfast.config import Settings
from holdfast.engine.start_rank import leads_at_start, rank_at_start
from holdfast.errors import ConfigError
from holdfast.integrations.alone import seen_alone
from holdfast.integrations.folders import complete_folder
from holdfast.session.prepared import PreparedLoader, prepare
from holdfast.session.prepared_objects import PreparedOptimizer, PreparedScheduler
from holdfast.session.session import Session


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # accelerate has no types here
    """``accelerate.Accelerator`` for a loop that survives failures; the only line of a script that changes is its import.

    :meth:`prepare` takes the model, the optimizer and the training ``DataLoader`` together, and schedulers and other
    loaders with them. The first ``DataLoader`` is the one that is trained on; its batch is the mini-batch of all workers,
    times ``gradient_accumulation_steps``. Settings come from ``holdfast run`` or ``HOLDFAST_*`` variables.

    ``is_main_process`` is true on the lead, the lowest surviving rank; it changes when that worker dies.

    Args:
        *args: As for ``accelerate.Accelerator``.
        **kwargs: As for ``accelerate.Accelerator``.

    Raises:
        ConfigError: if the processes were started for ``torch.distributed``, or for an option that Holdfast does not
            support: ``mixed_precision="fp16"``, DeepSpeed, FSDP or Megatron.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with seen_alone():  # cpu=True and others make the RANK and WORLD_SIZE that they find a process group
            super().__init__(*args, **kwargs)
        if self.state.distributed_type is not DistributedType.NO:
            raise ConfigError(
                f"accelerate has set up {self.state.distributed_type.value}, but Holdfast distributes the work itself: start"
                " the script with `holdfast run` instead of `accelerate launch`, without RANK and WORLD_SIZE"
            )
        if self.mixed_precision not in ("no", "bf16"):
            raise ConfigError(f"mixed_precision={self.mixed_precision!r} is not supported: use 'bf16' or 'no'")
        self._session: Session | None = None
        self._loader: PreparedLoader | None = None
        self._trackers_given: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._settings = Settings.from_env()
        self._rank = rank_at_start(self._settings)
        self._note_lead()

    # -- preparing

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Return the objects for the loop, in the order given.

        Args:
            *args: One model, one optimizer and its training ``DataLoader``; schedulers; further loaders, for evaluation.
                Without a model, only loaders for evaluation.
            device_placement: Not supported.

        Raises:
            ConfigError: if they are incomplete, or prepared a second time.
        """
        loaders = [one for one in args if isinstance(one, DataLoader)]
        if device_placement is not None:
            raise ConfigError("device_placement is not supported: move model and data in the script")
        if loaders and len(loaders) == len(args) and self._session is not None:
            return args if len(args) > 1 else args[0]
        model, optimizer = self._one(args, nn.Module, "model"), self._one(args, optim.Optimizer, "optimizer")
        if not loaders:
            raise ConfigError("accelerator.prepare needs the training DataLoader together with model and optimizer")
        if self._session is not None:
            raise ConfigError("accelerator.prepare was called twice with a model; prepare everything in one call")
        train, schedulers = loaders[0], [one for one in args if hasattr(one, "get_last_lr")]
        super().prepare_model(model)
        steps = self.gradient_accumulation_steps
        model, stepped, loader, *rest = prepare(
            model, optimizer, _larger(train, steps), *([schedulers] if schedulers else []), accumulate=steps
        )
        self._loader = _AcceleratedLoader(loader, self)
        self._session = loader.session
        of_schedulers: list[PreparedScheduler] = rest[0] if rest else []
        self._optimizers.append(_AcceleratedOptimizer.of(stepped))
        self._schedulers.extend(of_schedulers)
        replaced: dict[int, Any] = {id(optimizer): self._optimizers[-1], id(train): self._loader}
        replaced |= {id(old): new for old, new in zip(schedulers, of_schedulers, strict=True)}
        if len(loaders) > 1 and self.is_main_process:
            sys.stderr.write(
                "holdfast: the first DataLoader is trained on; every worker iterates the others completely\n"
            )
        return tuple(replaced.get(id(one), one) for one in args)

    def _one(self, args: Sequence[Any], kind: type, name: str) -> Any:
        matches = [one for one in args if isinstance(one, kind)]
        if len(matches) != 1:
            raise ConfigError(
                f"accelerator.prepare needs one {name} together with the training loader, got {len(matches)}"
            )
        return matches[0]

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Refuse for the training loader: Holdfast resumes at the exact sample itself.

        Raises:
            ConfigError: for the training loader.
        """
        if dataloader is self._loader:
            raise ConfigError(
                "skip_first_batches is not supported on the training loader: save with --checkpoint-dir and resume with"
                " --resume, which continues at the exact sample"
            )
        return super().skip_first_batches(dataloader, num_batches)

    # -- in the loop

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Set ``sync_gradients``: it is true at the last slice of an optimizer step."""
        self._do_sync()
        yield

    def _do_sync(self) -> None:
        self.gradient_state._set_sync_gradients(self._loader is None or self._loader.last)

    # -- the lead

    @property
    def is_main_process(self) -> bool:
        """Whether this is the lead, the lowest surviving rank."""
        return self._note_lead()

    @property
    def is_local_main_process(self) -> bool:
        """The same: there is one lead in the whole job."""
        return self._note_lead()

    def _note_lead(self) -> bool:
        """Return whether this worker leads, and let Accelerate's own state know, which decides what is printed."""
        is_lead = leads_at_start(self._settings) if self._session is None else self._session.is_lead
        state = PartialState()
        state.process_index = state.local_process_index = 0 if is_lead else max(1, self._rank)
        return is_lead

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorate a function that only the lead runs; the others return None."""
        if function is None:
            raise ConfigError("accelerator.on_main_process must be called with a function")

        @functools.wraps(function)
        def on_lead(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self.is_main_process else None

        return on_lead

    on_local_main_process = on_main_process

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the lead."""
        if self.is_main_process:
            print(*args, **kwargs)  # noqa: T201  # what the script asks for

    # -- writing, on the lead only

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:
        """Start the trackers on the lead; a later lead starts them when it logs first."""
        self._trackers_given = args, kwargs
        if self.is_main_process:
            super().init_trackers(*args, **kwargs)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Log to the trackers, on the lead."""
        if not self.is_main_process:
            return
        if not self.trackers and self._trackers_given is not None:
            args, kwargs = self._trackers_given
            super().init_trackers(*args, **kwargs)
        super().log(values, step=step, log_kwargs=log_kwargs or {})

    def end_training(self) -> None:
        """End the trackers, on the lead."""
        if self.is_main_process:
            super().end_training()

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save an object, on the lead."""
        if self.is_main_process:
            super().save(obj, f, safe_serialization=safe_serialization)

    def save_model(self, model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save a model, on the lead."""
        if self.is_main_process:
            super().save_model(model, save_directory, *args, **kwargs)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save everything to a folder, on the lead: to another name first, so that a folder is complete or absent.

        It holds no position in the data; for that use ``--checkpoint-dir``.

        Raises:
            ConfigError: with automatic checkpoint naming, because only one worker counts.
        """
        if self.project_configuration.automatic_checkpoint_naming or output_dir is None:
            raise ConfigError("automatic_checkpoint_naming is not supported: pass a directory to save_state")
        if not self.is_main_process:
            return None
        busy = contextlib.nullcontext() if self._session is None else self._session.busy()
        with busy, complete_folder(Path(output_dir), replaces=True) as part:
            super().save_state(str(part), safe_serialization=safe_serialization, **kwargs)
        return str(output_dir)


class _AcceleratedLoader(PreparedLoader):
    """The training loader: it tells Accelerate which worker leads now."""

    def __init__(self, loader: PreparedLoader, accelerator: Accelerator) -> None:
        super().__init__(loader._loop, loader._loader)
        self._accelerator = accelerator

    def __iter__(self) -> Iterator[Any]:
        """Yield one slice after another."""
        for inputs in super().__iter__():
            self._accelerator._note_lead()
            self._accelerator.gradient_state._set_sync_gradients(self.last)
            yield inputs


class _AcceleratedOptimizer(PreparedOptimizer):
    """The optimizer, with what scripts ask of Accelerate's."""

    step_was_skipped = False

    @classmethod
    def of(cls, prepared: PreparedOptimizer) -> _AcceleratedOptimizer:
        return cls(prepared._loop, prepared.optimizer, prepared._number, prepared._count)


def _larger(loader: DataLoader[Any], times: int) -> DataLoader[Any]:
    """Return a loader whose batch is ``times`` as large: one optimizer step, cut into slices by the session."""
    if times == 1:
        return loader
    if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        raise ConfigError(
            "gradient_accumulation_steps needs a DataLoader with a batch_size; with a batch_sampler, let it give batches of"
            " the size of an optimizer step"
        )
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size * times,
        sampler=loader.sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


__all__ = ["Accelerator"]
