"""The vectors that are all-reduced: gradients in buckets, and the metrics of the step.

A bucket is a flat vector: gradients of some parameters, then one *presence* number per parameter. A slice without a
gradient for a parameter contributes -0.0, the one number that changes nothing in an addition, not even the sign of a
zero; the sum of the presences tells whether any slice had one. The last bucket also carries the *figures*: the logged
metrics and the model's buffers, so that they cost no message of their own. Where gradients are rounded on the wire, they
are a bucket by themselves, which is not rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from holdfast.comm import SlotSpan
from holdfast.comm.allreduce.checksums import TILE
from holdfast.comm.allreduce.shm import ALIGN
from holdfast.errors import ConfigError, ScriptError
from holdfast.models.buffers import StepBuffers
from holdfast.torch_private import version_of

MAX_METRICS = 16
"""Maximum number of metrics that a script may log in a step, including the loss."""

_NOTHING = -0.0
_NOWHERE = SlotSpan(0, 0, torch.float32)


@dataclass(frozen=True, slots=True)
class _Place:
    """The location of a parameter in its bucket."""

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
    span: SlotSpan = _NOWHERE  # in the memory of a slice

    @property
    def may_be_rounded(self) -> bool:
        """Whether an order that rounds to bfloat16 applies to this bucket, of which figures are never a part then."""
        return self.dtype == torch.float32 and bool(self.places)

    @property
    def gradients_end(self) -> int:
        """End of the gradients, and start of the presences."""
        return self.places[-1].start + self.places[-1].numel if self.places else 0


@dataclass(frozen=True, slots=True)
class SliceGradients:
    """The contribution of one slice, or the sum of several: a flat vector per bucket, and views for each gradient.

    Args:
        row: Number of its memory; see :meth:`OrderedAllReduce.room`.
        begun: The version of each gradient in the buckets of which the copy to the host has begun, by bucket.
    """

    flat: list[torch.Tensor]
    views: list[list[torch.Tensor]]
    row: int = 0
    begun: dict[int, list[int]] = field(default_factory=dict)


class BucketLayout:
    """The layout of everything that a step all-reduces.

    Args:
        model: Its trainable parameters, from the last to the first, as the backward pass finishes them; its buffers.
        bucket_bytes: Maximum size of a bucket, bytes, unless a single parameter is larger.
        checked: Terms have checksums.
        figures_apart: The figures are a bucket of their own, because gradients are rounded.
    """

    def __init__(
        self, model: nn.Module, bucket_bytes: int, *, checked: bool = False, figures_apart: bool = False
    ) -> None:
        self.buffers = StepBuffers(model)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        groups = _group(named[::-1], bucket_bytes)
        figures = 2 * MAX_METRICS + self.buffers.numel
        dtype = self.buffers.dtype
        device = named[-1][1].device if named else torch.device("cpu")
        layouts = [_lay_out(group) for group in groups]
        if layouts and layouts[-1].dtype == dtype and not figures_apart:
            last = layouts.pop()
            layouts.append(Bucket(last.places, last.length + figures, last.length, dtype, last.device))
        else:  # for instance if they need another dtype than the gradients of the last bucket
            layouts.append(Bucket((), figures, 0, dtype, device))
        if len({b.device for b in layouts}) > 1:
            raise ConfigError(
                f"all parameters must be on one device, got {', '.join(sorted({str(b.device) for b in layouts}))}"
            )
        self.layouts: tuple[Bucket, ...] = _place(layouts, checked=checked)
        self.size_bytes = self.layouts[-1].span.end
        self.parameters: tuple[nn.Parameter, ...] = tuple(p for _, p in named)
        self._hooks: list[RemovableHandle] = []
        self._target: SliceGradients | None = None
        self._incomplete: list[set[int]] = []
        self.copies: Callable[[SlotSpan, int], None] | None = None
        """Starts the copy of a bucket to the host, given its row, as soon as a slice is complete there; None on the CPU."""
        self.tells: Callable[[int, int], None] | None = None
        """Called with each gradient that has been moved into its term, as its bucket and place; None if it is not needed."""
        self.copied: list[torch.Tensor] = []
        """Memory for gradients that may be modified, by bucket; empty until it is needed."""
        self._given: list[tuple[int, list[torch.Tensor]]] = [(-1, [])] * len(layouts)

    def __len__(self) -> int:
        """Return the number of buckets."""
        return len(self.layouts)

    def terms_in(self, memory: torch.Tensor, row: int = 0) -> SliceGradients:
        """Return the views in ``memory`` (``size_bytes`` bytes), that of the ``row``-th slice, for its terms."""
        flat = [b.span.of(memory) for b in self.layouts]
        views = [_views(b, term) for b, term in zip(self.layouts, flat, strict=True)]
        if self.copies or self.tells:  # each with a version of its own, instead of one for all of the memory
            views = [[view.data for view in some] for some in views]
        return SliceGradients(flat, views, row)

    def aim(self, terms: SliceGradients, *, is_summed: bool = False) -> None:
        """From now on, move each gradient into ``terms`` as soon as the backward pass has finished it.

        The gradient then *is* a view of the term. Its original memory is freed immediately, so the next gradient reuses
        it from the cache; if all were kept until the end of the pass, each page would cost a page fault.
        If it ``is_summed`` with other slices before the all-reduce, it is not copied to the host.
        """
        if not self._hooks:
            for bucket, places in enumerate(layout.places for layout in self.layouts):
                take = self._take_and_copy if self.copies else self._take_and_tell if self.tells else self._take
                for i, place in enumerate(places):
                    hook = functools.partial(take, bucket, i)
                    self._hooks.append(place.parameter.register_post_accumulate_grad_hook(hook))
        self._target = terms
        if self.copies is not None:
            terms.begun.clear()
            begins = () if is_summed else self.layouts[:-1]
            self._incomplete = [set(range(len(layout.places))) for layout in begins]

    def _take(self, bucket: int, i: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if self._target is None or gradient is None or gradient.is_sparse:
            return
        view = self._target.views[bucket][i]
        if gradient is not view:
            # Detached, for create_graph; torch.no_grad() for each parameter would take three times as long.
            parameter.grad = view.copy_(gradient.detach())

    def _take_and_tell(self, bucket: int, i: int, parameter: torch.Tensor) -> None:
        self._take(bucket, i, parameter)
        if self._target is not None and self.tells is not None and parameter.grad is self._target.views[bucket][i]:
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
        terms.begun[bucket] = [version_of(view) for view in terms.views[bucket]]
        self.copies(self.layouts[bucket].span, terms.row)

    def start_copies(self, terms: SliceGradients) -> None:
        """Start any copies of a complete row to the host, except of buckets that have not changed since theirs began.

        A second backward pass, or the script, may have changed a gradient; then the later copy counts.
        """
        if self.copies is None:
            return
        for bucket, views in enumerate(terms.views):
            if terms.begun.get(bucket) != [version_of(view) for view in views] or bucket == len(self) - 1:
                self._start_copy(bucket, terms)

    def restart_copies(self, terms: SliceGradients) -> None:
        """Start any copies of a row again, because its terms were altered."""
        terms.begun.clear()
        self.start_copies(terms)

    def note_presence(self, terms: SliceGradients, bucket: int) -> None:
        """Note in a term that the slice has all gradients of a bucket."""
        layout = self.layouts[bucket]
        terms.flat[bucket][layout.gradients_end : layout.figures_at] = 1.0

    def has_changed(self, terms: SliceGradients, bucket: int, versions: Sequence[int]) -> bool:
        """Return whether a gradient of a bucket is another tensor than its term, or another version of it, by now."""
        places, views = self.layouts[bucket].places, terms.views[bucket]
        return any(
            place.parameter.grad is not view or version_of(view) != version
            for place, view, version in zip(places, views, versions, strict=True)
        )

    def collect(self, terms: SliceGradients, begun: int = 0) -> None:
        """Check that all gradients of a slice are in ``terms`` and dense, and remove them from the parameters.

        The all-reduces of the first ``begun`` buckets have begun: their terms are complete, and must not be written.
        """
        self._target = None
        for i, bucket in enumerate(self.layouts[begun:], begun):
            self.note_presence(terms, i)
            term, views = terms.flat[i], terms.views[i]
            for place, view in zip(bucket.places, views, strict=True):
                gradient = place.parameter.grad
                if gradient is None:
                    view.fill_(_NOTHING)
                    term[place.presence] = _NOTHING
                elif gradient is not view:
                    _check_dense(place, gradient)
                    view.copy_(gradient.detach())
        self.clear()

    def put(
        self, terms: SliceGradients, metrics: Mapping[str, torch.Tensor | float], samples: int, begun: int = 0
    ) -> None:
        """Complete ``terms`` with a slice's gradients, buffers and metrics; see :meth:`collect`, :meth:`put_figures`."""
        self.collect(terms, begun)
        self.put_figures(terms.flat[-1], metrics, samples)

    def add_up(self, rows: Sequence[SliceGradients], begun: int = 0) -> None:
        """Add rows into the first of them, from the last to the first: ``a + (b + c)``; not the first ``begun`` buckets."""
        for bucket in range(begun, len(self)):
            self.add_up_bucket(bucket, rows)

    @torch.no_grad()
    def add_up_bucket(self, bucket: int, rows: Sequence[SliceGradients]) -> None:
        """Do so with a bucket; see :meth:`add_up`."""
        layout = self.layouts[bucket]
        # All rows of a tile are added while it is in the cache. On a device, tiles would only cost more calls.
        size = TILE if layout.device.type == "cpu" else max(1, layout.length)
        for first, *others in zip(*(row.flat[bucket].split(size) for row in rows), strict=True):
            total = others.pop()
            while others:
                total = others.pop() + total
            first.add_(total)

    @torch.no_grad()
    def move(self, source: SliceGradients, to: SliceGradients) -> None:
        """Copy a complete row to another one."""
        for given, taken in zip(source.flat, to.flat, strict=True):
            taken.copy_(given)
        self.restart_copies(to)

    def named(self, terms: SliceGradients) -> dict[str, torch.Tensor]:
        """Return views of the gradients of a slice by parameter name."""
        places = (place for bucket in self.layouts for place in bucket.places)
        return {p.name: view for p, view in zip(places, (v for views in terms.views for v in views), strict=True)}

    def by_parameter(self, terms: SliceGradients) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield the parameters, each with the view for its gradient."""
        for bucket, views in zip(self.layouts, terms.views, strict=True):
            for place, view in zip(bucket.places, views, strict=True):
                yield place.parameter, view

    def put_figures(self, term: torch.Tensor, metrics: Mapping[str, torch.Tensor | float], samples: int) -> None:
        """Append a slice's metrics, at most :data:`MAX_METRICS` means over samples, and buffers to its last bucket."""
        if len(metrics) > MAX_METRICS:
            raise ScriptError(
                f"at most {MAX_METRICS} metrics can be logged in a step, got {len(metrics)}: {', '.join(metrics)}"
            )
        figures = term[self.layouts[-1].figures_at :]
        figures[: 2 * MAX_METRICS].fill_(_NOTHING)
        for i, name in enumerate(_slots(metrics)):
            figures[2 * i] = metrics[name] * samples
            figures[2 * i + 1] = samples
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
        if self._given[i][0] != flat.data_ptr():
            self._given[i] = (flat.data_ptr(), _views(self.layouts[i], flat))
        return self._given[i][1]

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


def _views(bucket: Bucket, flat: torch.Tensor) -> list[torch.Tensor]:
    return [flat[p.start : p.start + p.numel].view(p.parameter.shape) for p in bucket.places]


def _check_dense(place: _Place, gradient: torch.Tensor) -> None:
    if gradient.is_sparse:
        raise ScriptError(
            f"the gradient of {place.name} is sparse; only dense gradients can be all-reduced: use sparse=False"
        )


def _slots(names: Mapping[str, object]) -> list[str]:
    """Return the order of the metrics: the loss, which every worker knows, then the others by name."""
    return ["loss", *sorted(name for name in names if name != "loss")]


def _place(layouts: Sequence[Bucket], *, checked: bool) -> tuple[Bucket, ...]:
    """Place the buckets one after another in the memory of a slice."""
    placed: list[Bucket] = []
    for bucket in layouts:
        span = SlotSpan(placed[-1].span.end if placed else 0, bucket.length, bucket.dtype, checked)
        placed.append(replace(bucket, span=span))
    return tuple(placed)


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
    """Return a bucket of these parameters. On a device each gradient is aligned, for optimizers that load vectors.

    In host memory that would only move the numbers among which a planned flip of a message chooses.
    """
    dtype, device = group[0][1].dtype, group[0][1].device
    line = 1 if device.type == "cpu" else ALIGN // dtype.itemsize
    starts, end = [], 0
    for _, parameter in group:
        starts.append(-(-end // line) * line)
        end = starts[-1] + parameter.numel()
    places = tuple(
        _Place(parameter, name, start, parameter.numel(), end + i)
        for i, ((name, parameter), start) in enumerate(zip(group, starts, strict=True))
    )
    length = end + len(group)
    return Bucket(places, length, length, dtype, device)
