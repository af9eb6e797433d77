"""What is summed: gradients in buckets, and with them the figures of the step.

A bucket is a flat vector: gradients of some parameters, then one *presence* number for each. A slice that gives no
gradient to a parameter puts -0.0 there, the one number that changes nothing when it is added, not even the sign of a
zero; the sum of the presences says whether anybody gave one. The last bucket also carries the *figures*: what the
script logged, and the model's buffers, so that they cost no message of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from holdfast.errors import ScriptError

MAX_METRICS = 16
"""Most figures that a script may log in a step, the loss among them."""

_NOTHING = -0.0


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter lies in its bucket."""

    parameter: nn.Parameter
    name: str
    start: int
    numel: int
    presence: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """The layout of one flat vector: gradients, presences, and in the last bucket the figures."""

    places: tuple[_Place, ...]
    length: int
    figures_at: int
    dtype: torch.dtype
    device: torch.device


class Buckets:
    """The layout of everything that a step sums.

    Args:
        model: Its trainable parameters, from the last to the first, as the backward pass finishes them; its buffers.
        bucket_bytes: Size after which a new bucket is begun, bytes.
    """

    def __init__(self, model: nn.Module, bucket_bytes: int) -> None:
        self.buffers = StepBuffers(model)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        groups = _group(named[::-1], bucket_bytes)
        figures = 2 * MAX_METRICS + self.buffers.numel
        dtype = self.buffers.dtype
        device = named[-1][1].device if named else torch.device("cpu")
        layouts = [_lay_out(group) for group in groups]
        if layouts and layouts[-1].dtype == dtype:
            last = layouts.pop()
            layouts.append(Bucket(last.places, last.length + figures, last.length, dtype, last.device))
        else:  # the figures need another type than the gradients beside them
            layouts.append(Bucket((), figures, 0, dtype, device))
        self.layouts: tuple[Bucket, ...] = tuple(layouts)
        self.parameters: tuple[nn.Parameter, ...] = tuple(p for _, p in named)

    def __len__(self) -> int:
        """Return the number of buckets."""
        return len(self.layouts)

    def new_terms(self) -> list[torch.Tensor]:
        """Return room for what one slice gives to each bucket."""
        return [torch.empty(b.length, dtype=b.dtype, device=b.device) for b in self.layouts]

    def collect(self, terms: Sequence[torch.Tensor]) -> None:
        """Move the gradients of a slice out of the parameters into ``terms``.

        Raises:
            ScriptError: if a gradient is sparse.
        """
        for bucket, term in zip(self.layouts, terms, strict=True):
            given = [place for place in bucket.places if place.parameter.grad is not None]
            if len(given) < len(bucket.places):
                term[: bucket.figures_at or bucket.length].fill_(_NOTHING)
            targets, grads = [], []
            for place in given:
                grad = place.parameter.grad
                assert grad is not None
                if grad.is_sparse:
                    msg = (
                        f"the gradient of {place.name} is sparse; only dense gradients can be summed: use sparse=False"
                    )
                    raise ScriptError(msg)
                targets.append(term[place.start : place.start + place.numel].view_as(grad))
                grads.append(grad)
                place.parameter.grad = None
            if given:
                torch._foreach_copy_(targets, grads)
                presences = [place.presence for place in given]
                term[presences[0] : presences[-1] + 1].index_fill_(
                    0, torch.tensor([p - presences[0] for p in presences], device=term.device), 1.0
                )

    def put_figures(self, term: torch.Tensor, metrics: Mapping[str, torch.Tensor | float], samples: int) -> None:
        """Write what a slice logged, and its buffers, behind the gradients of the last bucket.

        Args:
            term: The slice's term of the last bucket.
            metrics: Means over the slice.
            samples: Size of the slice.

        Raises:
            ScriptError: if more than :data:`MAX_METRICS` figures were logged.
        """
        if len(metrics) > MAX_METRICS:
            msg = f"at most {MAX_METRICS} figures can be logged in a step, got {len(metrics)}: {', '.join(metrics)}"
            raise ScriptError(msg)
        figures = term[self.layouts[-1].figures_at :]
        figures[: 2 * MAX_METRICS].fill_(_NOTHING)
        for i, name in enumerate(_slots(metrics)):
            figures[2 * i] = metrics[name] * samples
            figures[2 * i + 1] = samples
        self.buffers.give(figures[2 * MAX_METRICS :])

    def read_metrics(self, result: torch.Tensor, names: Sequence[str]) -> dict[str, float]:
        """Return the means over the samples of the step of what was logged.

        Args:
            result: The sum of the last bucket.
            names: What the slices of this worker logged; a worker without slices knows the loss alone.
        """
        start = self.layouts[-1].figures_at
        sums = result[start : start + 2 * MAX_METRICS].tolist()
        values = {}
        for i, name in enumerate(_slots(dict.fromkeys([*names, "loss"]))):
            if sums[2 * i + 1] > 0:
                values[name] = sums[2 * i] / sums[2 * i + 1]
        return values

    def give_gradients(self, results: Sequence[torch.Tensor], samples: Sequence[int]) -> None:
        """Set every parameter's ``.grad`` to the mean over the samples.

        The gradients are private copies: clipping and unscaling may write them.

        Args:
            results: The sum of each bucket.
            samples: What to divide each by.
        """
        for bucket, result, size in zip(self.layouts, results, samples, strict=True):
            if not bucket.places:
                continue
            end = bucket.places[-1].start + bucket.places[-1].numel
            mean = result[:end] / size
            first = bucket.places[0].presence
            present = result[first : first + len(bucket.places)].tolist()
            for place, times in zip(bucket.places, present, strict=True):
                gradient = mean[place.start : place.start + place.numel].view_as(place.parameter)
                place.parameter.grad = gradient if times > 0 else None

    def take_buffers(self, result: torch.Tensor, num_slices: int) -> None:
        """Set the model's buffers to their mean over the slices.

        Args:
            result: The sum of the last bucket.
            num_slices: How many slices are in it.
        """
        self.buffers.take(result[self.layouts[-1].figures_at + 2 * MAX_METRICS :], num_slices)

    def clear(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters:
            parameter.grad = None


class StepBuffers:
    """The model's buffers during a step: every slice starts from the step's beginning.

    Floating-point buffers end as the mean of what the slices made of them, integer ones advance by the mean change,
    rounded (``num_batches_tracked``: by one). A buffer that no slice changed keeps its bits.

    Args:
        model: Whose buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [b for b in model.buffers() if b.numel()]
        self._start = [b.detach().clone() for b in self._buffers]
        self.dtype = torch.float64 if any(b.dtype == torch.float64 for b in self._buffers) else torch.float32
        self.numel = sum(b.numel() + 1 for b in self._buffers)

    def begin_step(self) -> None:
        """Remember where the step begins."""
        for start, buffer in zip(self._start, self._buffers, strict=True):
            start.copy_(buffer)

    def rewind(self) -> None:
        """Go back to the beginning of the step."""
        for start, buffer in zip(self._start, self._buffers, strict=True):
            buffer.copy_(start)

    def give(self, figures: torch.Tensor) -> None:
        """Write what a slice made of the buffers, each with a flag that says whether it changed it."""
        at = 0
        for start, buffer in zip(self._start, self._buffers, strict=True):
            value = buffer if buffer.is_floating_point() else buffer.to(self.dtype) - start.to(self.dtype)
            figures[at : at + buffer.numel()].copy_(value.reshape(-1))
            at += buffer.numel()
            figures[at] = _NOTHING if torch.equal(buffer, start) else 1.0
            at += 1

    def take(self, figures: torch.Tensor, num_slices: int) -> None:
        """Set the buffers from the sum of what ``num_slices`` slices gave."""
        at = 0
        for start, buffer in zip(self._start, self._buffers, strict=True):
            mean = (figures[at : at + buffer.numel()] / num_slices).view_as(buffer)
            at += buffer.numel()
            changed = figures[at].item() > 0
            at += 1
            if not changed:
                buffer.copy_(start)
            elif buffer.is_floating_point():
                buffer.copy_(mean)
            else:
                buffer.copy_(start + mean.round().to(buffer.dtype))


def _slots(names: Mapping[str, object]) -> list[str]:
    """Return the order in which figures stand: the loss, which everybody knows, then the others by name."""
    return ["loss", *sorted(name for name in names if name != "loss")]


def _group(named: Sequence[tuple[str, nn.Parameter]], bucket_bytes: int) -> list[list[tuple[str, nn.Parameter]]]:
    groups: list[list[tuple[str, nn.Parameter]]] = []
    room, kind = 0, None
    for name, parameter in named:
        size = parameter.numel() * parameter.element_size()
        this_kind = (parameter.dtype, parameter.device)
        if not groups or this_kind != kind or size > room:
            groups.append([])
            room, kind = max(bucket_bytes, size), this_kind
        groups[-1].append((name, parameter))
        room -= size
    return groups


def _lay_out(group: Sequence[tuple[str, nn.Parameter]]) -> Bucket:
    starts = [0]
    for _, parameter in group:
        starts.append(starts[-1] + parameter.numel())
    places = tuple(
        _Place(parameter, name, start, parameter.numel(), starts[-1] + i)
        for i, ((name, parameter), start) in enumerate(zip(group, starts, strict=False))
    )
    length = starts[-1] + len(group)
    parameter = group[0][1]
    return Bucket(places, length, length, parameter.dtype, parameter.device)
