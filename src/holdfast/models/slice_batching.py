"""Several slices through the model at once, where that keeps the bits that each has by itself.

::

    samples of all slices ──► layer ──► layer ──► outputs ──► the loss of each slice
                                │         │          ▲               │
                                └─────────┴──────────┴───────────────┘  one backward pass, of what goes from layer to layer
                                │         │
          gradients of its parameters: slice by slice, of what went into the layer and what came back

Weights are read once for all slices instead of once for each, and a gradient is written where the sum finds it. A layer's
output has a row for each sample, which no other sample has a part in; but whether it has the same *bits* among more rows
depends on the kernels: a library may cut a product of matrices otherwise when one of them is longer. Nobody can know that
without looking. So the first steps of each shape are computed in both ways, everything that a slice gives to the sums is
compared bit by bit, and slices go at once only where all were the same, and that took clearly less. What may change later without
the kernels having a part in it is looked at in every step: what is trained and by which ways, and whether anything is drawn.

What is summed is the same bits either way, so every worker decides for itself, and nobody needs to be told.
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
from holdfast.data.seeds import generator_states
from holdfast.models.gradients import Terms
from holdfast.models.loss import Forward, Loss, figure_of, loss_of
from holdfast.models.part import Part
from holdfast.torch_private import gradient_hooks

TRIALS = 3
"""Steps that are computed in both ways before slices of these shapes go at once."""
WORTH = 0.9
"""Of the time that they take one by one: what is around the passes, and was not timed, takes some of the rest."""

Own = tuple[nn.Parameter, nn.Parameter | None]
"""The weight and the bias of a layer."""
Into = Mapping[nn.Parameter, torch.Tensor]
"""Where the gradient of each parameter goes that has one."""


class CannotSplitError(Exception):
    """The gradients of this model cannot be taken apart by slice; the message says why."""


@dataclass(slots=True)
class Slice:
    """A slice that goes with others."""

    number: int
    inputs: Sequence[Any]  # what it is loaded with: the model's, then the loss's
    samples: int
    terms: Terms  # where the sums look for what it gives
    figures: dict[str, torch.Tensor | float] = field(default_factory=dict)


@dataclass(slots=True)
class Tried:
    """What was found of slices of some sizes."""

    sizes: tuple[int, ...]  # samples of each
    shapes: object = None  # of what goes into the model and the loss
    times: int = 0  # steps that were computed in both ways
    why_not: str = ""  # why they do not go at once; "" if nothing speaks against it so far
    at_once_s: float = 0.0  # the least time that all slices of a step took at once
    one_by_one_s: float = 0.0  # and one after another
    told: str | None = None  # what was written down of it, "" that they go at once; None: nothing so far

    @property
    def is_over(self) -> bool:
        """Whether it is known how they go from now on."""
        return self.times == TRIALS or bool(self.why_not)

    def take_shapes(self, inputs: Sequence[Sequence[Any]]) -> None:
        """Look whether slices have the shapes that they had before; where these change, as of texts, every step would be a trial."""
        shapes = [[(x.shape, x.dtype) if isinstance(x, torch.Tensor) else type(x) for x in slice_] for slice_ in inputs]
        if self.shapes not in (None, shapes) or len({x.shape[1:] for x, *_ in inputs}) > 1:
            raise CannotSplitError("samples of one slice have another shape than those of another, or of another step")
        self.shapes = shapes

    def add(self, at_once_s: float, one_by_one_s: float, *, same: bool) -> None:
        """Take in a step that was computed in both ways, with the same bits or not."""
        self.times += 1
        self.at_once_s = min(self.at_once_s or at_once_s, at_once_s)
        self.one_by_one_s = min(self.one_by_one_s or one_by_one_s, one_by_one_s)
        if not same:
            self.why_not = "the bits are others"
        elif self.times == TRIALS and self.at_once_s > WORTH * self.one_by_one_s:
            self.why_not = "it takes longer, or hardly less"


class AtOnce:
    """Computes slices of a step in one pass, and knows for which that is good."""

    def __init__(self, part: Part, clock: Clock) -> None:
        self._part = part
        self._clock = clock
        self.took_s = 0.0
        """The last pass."""
        self._tried: dict[object, Tried] = {}
        self._layers: dict[nn.Module, Own] = {}
        self._trained: set[nn.Parameter] = set()
        self._why_not = ""
        try:
            self._layers = _layers_of(part.model)
            self._trained = {p for own in self._layers.values() for p in own if p is not None and p.requires_grad}
        except CannotSplitError as error:
            self._why_not = str(error)

    def tried(self, sizes: Sequence[int]) -> Tried:
        """Return what is known of slices of so many samples."""
        key = (torch.get_num_threads(), self._part.model.training, *sizes)
        if key not in self._tried:
            self._tried[key] = Tried(tuple(sizes), why_not=self._why_not)
        return self._tried[key]

    def compute(self, tried: Tried, slices: Sequence[Slice], forward: Forward, loss: Loss) -> bool:
        """Compute slices, and write what they give where the sums look for it; return whether it worked: ``tried`` knows why not."""
        look = self._torch_states if tried.is_over else generator_states
        drawn = look()
        try:
            tried.take_shapes([slice_.inputs for slice_ in slices])
            begun_s = self.now_s(tried)
            self._compute(slices, forward, loss)
            self.took_s = self.now_s(tried) - begun_s
            if look() != drawn:
                tried.why_not = "it draws random numbers, others for each slice"
        except CannotSplitError as error:
            tried.why_not = str(error)
        return not tried.why_not

    def now_s(self, tried: Tried) -> float:
        """Return the time, once all is computed that was begun, where it is to be known how long it took."""
        if not tried.is_over and self._part.device.type != "cpu":
            torch.accelerator.synchronize(self._part.device)
        return self._clock.now_s()

    def _torch_states(self) -> list[bytes]:
        """Return where torch's generators are: dropout begins to draw when its rate is no longer 0, which may be long after the trial."""
        states = [torch.get_rng_state()]
        if self._part.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._part.device))
        return [state.numpy().tobytes() for state in states]

    def _check_ways(self, totals: Sequence[torch.Tensor]) -> None:
        """See that what is trained comes into the losses by its layer alone, whose gradient is all that is taken here.

        In every step, which takes microseconds: a penalty may begin, or weigh more than nothing, long after the trial.
        """
        ways = _ways(totals)
        if any(times > 1 for times in ways.values()):
            raise CannotSplitError("a parameter has a part in the loss besides its layer's, as in a penalty")
        if {getattr(node, "variable", None) for node in ways} != self._trained:
            raise CannotSplitError("what has a part in the loss is not what was to be trained at first")

    def _compute(self, slices: Sequence[Slice], forward: Forward, loss: Loss) -> None:
        sizes = [slice_.samples for slice_ in slices]
        if [len(slice_.inputs[0]) for slice_ in slices] != sizes:
            raise CannotSplitError("what goes into the model has no row for each sample")
        if any(map(_has_hooks, self._part.buckets.parameters)):
            raise CannotSplitError("a parameter has a hook")
        with _Watch(self._layers, sum(sizes)) as watch, _script():
            outputs = forward(torch.cat([slice_.inputs[0] for slice_ in slices]))
        if not isinstance(outputs, torch.Tensor) or len(outputs) != sum(sizes):
            raise CannotSplitError("what comes out of the model has no row for each sample")
        totals = []
        for output, slice_ in zip(outputs.split(sizes), slices, strict=True):
            with _script():
                value, more = loss_of(loss, output, slice_.inputs[1:])
            totals.append(self._part.total(value, slice_.samples))
            slice_.figures = {name: figure_of(figure) for name, figure in {"loss": value, **more}.items()}
        self._check_ways(totals)
        with _script():
            gradients = torch.autograd.grad(totals, [watch.edges[layer] for layer in self._layers], allow_unused=True)
        if any(gradient is None for gradient in gradients):
            raise CannotSplitError("the output of a layer has no part in the loss, or is changed in place")
        places = [dict(self._part.buckets.by_parameter(slice_.terms)) for slice_ in slices]
        with torch.no_grad(), _script():
            for layer, gradient in zip(self._layers, gradients, strict=True):
                given = watch.given[layer].split(sizes)
                for part, back, into in zip(given, gradient.split(sizes), places, strict=True):
                    GRADIENTS[type(layer)](layer, part, back, into)
        for slice_, into in zip(slices, places, strict=True):
            for parameter, written in into.items():
                parameter.grad = written
            self._part.buckets.put(slice_.terms, slice_.figures, slice_.samples)


def _own_of(layer: nn.Module) -> Own:
    """Return the weight and the bias of a layer, if it has no others, as where one is made of something else on the way forward."""
    own = dict(layer.named_parameters(recurse=False))
    weight, bias = own.pop("weight", None), own.pop("bias", None)
    if own or weight is None:
        raise CannotSplitError(
            f"one {type(layer).__name__} has {', '.join(own) or 'nothing'} in the place of a weight and a bias"
        )
    return weight, bias


def has_bits(slice_: Slice, copies: Sequence[torch.Tensor]) -> bool:
    """Return whether what a slice gives to the sums has the bits of ``copies``."""
    pairs = zip(slice_.terms.flat, copies, strict=True)
    return all(torch.equal(mine.view(torch.uint8), other.view(torch.uint8)) for mine, other in pairs)


@contextlib.contextmanager
def _script() -> Iterator[None]:
    """Let what the script raises be a reason: it may count on the size of a slice, and if not, it raises one by one, too."""
    try:
        yield
    except CannotSplitError:
        raise
    except Exception as error:
        raise CannotSplitError(
            f"with all at once it raises {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        ) from error


def _ways(totals: Sequence[torch.Tensor]) -> Counter[Node]:
    """Return how often one comes by each thing that is trained on the way back."""
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
    """Notes what goes into layers, a row for each sample, and what comes out, while a forward pass is within it."""

    def __init__(self, layers: Mapping[nn.Module, Own], rows: int) -> None:
        self._layers = layers
        self._rows = rows
        self.given: dict[nn.Module, torch.Tensor] = {}
        self.edges: dict[nn.Module, GradientEdge] = {}
        """Where the gradient of an output comes by, also of one that is changed in place later."""

    def __enter__(self) -> _Watch:
        self._handles = [layer.register_forward_hook(self._note) for layer in self._layers]
        return self

    def _note(self, layer: nn.Module, given: tuple[Any, ...], output: torch.Tensor) -> None:
        name = type(layer).__name__
        if layer in self.given:
            raise CannotSplitError(f"one {name} is used more than once")
        if any(now is not before for now, before in zip(_own_of(layer), self._layers[layer], strict=True)):
            raise CannotSplitError(f"one {name} has got another weight or bias")
        if len(given) != 1 or len(given[0]) != self._rows or len(output) != self._rows:
            raise CannotSplitError(f"one {name} is given something else than a row for each sample")
        if not output.requires_grad or {output.dtype, *(p.dtype for p in layer.parameters())} != {output.dtype}:
            raise CannotSplitError(f"one {name} gives another type of number than it has, or nothing that is trained")
        self.given[layer] = given[0].detach()
        self.edges[layer] = get_gradient_edge(output)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        if kind is None and len(self.given) < len(self._layers):
            raise CannotSplitError("not every layer is used")


# -- layers


def _layers_of(model: nn.Module) -> dict[nn.Module, Own]:
    """Return the layers that have parameters to train, with what they have: of the kinds of :data:`GRADIENTS`, and none shared."""
    layers: dict[nn.Module, Own] = {}
    seen: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        mine = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if mine and getattr(module, "max_norm", None) is not None:
            raise CannotSplitError(f"{name or 'the model'} changes its weights on the way forward, for max_norm")
        if mine and type(module) not in GRADIENTS:
            raise CannotSplitError(
                f"{name or 'the model'} is a {type(module).__name__}; those that are known are {', '.join(kind.__name__ for kind in GRADIENTS)}"
            )
        if seen.intersection(mine):
            raise CannotSplitError(f"{name} shares a parameter with another layer")
        seen.update(mine)
        if mine:
            layers[module] = _own_of(module)
    return layers


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Return whether somebody else than the buckets wants to see each gradient."""
    on_the_way, accumulated = gradient_hooks(parameter)
    return on_the_way > 0 or accumulated > 1


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
"""What writes the gradients of a layer's parameters, by the formulas of autograd. Convolutions are left out: at once they take longer."""
