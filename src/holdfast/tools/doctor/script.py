"""Checks of a script's own model: its first step is computed several times, then each layer alone; nothing is trained.

The session of the script yields its first slice once for each condition (:class:`ScriptInspector`), as it does after a failure. So
the checks cover the script's own forward pass, loss and gradients.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.base.torch_private import tree_flatten, tree_map
from holdfast.data.plan import BatchCutter, MiniBatch, PlanCursor, SamplePlan
from holdfast.data.samples import fetch
from holdfast.data.seeds import generator_states, seed_slice
from holdfast.errors import ConfigError
from holdfast.models.step import Step
from holdfast.models.trainable import Trainable
from holdfast.models.training_state import model_tensors
from holdfast.tools.doctor.checks import differing, examine, thread_counts, threads_set
from holdfast.tools.doctor.findings import ScriptFindings
from holdfast.tools.doctor.target import DoctorTarget, digests_of, is_misaligned, put_back

_AGAIN = 2
"""Number of repetitions of the step."""
_PATIENCE_S = 300.0


class ScriptInspected(BaseException):
    """Ends the script once all checks are done; ``except Exception`` does not catch it."""


class ScriptInspector:
    """Replaces training; see :attr:`holdfast.engine.reinit_context.Application.looks`.

    Args:
        shared: File for the weights and samples with which the other process must compute.
        briefly: Whether this is the other process: compute once, with the content of that file.
    """

    def __init__(self, shared: Path, *, briefly: bool = False) -> None:
        self.seen = ScriptFindings()
        self._shared = shared
        self._briefly = briefly
        self._inputs: Any = None
        self.device = torch.device("cpu")
        """The device of the script's model."""
        self._loss = torch.zeros(())

    def __call__(self, body: Trainable, plan: SamplePlan, dataset: Any, collate: Any) -> Iterator[Step]:
        """Yield the first step once for each condition, and end the script.

        Raises:
            ConfigError: if the model is a pipeline or sharded.
            Looked: at the end.
        """
        whole = body.whole
        if whole is None:
            raise ConfigError(
                "holdfast doctor checks replicated models, and this one is split: pass the whole model to a Session, without Pipeline or Sharded"
            )
        batch = BatchCutter(plan).mini_batch(0, PlanCursor(epoch=plan.first_epoch, offset=0), plan.members)
        assert batch is not None, "a plan has a first step"
        self._model, self._plan, self._dataset, self._collate = whole.model, plan, dataset, collate
        self._number = min(batch.owners)
        self._buffers = {name: value.clone() for name, value in whole.model.named_buffers()}
        self.device = body.device
        self.seen.parameters, self.seen.samples = body.numel, len(batch.slices[self._number])
        self._use_same_start(batch)
        try:
            yield from self._ways(batch)
            self._examine_layers()
        finally:
            self._rewind()
        raise ScriptInspected

    # -- the step as a whole

    def _ways(self, batch: MiniBatch) -> Iterator[Step]:
        """Yield the step once for each condition, and record the findings about the whole step."""
        findings = self.seen.step
        with _Layers(self._model) as layers:
            yield from self._once(batch)
        self._subjects = layers.subjects()
        first = self._results()
        findings.digests = digests_of(first)
        if self._briefly:
            return
        for _ in range(_AGAIN):
            yield from self._once(batch)
            findings.again = findings.again or differing(first, self._results())
        if findings.again:
            return
        for count in thread_counts():
            with threads_set(count):
                yield from self._once(batch)
            if different := differing(first, self._results()):
                findings.threads[count] = different

    def _once(self, batch: MiniBatch) -> Iterator[Step]:
        step = Step(self, batch, [self._number], 0)
        yield step
        step.check_computed()

    def _results(self) -> dict[str, torch.Tensor]:
        gradients = {
            f"gradient of {name}": p.grad.clone() for name, p in self._model.named_parameters() if p.grad is not None
        }
        buffers = {f"buffer {name}": value.clone() for name, value in self._model.named_buffers()}
        return {"loss": self._loss, **gradients, **buffers}

    # -- called by a step around each slice

    def begin_slice(self, batch: MiniBatch, number: int) -> Any:
        """Start from the beginning of the step, seeded, with the same samples each time."""
        self._rewind()
        seed_slice(self._plan.seed, batch.step, number)
        fetch(self._dataset, batch.slices[number], self._collate)  # for its use of random generators
        self._before = generator_states()
        return _copy(self._inputs)

    def backward(
        self, loss: torch.Tensor, batch: MiniBatch, number: int, *, is_only: bool = True, items: float | None = None
    ) -> None:
        """Compute the gradients of the slice."""
        self.seen.draws["model"] = _drawn(self._before, generator_states())
        loss.backward()
        self._loss = loss.detach().clone()

    def end_slice(
        self, batch: MiniBatch, number: int, metrics: dict[str, torch.Tensor | float], items: float | None = None
    ) -> None:
        """Keep the gradients."""

    def on_device(self, inputs: Any) -> Any:
        """Leave inputs where they are."""
        return inputs

    def log_media(self, *_: Any) -> None:
        """Drop it."""

    def free_memory(self, error: RuntimeError, batch: MiniBatch, number: int) -> bool:
        """Let every error end the computation."""
        return False

    def between_slices(self, batch: MiniBatch) -> None:
        """Seed as in training."""
        seed_slice(self._plan.seed, batch.step, -1)

    def ask_to_stop(self) -> None:
        """Do nothing: the script ends anyway."""

    def compute(self, batch: MiniBatch) -> None:
        """Refuse: split models are rejected before."""
        raise NotImplementedError

    def _rewind(self) -> None:
        put_back(self._model, self._buffers)
        for parameter in self._model.parameters():
            parameter.grad = None

    # -- samples and weights, the same in the other process

    def _use_same_start(self, batch: MiniBatch) -> None:
        """Fetch the samples, twice; make both processes use the samples and weights of one of them."""
        seen, seed = self.seen, self._plan.seed
        fetched = []
        for _ in range(1 if self._briefly else 2):
            seed_slice(seed, batch.step, self._number)
            before = generator_states()
            fetched.append(fetch(self._dataset, batch.slices[self._number], self._collate))
            seen.draws["dataset"] = _drawn(before, generator_states())
        digests = ["".join(digests_of(_tensors(inputs)).values()) for inputs in fetched]
        seen.dataset_again = len(set(digests)) > 1
        seen.samples_digest = digests[0]
        tensors = dict(model_tensors(self._model))
        placed = {"the samples": _tensors(fetched).values(), "the weights": tensors.values()}
        seen.misaligned = [what for what, values in placed.items() if any(map(is_misaligned, values))]
        seen.weights = "".join(digests_of(tensors).values())
        self._inputs = fetched[0]
        if self._briefly:
            self._take(tensors)
        else:
            _write({"weights": tensors, "samples": _tensors(self._inputs)}, self._shared)

    def _take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        shared = _read(self._shared)
        samples = iter(shared["samples"].values())
        self._inputs = tree_map(
            lambda value: next(samples).to(value.device) if isinstance(value, torch.Tensor) else value, self._inputs
        )
        with torch.no_grad():
            for path, tensor in tensors.items():
                tensor.copy_(shared["weights"][path])
        self._buffers = {name: value.clone() for name, value in self._model.named_buffers()}

    # -- each layer alone

    def _examine_layers(self) -> None:
        """Check the leaf layers; containers only if the leaves do not explain a difference of the step."""
        threads = thread_counts()
        leaves = [subject for subject in self._subjects if not _holds_layers(subject)]
        self.seen.layers = [examine(subject, threads, briefly=self._briefly) for subject in leaves]
        if self.seen.step.again and not any(layer.again for layer in self.seen.layers):
            for subject in sorted(self._subjects, key=lambda subject: -subject.name.count(".")):
                if _holds_layers(subject) and (findings := examine(subject, ())).again:
                    self.seen.layers.append(findings)
                    break


class _Layers:
    """Records the first inputs of each module of a model, as a context around a forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> _Layers:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._hook(name), with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in self._calls:
                self._calls[name] = _copy(args), _copy(kwargs)

        return keep

    def subjects(self) -> list[DoctorTarget]:
        """Return the modules that computed, in the order of their first computation."""
        modules = dict(self._model.named_modules())
        return [
            DoctorTarget.of(f"{name or 'the model'} ({type(modules[name]).__name__})", modules[name], *args, **kwargs)
            for name, (args, kwargs) in self._calls.items()
        ]


def _holds_layers(subject: DoctorTarget) -> bool:
    return subject.module is not None and any(True for _ in subject.module.children())


def _copy(tree: Any) -> Any:
    return tree_map(lambda value: value.detach().clone() if isinstance(value, torch.Tensor) else value, tree)


def _tensors(tree: Any) -> dict[str, torch.Tensor]:
    tensors = [value for value in tree_flatten(tree)[0] if isinstance(value, torch.Tensor)]
    return {str(number): value for number, value in enumerate(tensors)}


def _drawn(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names of the generators that were used."""
    return [name for name in before if before[name] != after[name]]


def _write(tensors: Mapping[str, Mapping[str, torch.Tensor]], path: Path) -> None:
    made = path.with_suffix(".new")
    torch.save({part: {name: value.detach().cpu() for name, value in of.items()} for part, of in tensors.items()}, made)
    made.rename(path)


def _read(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Wait for the file of the other process, and return its content.

    Raises:
        ConfigError: if it is not written in time.
    """
    ends_s = time.monotonic() + _PATIENCE_S
    while not path.exists():
        if time.monotonic() > ends_s:
            raise ConfigError(f"the other process did not reach its first step within {_PATIENCE_S:g} s")
        time.sleep(0.05)
    content: dict[str, dict[str, torch.Tensor]] = torch.load(path, map_location="cpu", weights_only=True)
    return content
