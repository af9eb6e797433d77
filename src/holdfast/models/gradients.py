"""The vectors that are all-reduced: gradients in buckets, and the metrics of the step.

A bucket is a flat vector: gradients of some parameters, then one *presence* number per parameter. A slice without a
gradient for a parameter contributes -0.0, the one number that changes nothing in an addition, not even the sign of a
zero; the sum of the presences tells whether any slice had one. The last bucket also carries the *figures*: the logged
metrics and the model's buffers, so that they cost no message of their own. Where gradients are rounded on the wire, they
are a bucket by themselves, which is not rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from holdfast.base.torch_private import add_each, copy_each, version_of
from holdfast.comm import SlotSpan
from holdfast.comm.allreduce.checksums import TILE
from holdfast.errors import ConfigError, ScriptError
from holdfast.models.bucket_layout import Place, lay_out
from holdfast.models.buffers import BufferChoices, StepBuffers

MAX_METRICS = 16
"""Maximum number of metrics that a script may log in a step, including the loss."""

SMALL_BYTES = 4 << 20
"""The gradients of a smaller model stay in the cache until the slice ends, and are then copied in one call."""

NO_ROW = -1
NO_GRADIENT = torch.empty(0)
"""In place of the gradient of a parameter that a slice has none for."""
_NOTHING = -0.0


@dataclass(frozen=True, slots=True)
class SliceGradients:
    """The contribution of one slice, or the sum of several.

    Args:
        flat: Its vector in each bucket; none if it has no row.
        views: Its gradients in each bucket. Those of a slice without a row are the tensors that autograd has made, as
            soon as they are known, or :data:`NO_GRADIENT`.
        tails: The presences and figures in each bucket.
        row: Number of its memory, see :meth:`OrderedAllReduce.room`; :data:`NO_ROW` if it will be added to another
            one as soon as it is complete.
        begun: The version of each gradient in the buckets of which the copy to the host has begun, by bucket.
    """

    flat: list[torch.Tensor]
    views: list[list[torch.Tensor]]
    tails: list[torch.Tensor]
    row: int = 0
    begun: dict[int, list[int]] = field(default_factory=dict)

    @property
    def has_row(self) -> bool:
        """Whether it lies in the memory of the all-reduce."""
        return self.row != NO_ROW

    def versions(self, bucket: int) -> list[int]:
        """Return the version of each gradient of a bucket."""
        return [version_of(view) for view in self.views[bucket]]

    def let_go(self) -> None:
        """Free the gradients of a slice without a row."""
        for views in self.views:
            views[:] = [NO_GRADIENT] * len(views)


class BucketLayout:
    """The layout of everything that a step all-reduces.

    Args:
        model: Its trainable parameters, from the last to the first, as the backward pass finishes them; its buffers.
        bucket_bytes: Maximum size of a bucket, bytes, unless a single parameter is larger.
        checked: Terms have checksums.
        figures_apart: The figures are a bucket of their own, because gradients are rounded.
        choices: How changes of buffers are combined; see :class:`StepBuffers`.
        prefix: What precedes the names of the module's buffers there.
    """

    def __init__(
        self,
        model: nn.Module,
        bucket_bytes: int,
        *,
        checked: bool = False,
        figures_apart: bool = False,
        choices: BufferChoices = {},  # noqa: B006
        prefix: str = "",
    ) -> None:
        self.buffers = StepBuffers(model, choices, prefix)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if len(devices := {str(p.device) for _, p in named}) > 1:
            raise ConfigError(f"all parameters must be on one device, got {', '.join(sorted(devices))}")
        figures = 2 * MAX_METRICS + self.buffers.numel
        self.layouts = lay_out(
            named[::-1], figures, self.buffers.dtype, bucket_bytes, checked=checked, figures_apart=figures_apart
        )
        self.size_bytes = self.layouts[-1].span.end
        self.parameters: tuple[nn.Parameter, ...] = tuple(p for _, p in named)
        self._hooks: list[RemovableHandle] = []
        self._target: SliceGradients | None = None
        self._incomplete: list[set[int]] = []
        self.copies: Callable[[SlotSpan, int], None] | None = None
        """Starts the copy of a bucket to the host, given its row, as soon as a slice is complete there; None on the CPU."""
        self.tells: Callable[[int, int], None] | None = None
        """Called with each gradient that is complete, as its bucket and place; None while that is not needed."""
        self.has_versions = False
        """Whether each gradient has a version of its own, instead of one for all of the memory of a row."""
        self.copied: list[torch.Tensor] = []
        """Memory for gradients that may be modified, by bucket; empty until it is needed."""
        self._result_views: list[tuple[int, list[torch.Tensor]]] = [(-1, [])] * len(self.layouts)

    def __len__(self) -> int:
        """Return the number of buckets."""
        return len(self.layouts)

    def terms_in(self, memory: torch.Tensor, row: int = 0) -> SliceGradients:
        """Return the views in ``memory`` (``size_bytes`` bytes), that of the ``row``-th slice, for its terms."""
        flat = [b.span.of(memory) for b in self.layouts]
        views = [bucket.views(term) for bucket, term in zip(self.layouts, flat, strict=True)]
        if self.copies is not None or self.has_versions:
            views = [[view.data for view in some] for some in views]  # .detach() would share one version counter
        tails = [term[bucket.gradients_end :] for bucket, term in zip(self.layouts, flat, strict=True)]
        return SliceGradients(flat, views, tails, row)

    def terms_apart(self) -> SliceGradients:
        """Return the terms of a slice that has no row: its gradients stay in the tensors that autograd makes."""
        tails = [
            torch.zeros(bucket.length - bucket.gradients_end, dtype=bucket.dtype, device=bucket.device)
            for bucket in self.layouts
        ]
        return SliceGradients([], [[NO_GRADIENT] * len(bucket.places) for bucket in self.layouts], tails, NO_ROW)

    def aim(self, terms: SliceGradients, *, is_summed: bool = False) -> None:
        """From now on, the gradients of the backward pass belong to ``terms``.

        Those of a large model are moved into its row one by one, as soon as they are complete: the original memory is
        freed immediately, so the next gradient reuses it from the cache, and takes no memory of its own. The others
        are kept by autograd until the slice ends.
        If it ``is_summed`` with other slices before the all-reduce, it is not copied to the host.
        """
        moves = terms.has_row and (self.copies is not None or self.size_bytes > SMALL_BYTES)
        self._target = terms if moves or self.tells is not None else None
        if self._target is not None and not self._hooks:
            for bucket, layout in enumerate(self.layouts):
                take = self._take if self.copies is None else self._take_and_copy
                for i, place in enumerate(layout.places):
                    hook = functools.partial(take, bucket, i)
                    self._hooks.append(place.parameter.register_post_accumulate_grad_hook(hook))
        if self.copies is not None:
            terms.begun.clear()
            begins = () if is_summed else self.layouts[:-1]
            self._incomplete = [set(range(len(layout.places))) for layout in begins]

    def _take(self, bucket: int, i: int, parameter: torch.Tensor) -> None:
        target, gradient = self._target, parameter.grad
        if target is None or gradient is None or gradient.is_sparse:
            return
        view = target.views[bucket][i]
        if not target.has_row:
            target.views[bucket][i] = gradient
        elif gradient is not view:
            # Detached, for create_graph; torch.no_grad() for each parameter would take three times as long.
            parameter.grad = view.copy_(gradient.detach())
        if self.tells is not None:
            self.tells(bucket, i)

    def _take_and_copy(self, bucket: int, i: int, parameter: torch.Tensor) -> None:
        """Take a gradient; that of the last parameter of a bucket starts its copy. The last bucket lacks its figures."""
        self._take(bucket, i, parameter)
        if self._target is not None and bucket < len(self._incomplete) and self._incomplete[bucket]:
            self._incomplete[bucket].discard(i)
            if not self._incomplete[bucket]:
                self.note_presence(self._target, bucket)
                self._start_copy(bucket, self._target)

    def _start_copy(self, bucket: int, terms: SliceGradients) -> None:
        assert self.copies is not None
        terms.begun[bucket] = terms.versions(bucket)
        self.copies(self.layouts[bucket].span, terms.row)

    def start_copies(self, terms: SliceGradients) -> None:
        """Start any copies of a complete row to the host, except of buckets that have not changed since theirs began.

        A second backward pass, or the script, may have changed a gradient; then the later copy counts.
        """
        if self.copies is None:
            return
        for bucket in range(len(self)):
            if terms.begun.get(bucket) != terms.versions(bucket) or bucket == len(self) - 1:
                self._start_copy(bucket, terms)

    def restart_copies(self, terms: SliceGradients) -> None:
        """Start any copies of a row again, because its terms were altered."""
        terms.begun.clear()
        self.start_copies(terms)

    def note_presence(self, terms: SliceGradients, bucket: int) -> None:
        """Note in a term that the slice has all gradients of a bucket."""
        terms.tails[bucket][: len(self.layouts[bucket].places)] = 1.0

    def has_changed(self, terms: SliceGradients, bucket: int, versions: Sequence[int]) -> bool:
        """Return whether a gradient of a bucket is another tensor than its term, or another version of it, by now."""
        pairs = zip(self.layouts[bucket].places, terms.views[bucket], strict=True)
        return any(place.parameter.grad is not view for place, view in pairs) or terms.versions(bucket) != versions

    def collect(self, terms: SliceGradients, begun: int = 0) -> None:
        """Check that all gradients of a slice are in ``terms`` and dense, and remove them from the parameters.

        The all-reduces of the first ``begun`` buckets have begun: their terms are complete, and must not be written.
        """
        self._target = None
        into: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for i, bucket in enumerate(self.layouts[begun:], begun):
            self.note_presence(terms, i)
            tail, views = terms.tails[i], terms.views[i]
            for number, (place, view) in enumerate(zip(bucket.places, views, strict=True)):
                gradient = place.parameter.grad
                if gradient is None:
                    tail[number] = _NOTHING
                elif gradient is not view:
                    _check_dense(place, gradient)
                if not terms.has_row:
                    views[number] = NO_GRADIENT if gradient is None else gradient.detach()
                elif gradient is None:
                    view.fill_(_NOTHING)
                elif gradient is not view:
                    into.append(view)
                    values.append(gradient.detach())
        if into:
            copy_each(into, values)
        self.clear()

    @torch.no_grad()
    def add_up(self, rows: Sequence[SliceGradients], buckets: Iterable[int]) -> None:
        """Add some buckets of rows into the first of them, from the last to the first: ``a + (b + c)``.

        The last may be a slice without a row.
        """
        for bucket in buckets:
            stacks = [[row.flat[bucket] for row in rows]] if rows[-1].has_row else _stacks(bucket, rows)
            if len(rows) == 2:
                pairs = [stack for stack in stacks if len(stack) == 2]
                add_each([first for first, _ in pairs], [second for _, second in pairs])
                continue
            # All rows of a tile are added while it is in the cache. On a device, tiles would only cost more calls.
            size = TILE if self.layouts[bucket].device.type == "cpu" else max(1, self.layouts[bucket].length)
            for stack in stacks:
                _add_stack(stack, size)

    def named(self, terms: SliceGradients) -> dict[str, torch.Tensor]:
        """Return the gradients of a slice by parameter name; what is altered there is altered in ``terms``."""
        gradients: dict[str, torch.Tensor] = {}
        for bucket, views in zip(self.layouts, terms.views, strict=True):
            for i, place in enumerate(bucket.places):
                if views[i] is NO_GRADIENT:
                    views[i] = torch.full_like(place.parameter, _NOTHING, requires_grad=False)
                gradients[place.name] = views[i]
        return gradients

    def put_figures(
        self,
        terms: SliceGradients,
        metrics: Mapping[str, torch.Tensor | float],
        samples: int,
        items: float | None = None,
    ) -> None:
        """Append a slice's metrics, at most :data:`MAX_METRICS` means over samples, and buffers to its last bucket.

        The loss is a mean over ``items``, if they are given. One over no item counts as nothing, whatever its value.
        """
        if len(metrics) > MAX_METRICS:
            raise ScriptError(
                f"at most {MAX_METRICS} metrics can be logged in a step, got {len(metrics)}: {', '.join(metrics)}"
            )
        figures = terms.tails[-1][len(self.layouts[-1].places) :]
        figures[: 2 * MAX_METRICS].fill_(_NOTHING)
        for i, name in enumerate(_slots(metrics)):
            weight = items if name == "loss" and items is not None else samples
            figures[2 * i] = metrics[name] * weight if weight else 0.0
            figures[2 * i + 1] = weight
        self.buffers.write_to(figures[2 * MAX_METRICS :])

    def read_metrics(self, result: torch.Tensor, names: Sequence[str]) -> dict[str, float]:
        """Return the means of the metrics over the samples of the step, from the result of the last bucket.

        A worker without slices has no ``names`` of its own, and knows only the loss.
        """
        sums = self._sums_of_figures(result)
        values = {}
        for i, name in enumerate(_slots(dict.fromkeys([*names, "loss"]))):
            if sums[2 * i + 1] > 0:
                values[name] = sums[2 * i] / sums[2 * i + 1]
        return values

    def weight(self, result: torch.Tensor) -> float:
        """Return the number of samples, or of items, over which the loss is the mean, from the result of the last bucket."""
        return float(result[self.layouts[-1].figures_at + 1])

    def read_figures(self, result: torch.Tensor) -> list[float]:
        """Return the same means without names, which a worker may not know: the loss first, then the others by name."""
        sums = self._sums_of_figures(result)
        return [total / samples for total, samples in zip(sums[::2], sums[1::2], strict=True) if samples > 0]

    def _sums_of_figures(self, result: torch.Tensor) -> list[float]:
        start = self.layouts[-1].figures_at
        sums: list[float] = result[start : start + 2 * MAX_METRICS].tolist()
        return sums

    def set_gradients(self, results: Sequence[torch.Tensor], in_host: Sequence[torch.Tensor], *, private: bool) -> None:
        """Set every parameter's ``.grad`` to its mean gradient in the results of all buckets.

        If ``private``, use copies that may be modified, for instance by clipping: other workers read the results.
        ``in_host`` are the results in host memory, where presences can be read without waiting for the device.
        """
        for i, (_, result, readable) in enumerate(zip(self.layouts, results, in_host, strict=True)):
            self.set_gradients_of(i, result, readable, private=private)

    def set_gradients_of(self, i: int, result: torch.Tensor, in_host: torch.Tensor, *, private: bool) -> None:
        """Do so for the parameters of bucket ``i`` with its ``result``; see :meth:`set_gradients`."""
        bucket = self.layouts[i]
        if not bucket.places:
            return
        if private and not self.copied:
            self.copied = [torch.empty(b.gradients_end, dtype=b.dtype, device=b.device) for b in self.layouts]
        gradients = self.copied[i].copy_(result[: bucket.gradients_end]) if private else result
        present = in_host[bucket.places[0].presence : bucket.places[-1].presence + 1].tolist()
        for place, gradient, times in zip(bucket.places, self._views_of(i, gradients), present, strict=True):
            parameter = place.parameter
            if times <= 0:
                parameter.grad = None
            elif parameter.is_contiguous():
                parameter.grad = gradient
            else:  # a fused optimizer reads both in the order of memory
                parameter.grad = torch.empty_like(parameter).copy_(gradient)

    def drop_gradients_of(self, i: int) -> None:
        """Remove the gradients of the parameters of bucket ``i``."""
        for place in self.layouts[i].places:
            place.parameter.grad = None

    def _views_of(self, i: int, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the gradients in bucket ``i``, renewed when the result has moved to other memory."""
        if self._result_views[i][0] != flat.data_ptr():  # the views keep their memory, so no other has its address
            self._result_views[i] = (flat.data_ptr(), self.layouts[i].views(flat))
        return self._result_views[i][1]

    def set_buffers(self, result: torch.Tensor, in_host: torch.Tensor, num_slices: int) -> None:
        """Set the model's buffers to their mean over the slices in ``result``, the result of the last bucket.

        ``in_host`` is the same in host memory.
        """
        start = self.layouts[-1].figures_at + 2 * MAX_METRICS
        self.buffers.set_mean(result[start:], in_host[start:], num_slices)

    def name_at(self, bucket: int, index: int) -> str:
        """Return the name of the parameter whose gradient lies at an index of a bucket, or just before it."""
        return next(p.name for p in reversed(self.layouts[bucket].places) if p.start <= index)

    def clear(self) -> None:
        """Remove all gradients."""
        self._target = None
        for parameter in self.parameters:
            parameter.grad = None


def _stacks(bucket: int, rows: Sequence[SliceGradients]) -> list[list[torch.Tensor]]:
    """Return what is added up of a bucket whose last slice has no row: for each gradient its tensor in each row."""
    stacks = [[row.tails[bucket] for row in rows]]
    for stack in zip(*(row.views[bucket] for row in rows), strict=True):
        without = stack[-1] is NO_GRADIENT  # it is -0.0, which changes nothing
        stacks.append(list(stack[:-1] if without else stack))
    return stacks


def _add_stack(stack: Sequence[torch.Tensor], size: int) -> None:
    """Add tensors of one shape into the first of them, from the last to the first, in tiles of ``size`` numbers."""
    tiles: Iterable[Sequence[torch.Tensor]] = [stack]
    if stack[0].numel() > size and all(tensor.is_contiguous() for tensor in stack):
        tiles = zip(*(tensor.view(-1).split(size) for tensor in stack), strict=True)
    for first, *rest in tiles:
        if rest:
            total = rest.pop()
            while rest:
                total = rest.pop() + total
            first.add_(total)


def _check_dense(place: Place, gradient: torch.Tensor) -> None:
    if gradient.is_sparse:
        raise ScriptError(
            f"the gradient of {place.name} is sparse; only dense gradients can be all-reduced: use sparse=False"
        )


def _slots(names: Mapping[str, object]) -> list[str]:
    """Return the order of the metrics: the loss, which every worker knows, then the others by name."""
    return ["loss", *sorted(name for name in names if name != "loss")]
