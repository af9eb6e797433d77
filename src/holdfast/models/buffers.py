"""The model's buffers during a step, which slices change independently, and how their changes are combined."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from holdfast.base.torch_private import buffers_of, copy_each, is_of_normalisation
from holdfast.errors import ConfigError
from holdfast.models.constants import HOW_TO_CHOOSE, Constants

CHOICES = ("mean", "sum", "first")
"""How the changes that slices make to a buffer may be combined."""

BufferChoices = Mapping[str, str]
"""One of :data:`CHOICES` for buffers whose name is the key, or matches it as a pattern; the first match counts."""


def check_choices(choices: BufferChoices, names: Sequence[str] | None = None) -> None:
    """Check what a script chose for buffers; with the ``names`` of all buffers, also that each choice has one.

    Raises:
        ConfigError: if a choice does not exist, or is for no buffer.
    """
    for pattern, choice in choices.items():
        if choice not in CHOICES:
            raise ConfigError(f"buffers[{pattern!r}] must be one of {', '.join(CHOICES)}, got {choice!r}")
        if names is not None and not fnmatch.filter(names, pattern):
            raise ConfigError(
                f"buffers[{pattern!r}] matches no buffer of the model: {', '.join(names) or 'it has none'}"
            )


class StepBuffers:
    """The model's buffers during a step: every slice starts from their values at the step's beginning.

    A buffer ends as its choice says. By default floating-point buffers end as the mean over the slices' values, and
    integer ones advance by the mean change, rounded (``num_batches_tracked``: by one). ``"sum"`` adds the changes of all
    slices up. ``"first"`` keeps the value after the first slice of the mini-batch: other slices contribute -0.0, the
    one number that changes nothing in an addition. A buffer that no slice changed keeps its bits. Large buffers without
    a choice (masks, tables) are treated as constants, because sending them with every slice would cost more than the
    step.

    Args:
        model: The module.
        choices: The choices of the script, by name or pattern. A module may have its own: ``holdfast_buffers``, by name.
        prefix: What precedes the names of this module's buffers in those of the script's model.
    """

    MAX_NUMEL = 1 << 16
    """A forward pass must not change a larger buffer without a choice."""

    def __init__(self, model: nn.Module, choices: BufferChoices = {}, prefix: str = "") -> None:  # noqa: B006
        places = {
            id(buffer): (f"{path}.{name}".lstrip("."), module, name, buffer)
            for path, module in model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.numel() and not buffer.is_inference()
        }
        chosen = {path: _chosen(f"{prefix}{path}", module, name, choices) for path, module, name, _ in places.values()}
        is_sent = {path: b.numel() <= self.MAX_NUMEL or bool(chosen[path]) for path, _, _, b in places.values()}
        sent = [place for place in places.values() if is_sent[place[0]]]
        self._places = [(module, name, b) for _, module, name, b in sent]
        self.constants = Constants(model, [p for p in places.values() if not is_sent[p[0]]], self.MAX_NUMEL)
        self._paths = [path for path, *_ in sent]
        self._choices = [chosen[path] or "mean" for path in self._paths]
        self._unnamed = {
            i: f"{prefix}{path}"
            for i, (path, module, name, _) in enumerate(sent)
            if not (chosen[path] or is_of_normalisation(module, name))
        }
        """Buffers whose mean may be wrong, which are named once a slice has changed them."""
        self.is_first = True
        """Whether the slice in progress is the first one of the mini-batch."""
        buffers = [b for *_, b in self._places]
        self._changed: tuple[str, ...] = ()
        self._start = [b.detach().clone() for b in buffers]
        self._flat_start = torch.empty(0)
        self.dtype = torch.float64 if any(b.dtype == torch.float64 for b in buffers) else torch.float32
        self._sizes = [b.numel() for b in buffers]
        self._buffer_of = torch.repeat_interleave(torch.tensor(self._sizes, dtype=torch.int64))
        self.numel = sum(self._sizes) + len(buffers)

    @property
    def has_first(self) -> bool:
        """Whether a buffer keeps the value after the first slice."""
        return "first" in self._choices

    def take_notes(self) -> tuple[str, ...]:
        """Return lines for the user about what slices have changed since, each once."""
        changed, self._changed = self._changed, ()
        trained, self.constants.trained_changed = self.constants.trained_changed, ()
        notes = []
        if changed:
            named = f"the buffer{'s' * (len(changed) > 1)} {', '.join(changed)}"
            notes.append(
                f"the forward pass changes {named}, which torch's normalisation layers do not own: after each step the"
                " value is the mean over the slices, which may not be what it means. To choose, pass"
                f' buffers={{"{changed[0]}": "mean"}}, {HOW_TO_CHOOSE}'
            )
        if trained:
            notes.append(
                f"a slice changes the weights {', '.join(trained)} themselves, in the forward pass or in the loop: workers"
                " stay equal only if every slice changes them alike, whatever its samples"
            )
        return tuple(notes)

    def initial(self) -> list[tuple[str, torch.Tensor]]:
        """Return the buffers by name, with their saved values from the beginning of the current step."""
        return list(zip(self._paths, self._start, strict=True))

    def begin_step(self) -> None:
        """Save the buffers at the beginning of a step."""
        _copy(self._start, self._collected())
        self._flat_start = torch.empty(0)
        self.constants.forget()

    def rewind(self) -> None:
        """Restore the buffers to the beginning of the step."""
        _copy(self._collected(), self._start)

    def begin_slice(self, *, is_first: bool) -> None:
        """Begin a slice, from the beginning of the step; ``is_first``: it is the first one of the mini-batch."""
        self.is_first = is_first
        self.constants.begin_slice()
        self.rewind()

    def lend(self, *, is_first: bool) -> None:
        """Begin a slice with its own buffers, from the step's beginning: its backward pass may need them."""
        self.is_first = is_first
        self.constants.begin_slice()
        for (module, name, _), start in zip(self._places, self._start, strict=True):
            buffers_of(module)[name] = start.clone()

    def write_to(self, figures: torch.Tensor) -> None:
        """Write a slice's buffers, followed by the number of changed elements of each.

        Raises:
            ScriptError: if the forward pass changed a constant; see :class:`Constants`.
        """
        self.constants.check()
        if not self._places:
            return
        values, changes = figures.split((len(self._buffer_of), len(self._places)))
        if not len(self._flat_start):
            self._buffer_of = self._buffer_of.to(figures.device)
            self._flat_start = torch.empty_like(values)
            self._flatten(self._start, self._flat_start)
        self._flatten(self._collected(), values)
        is_other = _bits(values) != _bits(self._flat_start)
        changes.zero_().index_add_(0, self._buffer_of, is_other.to(changes.dtype))
        if self.has_first and not self.is_first:
            for i, (choice, value) in enumerate(zip(self._choices, values.split(self._sizes), strict=True)):
                if choice == "first":
                    value.fill_(-0.0)
                    changes[i] = 0

    def _flatten(self, buffers: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """Flatten all buffers into one vector; integer ones as their change since the beginning of the step."""
        values = (
            buffer if buffer.is_floating_point() else buffer.long() - start.long()
            for buffer, start in zip(buffers, self._start, strict=True)
        )
        torch.cat([_flat(value, into.device) for value in values], out=into)

    def set_mean(self, figures: torch.Tensor, in_host: torch.Tensor, num_slices: int) -> None:
        """Set the buffers from the sum over ``num_slices`` slices, which ``in_host`` holds in host memory."""
        if not self._places:
            return
        sums, changes = figures[: len(self._buffer_of)].split(self._sizes), in_host[len(self._buffer_of) :].tolist()
        means = (figures[: len(self._buffer_of)] / num_slices).split(self._sizes)
        ends = []
        for start, total, mean, choice, changed in zip(self._start, sums, means, self._choices, changes, strict=True):
            if not changed:
                end = start
            elif start.is_floating_point():
                flat = start.flatten().to(total.dtype)
                end = total if choice == "first" else flat + (total - flat * num_slices) if choice == "sum" else mean
            else:
                end = start.long().flatten() + (mean if choice == "mean" else total).round().long()
            ends.append(end.view_as(start))
        _copy(self._collected(), ends)
        if num_slices > 1:
            self._changed += tuple(self._unnamed.pop(i) for i in list(self._unnamed) if changes[i])

    def _collected(self) -> list[torch.Tensor]:
        """Return the buffers; a new tensor that the forward pass assigned is copied into the original one."""
        for module, name, buffer in self._places:
            now = buffers_of(module)[name]
            if now is not buffer and now is not None:
                buffer.copy_(now.detach())
                buffers_of(module)[name] = buffer
        return [buffer for *_, buffer in self._places]


def _chosen(path: str, module: nn.Module, name: str, choices: BufferChoices) -> str:
    """Return the choice for a buffer, of the script or else of the module that has it; "" if there is none."""
    own: BufferChoices = getattr(module, "holdfast_buffers", {})
    check_choices(own)
    return next(
        (choice for pattern, choice in choices.items() if fnmatch.fnmatchcase(path, pattern)), own.get(name, "")
    )


def _copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy each value into its tensor, in one call, because separate calls would take longer than the copies."""
    if into:
        copy_each(into, values)


def _flat(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a flat tensor on ``device``, without a call of torch where it is one: a call costs more than the copy."""
    value = value.detach() if value.requires_grad else value
    value = value if value.dim() == 1 else value.flatten()
    return value if value.device == device else value.to(device)


def _bits(flat: torch.Tensor) -> torch.Tensor:
    """Return an integer view for bitwise comparison: a NaN equals itself, and the signs of zeros count."""
    return flat.view(torch.int64 if flat.dtype == torch.float64 else torch.int32)
