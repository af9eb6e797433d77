"""The design of the soft-error study: the settings of each experiment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from holdfast.faults.formats import FORMATS
from holdfast_lab.studies.campaign_plan import Cell
from holdfast_lab.studies.soft_errors.setup import (
    ALL,
    BELOW,
    CRITICAL,
    DDP,
    EACH,
    HYBRID,
    MODEL,
    OPTIMIZER,
    PIPELINE,
    SoftErrorCase,
    SoftErrorSetup,
)
from holdfast_lab.workloads.models import layout

QUICK, CROSSED, BIT_BY_BIT, FORMATS_TRIED, LAYERS, BURSTS, COUNTS, PROPAGATION, NETWORKS = (
    "quick",
    "crossed",
    "bit-by-bit",
    "formats",
    "layers",
    "bursts",
    "processes",
    "propagation",
    "networks",
)
EXPERIMENTS = (CROSSED, BIT_BY_BIT, FORMATS_TRIED, LAYERS, BURSTS, COUNTS, PROPAGATION, NETWORKS)
"""Experiments of the full design, in order."""
FLIPS = (1, 10, 100, 500, 1000)
BITS = (ALL, BELOW, CRITICAL)
WIDTHS = ("float16", "bfloat16", "float32", "float64")
_THREE = ((1, ALL), (1, CRITICAL), (100, BELOW))
_BURSTS = (2, 4, 8)
_FOUR, _EIGHT = 4, 8

Pair = tuple[SoftErrorCase, SoftErrorSetup]


def cells_of(pairs: Sequence[Pair]) -> list[Cell]:
    """Return the campaign cells of these pairs."""
    return [Cell(case.name(setup), case.settings(setup)) for case, setup in pairs]


def setup_of(base: SoftErrorSetup, platform: str, processes: int) -> SoftErrorSetup:
    """Return a setup on another platform: a pipeline has one stage per process, at most one per network block.

    A hybrid has two stages.
    """
    if platform == PIPELINE:
        processes = min(processes, len(layout(base.network).blocks))
    stages = {PIPELINE: processes, HYBRID: 2}.get(platform, 1)
    return replace(base, platform=platform, processes=processes, stages=stages)


def quick_pairs(base: SoftErrorSetup, platforms: Sequence[str]) -> list[Pair]:
    """Return the cells of ``--quick``: two processes, one of them altered."""
    return [pair for platform in platforms for pair in _three(QUICK, setup_of(base, platform, 2))]


def experiments(
    base: SoftErrorSetup, platforms: Sequence[str], processes: int, others: Sequence[SoftErrorSetup] = ()
) -> Iterator[tuple[str, str, list[Pair]]]:
    """Yield the full design, part by part: the experiment, the part's name, and its pairs.

    Args:
        base: The training that the design varies.
        platforms: Platforms to run. All run the crossed design; the other experiments run under DDP only.
        processes: Processes of the crossed design, at least 2.
        others: Further networks and datasets, each run with the settings of ``--quick``.
    """
    for platform in platforms:
        yield CROSSED, f"{CROSSED}: {platform}", crossed(setup_of(base, platform, processes))
    if DDP not in platforms:
        return
    two = setup_of(base, DDP, 2)
    for width in WIDTHS:
        yield BIT_BY_BIT, f"{BIT_BY_BIT}: {width}", bit_by_bit(replace(two, dtype=width))
        yield FORMATS_TRIED, f"{FORMATS_TRIED}: {width}", formats(two, width)
    yield LAYERS, LAYERS, layers(two)
    yield BURSTS, BURSTS, bursts(two)
    for count in (2, _EIGHT):
        yield COUNTS, f"{COUNTS}: {count}", counts(setup_of(base, DDP, count))
    yield PROPAGATION, PROPAGATION, propagation(replace(setup_of(base, DDP, _EIGHT), epochs=10))
    for other in others:
        name = f"{NETWORKS}: {other.network} on {other.dataset}"
        yield NETWORKS, name, _three(NETWORKS, setup_of(other, DDP, 2))


def crossed(setup: SoftErrorSetup) -> list[Pair]:
    """Return the crossed design for model and optimizer.

    Any bits, and the critical bit, are flipped in one, half and all processes; bits below the critical one are flipped
    in one.
    """
    count = setup.processes
    some = sorted({1, count // 2, count})
    cases = [(altered, flips, ALL) for altered in some for flips in FLIPS]
    cases += [(altered, 1, CRITICAL) for altered in some]
    cases += [(1, flips, BELOW) for flips in FLIPS]
    return [
        (SoftErrorCase(experiment=CROSSED, target=target, altered=altered, flips=flips, bits=bits), setup)
        for target in (MODEL, OPTIMIZER)
        for altered, flips, bits in cases
    ]


def bit_by_bit(setup: SoftErrorSetup) -> list[Pair]:
    """Return one flip of each bit position in turn."""
    return [(SoftErrorCase(experiment=BIT_BY_BIT, bits=str(bit)), setup) for bit in range(FORMATS[setup.dtype].bits)]


def formats(setup: SoftErrorSetup, width: str) -> list[Pair]:
    """Return training in a number format, and altering values in that format when training in float32."""
    trained = _three(FORMATS_TRIED, replace(setup, dtype=width))
    if width == setup.dtype:
        return trained
    return trained + [(replace(case, format=width), setup) for case, _ in trained]


def layers(setup: SoftErrorSetup) -> list[Pair]:
    """Return alterations of only the first, the middle or the last layer."""
    return [
        (replace(case, layer=layer), s) for layer in ("first", "middle", "last") for case, s in _three(LAYERS, setup)
    ]


def bursts(setup: SoftErrorSetup) -> list[Pair]:
    """Return bursts of neighbouring bits, anywhere in a value and below the critical bit."""
    return [
        (SoftErrorCase(experiment=BURSTS, flips=flips, bits=bits, burst=burst), setup)
        for burst in _BURSTS
        for flips in (1, 10)
        for bits in (ALL, BELOW)
    ]


def counts(setup: SoftErrorSetup) -> list[Pair]:
    """Return alterations of one, four and all processes."""
    some = sorted({1, min(_FOUR, setup.processes), setup.processes})
    return [(replace(case, altered=altered), s) for altered in some for case, s in _three(COUNTS, setup)]


def propagation(setup: SoftErrorSetup) -> list[Pair]:
    """Return a thousand flips in one process, and a thousand flips spread over all processes."""
    each = 1000 // setup.processes
    return [
        (SoftErrorCase(experiment=PROPAGATION, flips=1000, bits=BELOW), setup),
        (SoftErrorCase(experiment=PROPAGATION, flips=each, bits=BELOW, altered=setup.processes, draws=EACH), setup),
    ]


def _three(experiment: str, setup: SoftErrorSetup) -> list[Pair]:
    return [(SoftErrorCase(experiment=experiment, flips=flips, bits=bits), setup) for flips, bits in _THREE]
