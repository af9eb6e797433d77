"""Slice batching: several slices in one forward/backward pass, where results stay bit-identical.

::

    samples of all slices ──► layer ──► layer ──► outputs ──► the loss of each slice
                                │         │          ▲               │
                                └─────────┴──────────┴───────────────┘  one backward pass for the activations
                                │         │
          parameter gradients: per slice, from the layer's input and the gradient of its output

Weights are read once for all slices instead of once per slice, and gradients are written directly into the memory of
the all-reduce. A layer's output has one row per sample, independent of all other samples. Whether a row has the same
*bits* in a larger batch depends on the kernels, which may tile a larger matrix product differently, and can only be
found by trial. So the first steps of each shape are computed both ways, and every term of a slice is compared bit by
bit. Slices are batched only if all bits were equal and batching was clearly faster. Conditions that may change later
independently of the kernels are checked in every step: trained parameters, their paths, and drawn random numbers.

The all-reduced bits are the same either way, so every worker decides for itself, without communication.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from holdfast.clock import Clock
from holdfast.comm import device_of
from holdfast.data.seeds import generator_states
from holdfast.device_errors import DeviceFailure, classify
from holdfast.models.gradients import SliceGradients
from holdfast.models.loss import Forward, Loss, figure_of, loss_of
from holdfast.models.part import ModelPart
from holdfast.torch_private import gradient_hooks

TRIALS = 3
"""Steps that are computed both ways before slices of these shapes are batched."""
WORTH = 0.9
"""Batching must take less than this fraction of the unbatched time; untimed overhead takes some of the rest."""

Own = tuple[nn.Parameter, nn.Parameter | None]
"""Weight and bias of a layer."""
Written = Callable[[nn.Parameter], None]
"""Called with a parameter whose gradients are known."""
Into = Mapping[nn.Parameter, torch.Tensor]
"""Destination of each parameter's gradient."""


class CannotSplitError(Exception):
    """This model's gradients cannot be separated by slice; the message says why."""


@dataclass(slots=True)
class Slice:
    """A slice of a batch of slices."""

    number: int
    inputs: Sequence[Any]  # the items of the loaded batch: the model's input, then the loss's
    samples: int
    terms: SliceGradients  # the memory of its terms of the all-reduce
    figures: dict[str, torch.Tensor | float] = field(default_factory=dict)


@dataclass(slots=True)
class BatchingTrial:
    """The outcome of the trials for slices of some sizes."""

    sizes: tuple[int, ...]  # samples of each
    shapes: object = None  # of the inputs of the model and the loss
    times: int = 0  # steps that were computed both ways
    why_not: str = ""  # why they are not batched; "" if no reason is known so far
    at_once_s: float = 0.0  # shortest time of all slices of a step in one batch
    one_by_one_s: float = 0.0  # and one after another
    told: str | None = None  # the recorded outcome, "" if they are batched; None: not recorded so far

    @property
    def is_over(self) -> bool:
        """Whether the decision is final."""
        return self.times == TRIALS or bool(self.why_not)

    def take_shapes(self, inputs: Sequence[Sequence[Any]]) -> None:
        """Check that shapes do not change: with changing ones, such as text lengths, every step would be a trial."""
        shapes = [[(x.shape, x.dtype) if isinstance(x, torch.Tensor) else type(x) for x in slice_] for slice_ in inputs]
        if self.shapes not in (None, shapes) or len({x.shape[1:] for x, *_ in inputs}) > 1:
            raise CannotSplitError("sample shapes differ between slices, or between steps")
        self.shapes = shapes

    def add(self, at_once_s: float, one_by_one_s: float, *, same: bool) -> None:
        """Add the result of a step that was computed both ways, with the same bits or not."""
        self.times += 1
        self.at_once_s = min(self.at_once_s or at_once_s, at_once_s)
        self.one_by_one_s = min(self.one_by_one_s or one_by_one_s, one_by_one_s)
        if not same:
            self.why_not = "the bits differ"
        elif self.times == TRIALS and self.at_once_s > WORTH * self.one_by_one_s:
            self.why_not = "batching is slower, or hardly faster"


class SliceBatching:
    """Computes slices of a step in one pass, and remembers for which shapes that works."""

    def __init__(self, part: ModelPart, clock: Clock) -> None:
        self._part = part
        self._clock = clock
        self.took_s = 0.0
        """Duration of the last pass, seconds."""
        self._tried: dict[object, BatchingTrial] = {}
        self._layers: dict[nn.Module, Own] = {}
        self._trained: set[nn.Parameter] = set()
        self._why_not = ""
        try:
            self._layers = _layers_of(part.model)
            self._trained = {p for own in self._layers.values() for p in own if p is not None and p.requires_grad}
            if part.buckets.buffers.has_first:
                raise CannotSplitError("a buffer keeps the value after the first slice alone")
        except CannotSplitError as error:
            self._why_not = str(error)

    def tried(self, sizes: Sequence[int]) -> BatchingTrial:
        """Return the trials of slices with these numbers of samples."""
        key = (torch.get_num_threads(), self._part.model.training, *sizes)
        if key not in self._tried:
            self._tried[key] = BatchingTrial(tuple(sizes), why_not=self._why_not)
        return self._tried[key]

    def compute(
        self,
        tried: BatchingTrial,
        slices: Sequence[Slice],
        forward: Forward,
        loss: Loss,
        written: Written | None = None,
        num_begun: Callable[[], int] = lambda: 0,
    ) -> bool:
        """Compute slices and write their terms; return whether it worked. If not, ``tried`` has the reason.

        Args:
            tried: The trials of slices of these sizes.
            slices: The slices.
            forward: The model, or a function that calls it.
            loss: The loss of a slice.
            written: Called with each parameter whose gradients are in the terms of all slices.
            num_begun: Returns how many buckets are then begun: nothing more is written to these.
        """
        look = self._torch_states if tried.is_over else generator_states
        drawn = look()
        try:
            tried.take_shapes([slice_.inputs for slice_ in slices])
            begun_s = self.now_s(tried)
            recorder, gradients = self._compute(slices, forward, loss)
            if look() != drawn:
                raise CannotSplitError("the model draws random numbers, which differ between slices")
            self._write(slices, recorder, gradients, written)
            self._put(slices, num_begun())
            self.took_s = self.now_s(tried) - begun_s
        except CannotSplitError as error:
            tried.why_not = str(error)
        return not tried.why_not

    def now_s(self, tried: BatchingTrial) -> float:
        """Return the time, after waiting for the device where a duration is measured."""
        if not tried.is_over:
            device_of(self._part.device).synchronize()
        return self._clock.now_s()

    def _torch_states(self) -> list[bytes]:
        """Return the states of torch's generators: dropout may start to draw long after the trials."""
        states = [torch.get_rng_state()]
        if self._part.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._part.device))
        return [state.numpy().tobytes() for state in states]

    def _check_ways(self, totals: Sequence[torch.Tensor]) -> None:
        """Check that trained parameters enter the losses through their layer only, the only path covered here.

        Checked in every step, which takes microseconds: a penalty may start long after the trials.
        """
        ways = _ways(totals)
        if any(times > 1 for times in ways.values()):
            raise CannotSplitError("a parameter enters the loss other than through its layer, as in a penalty")
        if {getattr(node, "variable", None) for node in ways} != self._trained:
            raise CannotSplitError("the parameters that enter the loss are not the ones that were trainable at first")

    def _compute(self, slices: Sequence[Slice], forward: Forward, loss: Loss) -> tuple[_Watch, Sequence[torch.Tensor]]:
        """Compute the figures of slices; return the inputs of the layers, and the gradients of their outputs."""
        sizes = [slice_.samples for slice_ in slices]
        if [len(slice_.inputs[0]) for slice_ in slices] != sizes:
            raise CannotSplitError("the model's input does not have one row per sample")
        if any(_has_hooks(parameter, self._part.buckets.num_hooks) for parameter in self._part.buckets.parameters):
            raise CannotSplitError("a parameter has a hook")
        with _Watch(self._layers, sum(sizes)) as recorder, _script():
            outputs = forward(torch.cat([slice_.inputs[0] for slice_ in slices]))
        if not isinstance(outputs, torch.Tensor) or len(outputs) != sum(sizes):
            raise CannotSplitError("the model's output does not have one row per sample")
        totals = []
        for output, slice_ in zip(outputs.split(sizes), slices, strict=True):
            with _script():
                value, more = loss_of(loss, output, slice_.inputs[1:])
            totals.append(self._part.total(value, slice_.samples))
            slice_.figures = {name: figure_of(figure) for name, figure in {"loss": value, **more}.items()}
        self._check_ways(totals)
        with _script():
            gradients = torch.autograd.grad(
                totals, [recorder.edges[layer] for layer in self._layers], allow_unused=True
            )
        if any(gradient is None for gradient in gradients):
            raise CannotSplitError("the output of a layer does not enter the loss, or is modified in place")
        return recorder, gradients

    def _write(
        self, slices: Sequence[Slice], recorder: _Watch, gradients: Sequence[torch.Tensor], written: Written | None
    ) -> None:
        """Write the gradients of the parameters, those of the last layer first, as the buckets have them."""
        sizes = [slice_.samples for slice_ in slices]
        places = [dict(self._part.buckets.by_parameter(slice_.terms)) for slice_ in slices]
        with torch.no_grad(), _script():
            for layer, gradient in zip(reversed(self._layers), reversed(gradients), strict=True):
                given = recorder.given[layer].split(sizes)
                for part, back, into in zip(given, gradient.split(sizes), places, strict=True):
                    GRADIENTS[type(layer)](layer, part, back, into)
                if written is not None:
                    for parameter in _own_of(layer):
                        if parameter is not None and parameter.requires_grad:
                            written(parameter)

    def _put(self, slices: Sequence[Slice], begun: int) -> None:
        for slice_ in slices:
            for parameter, gradient in self._part.buckets.by_parameter(slice_.terms):
                parameter.grad = gradient
            self._part.buckets.put(slice_.terms, slice_.figures, slice_.samples, begun)


def _own_of(layer: nn.Module) -> Own:
    """Return the weight and the bias of a layer; raise if it has other parameters, such as a parametrization's."""
    own = dict(layer.named_parameters(recurse=False))
    weight, bias = own.pop("weight", None), own.pop("bias", None)
    if own or weight is None:
        raise CannotSplitError(
            f"an nn.{type(layer).__name__} has {', '.join(own) or 'no parameter'} instead of a weight and a bias"
        )
    return weight, bias


def has_bits(slice_: Slice, copies: Sequence[torch.Tensor]) -> bool:
    """Return whether the terms of a slice have the bits of ``copies``."""
    pairs = zip(slice_.terms.flat, copies, strict=True)
    return all(torch.equal(mine.view(torch.uint8), other.view(torch.uint8)) for mine, other in pairs)


@contextlib.contextmanager
def _script() -> Iterator[None]:
    """Convert errors of the script to a reason: it may rely on the slice size; others recur in the unbatched pass."""
    try:
        yield
    except CannotSplitError:
        raise
    except Exception as error:
        if classify(error) is DeviceFailure.LOST:  # it would be lost in the unbatched pass, too
            raise
        raise CannotSplitError(
            f"in one batch it raises {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        ) from error


def _ways(totals: Sequence[torch.Tensor]) -> Counter[Node]:
    """Return on how many paths of the backward graph each leaf is reached."""
    nodes: list[Node] = [total.grad_fn for total in totals if total.grad_fn is not None]
    seen = set(nodes)
    ways: Counter[Node] = Counter()
    while nodes:
        for node, _ in nodes.pop().next_functions:
            if node is None or node in seen:
                continue
            if node.next_functions:
                seen.add(node)
                nodes.append(node)
            else:
                ways[node] += 1
    return ways


class _Watch:
    """Records the input and output of each layer, one row per sample, during a forward pass."""

    def __init__(self, layers: Mapping[nn.Module, Own], rows: int) -> None:
        self._layers = layers
        self._rows = rows
        self.given: dict[nn.Module, torch.Tensor] = {}
        self.edges: dict[nn.Module, GradientEdge] = {}
        """The gradient edge of each output, valid even if the output is modified in place later."""

    def __enter__(self) -> _Watch:
        self._handles = [layer.register_forward_hook(self._note) for layer in self._layers]
        return self

    def _note(self, layer: nn.Module, given: tuple[Any, ...], output: torch.Tensor) -> None:
        name = type(layer).__name__
        if layer in self.given:
            raise CannotSplitError(f"an nn.{name} is used more than once")
        if any(now is not before for now, before in zip(_own_of(layer), self._layers[layer], strict=True)):
            raise CannotSplitError(f"an nn.{name} has been given another weight or bias")
        if len(given) != 1 or len(given[0]) != self._rows or len(output) != self._rows:
            raise CannotSplitError(f"the input of an nn.{name} does not have one row per sample")
        if not output.requires_grad or {output.dtype, *(p.dtype for p in layer.parameters())} != {output.dtype}:
            raise CannotSplitError(f"an nn.{name} changes the dtype, or its output requires no gradient")
        self.given[layer] = given[0].detach()
        self.edges[layer] = get_gradient_edge(output)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        if kind is None and len(self.given) < len(self._layers):
            raise CannotSplitError("not every layer is used")


# -- layers


def _layers_of(model: nn.Module) -> dict[nn.Module, Own]:
    """Return the trainable layers, of types in :data:`GRADIENTS`, with their parameters, which must not be shared."""
    layers: dict[nn.Module, Own] = {}
    seen: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        mine = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if mine and getattr(module, "max_norm", None) is not None:
            raise CannotSplitError(f"{name or 'the model'} changes its weights in the forward pass, for max_norm")
        if mine and type(module) not in GRADIENTS:
            raise CannotSplitError(
                f"{name or 'the model'} is a {type(module).__name__}, not {', '.join(k.__name__ for k in GRADIENTS)}"
            )
        if seen.intersection(mine):
            raise CannotSplitError(f"{name} shares a parameter with another layer")
        seen.update(mine)
        if mine:
            layers[module] = _own_of(module)
    return layers


def _has_hooks(parameter: nn.Parameter, ours: int) -> bool:
    """Return whether a parameter has gradient hooks besides the ``ours`` of the buckets."""
    on_the_way, accumulated = gradient_hooks(parameter)
    return on_the_way > 0 or accumulated > ours


def _of_linear(layer: nn.Module, given: torch.Tensor, back: torch.Tensor, into: Into) -> None:
    assert isinstance(layer, nn.Linear)
    weight, bias = _own_of(layer)
    given, back = given.flatten(0, -2), back.flatten(0, -2)
    if weight in into:
        torch.mm(back.t(), given, out=into[weight])
    if bias is not None and bias in into:
        torch.sum(back, 0, out=into[bias])


def _of_layer_norm(layer: nn.Module, given: torch.Tensor, back: torch.Tensor, into: Into) -> None:
    assert isinstance(layer, nn.LayerNorm)
    shape = list(layer.normalized_shape)
    _, mean, rstd = torch.ops.aten.native_layer_norm(given, shape, layer.weight, layer.bias, layer.eps)
    own = _own_of(layer)
    masks = [False, *(parameter in into for parameter in own)]
    made = torch.ops.aten.native_layer_norm_backward(back, given, shape, mean, rstd, layer.weight, layer.bias, masks)
    for parameter, gradient in zip(own, made[1:], strict=True):
        if parameter is not None and parameter in into:
            into[parameter].copy_(gradient)


def _of_embedding(layer: nn.Module, given: torch.Tensor, back: torch.Tensor, into: Into) -> None:
    assert isinstance(layer, nn.Embedding)
    weight, _ = _own_of(layer)
    padding = -1 if layer.padding_idx is None else layer.padding_idx
    made = torch.ops.aten.embedding_dense_backward(back, given, layer.num_embeddings, padding, layer.scale_grad_by_freq)
    into[weight].copy_(made)


GRADIENTS: dict[type[nn.Module], Callable[[nn.Module, torch.Tensor, torch.Tensor, Into], None]] = {
    nn.Linear: _of_linear,
    nn.LayerNorm: _of_layer_norm,
    nn.Embedding: _of_embedding,
}
"""Functions that write a layer's parameter gradients, by autograd's formulas. Batching would slow down convolutions."""
