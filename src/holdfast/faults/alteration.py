"""Altering values: which bits of which values, drawn from a seed.

Altered values lie in *places*, which are tensors in memory or in a file; :class:`Values` is the interface they need::

    flips = draw(values, Alteration(count=10, bits="critical", seed=1))
    apply(values, flips)                                  # applying bit flips a second time undoes them
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.faults.formats import FIELDS, NumberFormat, Raw
from holdfast.faults.reading import FaultNotAllowed

LAWS = ("bits", "values", "tensors")
"""What is drawn uniformly; see :attr:`Alteration.law`."""

_ROUNDS = 200
"""How often sites that made a value infinite or NaN are redrawn before the draw fails."""

_BATCH = 1 << 16
"""Number of sites in a batch: a batch that stays in the processor's cache is not fetched from memory again."""


@dataclass(frozen=True, slots=True)
class ValuePosition:
    """A tensor whose values can be altered.

    Args:
        path: Its name, components joined by ``/``.
        format: Number format of its values.
        shape: Shape of the tensor; ``()`` for a scalar.
    """

    path: str
    format: NumberFormat
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Return the number of its values."""
        return math.prod(self.shape)


class Values(Protocol):
    """Values that can be read and written, by place and index in row-major order.

    Several places are requested in one call, because every call of the operating system or of HDF5 has a cost.
    """

    @property
    def places(self) -> Sequence[ValuePosition]:
        """The places whose values can be altered."""

    def read(self, wanted: Sequence[tuple[int, NDArray[np.int64]]]) -> list[Raw]:
        """Return raw values of different places, of shape (k,) each, for strictly ascending indices."""

    def write(self, changes: Sequence[ValueChange]) -> None:
        """Write the ``after`` values of changes to different places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alteration:
    """How values are altered, and how the altered values are drawn.

    Give one of ``count``, ``percent`` and ``rate``; with none of them, one value is altered.

    Raises:
        NotAllowed: if a value is not allowed.
    """

    count: int | None = None
    """Number of alterations, at least 1: distinct bits; or values, if ``burst``, ``mask`` or ``scale`` is given."""
    percent: float | None = None
    """Percentage of all values that are altered, each once; above 0, at most 100."""
    rate: float | None = None
    """Bit error rate: the probability with which each eligible bit is altered; above 0, at most 1."""
    probability: float = 1.0
    """Probability with which each drawn alteration is applied; above 0, at most 1."""
    bits: str = "all"
    """Which bits of a value: ``FIRST:LAST`` or one number, counted from the least significant, or one of
    :data:`~holdfast.faults.formats.FIELDS`."""
    burst: int = 1
    """Number of neighbouring bits of a value that are flipped together."""
    mask: str | None = None
    """A bit pattern such as ``1011`` whose ones are flipped, at any position among the eligible bits where it fits."""
    scale: float | None = None
    """Values are multiplied by this factor; no bit is flipped."""
    keep_sign: bool = False
    """The sign bit is not eligible."""
    finite: bool = False
    """An alteration that would make a finite value infinite or NaN is redrawn."""
    law: str = "bits"
    """What is drawn uniformly. ``bits``: every eligible bit is equally likely, so wide values are hit more often.
    ``values``: first a value, then one of its bits. ``tensors``: first a tensor, whatever its size, then one of its
    bits, as the injector of 2022 draws. If whole values are drawn (``percent``, ``burst``, ``mask``, ``scale``),
    ``bits`` and ``values`` are the same."""
    seed: int = 0
    """The same seed and places give the same alterations."""

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.count, self.percent, self.rate)) > 1:
            raise FaultNotAllowed("give only one of {count}, {percent} and {rate}, got more; leave the others out")
        _check("count", self.count, self.count is None or self.count >= 1, "at least 1")
        _check("percent", self.percent, self.percent is None or 0 < self.percent <= 100, "above 0 and at most 100")
        _check("rate", self.rate, self.rate is None or 0 < self.rate <= 1, "above 0 and at most 1")
        _check("probability", self.probability, 0 < self.probability <= 1, "above 0 and at most 1")
        _check("burst", self.burst, self.burst >= 1, "at least 1")
        _check("law", self.law, self.law in LAWS, f"one of {', '.join(LAWS)}")
        _check("seed", self.seed, self.seed >= 0, "at least 0")
        if self.scale is not None and not math.isfinite(self.scale):
            raise FaultNotAllowed(
                "{scale} must be finite, got {}; to make values infinite, flip bits of their exponent", self.scale
            )
        if self.mask is not None and (not self.mask or set(self.mask) - {"0", "1"} or "1" not in self.mask):
            raise FaultNotAllowed("{mask} must be zeros and ones with a one among them, as 1011, got {!r}", self.mask)
        ways = (("{burst}", self.burst > 1), ("{mask}", self.mask), ("{scale}", self.scale))
        together = [name for name, value in ways if value]
        if len(together) > 1:
            raise FaultNotAllowed(f"{' and '.join(together)} cannot be given together; choose one")
        if together and self.rate is not None:
            raise FaultNotAllowed(
                f"{{rate}} applies to single bits and cannot be combined with {together[0]}; give {{count}} or {{percent}}"
            )
        if self.scale is not None and (self.bits != "all" or self.keep_sign):
            raise FaultNotAllowed(
                "{scale} multiplies whole values and cannot be combined with {bits} or {keep_sign}; leave these out"
            )
        self._parse_bits()

    @property
    def pattern(self) -> tuple[int, int]:
        """Return the bits that are flipped together, counted from the first of them, and the width that they span."""
        if self.mask is not None:
            return int(self.mask, 2), len(self.mask)
        return (1 << self.burst) - 1, self.burst

    def offsets(self, format: NumberFormat) -> range:
        """Return the bits of a value of this format at which the pattern may begin; empty if it does not fit."""
        named = self._parse_bits()
        first, last = format.range_of(self.bits) if named is None else named
        if first > last:
            return range(0)
        last = min(last, format.bits - 1)
        if self.keep_sign and format.signed:
            last = min(last, format.bits - 2)
        return range(first, max(first, last - self.pattern[1] + 2))

    def _parse_bits(self) -> tuple[int, int] | None:
        """Return the first and the last bit, None if a field name is given."""
        if self.bits in FIELDS:
            return None
        first, colon, last = self.bits.partition(":")
        ends = (first, last if colon else first)
        if not all(end.isascii() and end.isdigit() and int(end) < 64 for end in ends) or int(ends[0]) > int(ends[1]):
            raise FaultNotAllowed(
                "{bits} must be one of {}, a number from 0 to 63 or FIRST:LAST, counted from the least significant bit, got {!r}",
                ", ".join(FIELDS),
                self.bits,
            )
        return int(ends[0]), int(ends[1])


@dataclass(frozen=True, slots=True)
class ValueChange:
    """Changes to values of one place.

    Args:
        place: Number of the place.
        index: Indices of the values, strictly ascending; int64, of shape (k,).
        before: Raw values, of shape (k,).
        after: Raw values, of shape (k,).
    """

    place: int
    index: NDArray[np.int64]
    before: Raw
    after: Raw

    def __len__(self) -> int:
        """Return the number of changed values."""
        return len(self.index)


def apply(values: Values, changes: Sequence[ValueChange]) -> None:
    """Write changes to the values."""
    values.write(changes)


def draw(values: Values, alteration: Alteration) -> list[ValueChange]:
    """Draw changes; nothing is written.

    The cost grows with the number of alterations, not with the number of values.

    Returns:
        One change for each place in which something changes, in the order of the places.

    Raises:
        ConfigError: if there is nothing to alter, less than requested, or nothing that ``finite`` permits.
    """
    rng = np.random.default_rng(alteration.seed)
    sites = _Sites(values.places, alteration)
    wanted = sites.wanted(rng)
    drawn: dict[int, NDArray[np.int64]] = {}
    rounds = 0
    while missing := wanted - sum(map(len, drawn.values())):
        rounds += 1
        if rounds > _ROUNDS:
            raise FaultNotAllowed(
                f"almost every remaining alteration makes a value infinite or NaN: of {wanted} that do not, {missing} "
                f"were not found in {_ROUNDS} attempts; permit infinite values, or choose fewer or other bits"
            )
        for place, new in sites.draw(rng, missing, drawn).items():
            old = drawn.get(place)
            union = new if old is None else np.insert(old, np.searchsorted(old, new), new)
            drawn[place] = sites.harmless(values, place, union) if alteration.finite else union
    return sites.changes(values, drawn)


class _Sites:
    """All sites that can be altered, numbered within each place: by value, and by the first bit of the pattern."""

    def __init__(self, places: Sequence[ValuePosition], alteration: Alteration) -> None:
        self._alteration = alteration
        self._places = places
        # Each bit is altered at most once, and so is each value that is altered as a whole.
        self._by_bit = alteration.scale is None and alteration.percent is None and alteration.pattern[1] == 1
        offsets = {
            name: range(1) if alteration.scale is not None else alteration.offsets(format)
            for name, format in {p.format.name: p.format for p in places}.items()
        }
        self._offsets = [offsets[p.format.name] for p in places]
        self._counts = [p.count if span else 0 for p, span in zip(places, self._offsets, strict=True)]
        self._values = sum(self._counts)
        each = [len(span) if self._by_bit else 1 for span in self._offsets]
        self._units = np.array(self._counts, np.int64) * np.array(each, np.int64)
        if not self._values:
            bits = alteration.bits + (" but the sign" if alteration.keep_sign else "")
            raise FaultNotAllowed(
                f"there is nothing to alter: no value of {len(places)} tensors has bits {bits} wide enough for this"
            )

    def wanted(self, rng: np.random.Generator) -> int:
        """Return the number of alterations to make."""
        alteration, total = self._alteration, int(self._units.sum())
        if alteration.rate is not None:
            wanted = int(rng.binomial(total, alteration.rate))
        elif alteration.percent is not None:
            wanted = max(1, round(alteration.percent / 100 * self._values))
        else:
            wanted = 1 if alteration.count is None else alteration.count
        if wanted > total:
            what = "bits" if self._by_bit else "values"
            raise FaultNotAllowed("{count} must be at most {}, the {} that may be altered, got {}", total, what, wanted)
        return int(rng.binomial(wanted, alteration.probability)) if alteration.probability < 1 else wanted

    def draw(
        self, rng: np.random.Generator, count: int, drawn: dict[int, NDArray[np.int64]]
    ) -> dict[int, NDArray[np.int64]]:
        """Return new sites, ascending within each place, at most ``count`` in total."""
        left = self._units - np.array([len(drawn.get(place, ())) for place in range(len(self._units))], np.int64)
        law = self._alteration.law
        if law == "bits" or (law == "values" and not self._by_bit):
            ends = np.cumsum(left)
            ranks = _rising(rng, count, int(ends[-1]))
            picks = {place: ranks[part] for place, part in _parts(ranks, ends - left)}
        else:
            free = np.flatnonzero(left)
            weights = np.array(self._counts, np.float64)[free] if law == "values" else np.ones(len(free))
            shares = np.minimum(rng.multinomial(count, weights / weights.sum()), left[free])
            picks = {int(p): _rising(rng, int(n), int(left[p])) for p, n in zip(free, shares, strict=True) if n}
        return {place: self._sites(rng, place, ranks, drawn.get(place)) for place, ranks in picks.items()}

    def _sites(
        self, rng: np.random.Generator, place: int, ranks: NDArray[np.int64], drawn: NDArray[np.int64] | None
    ) -> NDArray[np.int64]:
        """Return sites by their ranks among the sites of the place that were not drawn before."""
        offsets = len(self._offsets[place])
        units = ranks
        if drawn is not None:
            taken = drawn if self._by_bit else drawn // offsets
            units = ranks + np.searchsorted(taken - np.arange(len(taken)), ranks, side="right")
        return units if self._by_bit else units * offsets + rng.integers(offsets, size=len(units))

    def harmless(self, values: Values, place: int, sites: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those sites of a place, among all altered there, that leave finite values finite."""
        (change,) = self.changes(values, {place: sites})
        format = self._places[place].format
        harmed = change.index[format.is_finite(change.before) & ~format.is_finite(change.after)]
        return sites[~np.isin(sites // len(self._offsets[place]), harmed)] if len(harmed) else sites

    def changes(self, values: Values, drawn: Mapping[int, NDArray[np.int64]]) -> list[ValueChange]:
        """Return the changes made by altering all these sites, by place in ascending order."""
        changes = []
        if self._alteration.scale is not None:
            wanted = sorted(drawn.items())
            for (place, sites), before in zip(wanted, values.read(wanted), strict=True):
                format = self._places[place].format
                numbers = format.values(before).astype(np.float64)
                changes.append(ValueChange(place, sites, before, format.raw_of(numbers * self._alteration.scale)))
        else:
            masks = {place: (index, mask) for place, index, mask in self._masks(drawn)}
            wanted = [(place, masks[place][0]) for place in sorted(masks)]
            for (place, index), before in zip(wanted, values.read(wanted), strict=True):
                mask = masks[place][1]
                changes.append(ValueChange(place, index, before, np.bitwise_xor(before, mask, out=mask)))
        return [change for change in changes if len(change)]

    def _masks(self, drawn: Mapping[int, NDArray[np.int64]]) -> Iterator[tuple[int, NDArray[np.int64], Raw]]:
        """Yield, by place, the indices of the values that contain sites, each once, and the bits of each to flip."""
        alike: dict[str, list[int]] = {}
        for place in drawn:
            alike.setdefault(self._places[place].format.name, []).append(place)
        for places in alike.values():
            offsets, raw = self._offsets[places[0]], self._places[places[0]].format.raw
            if len(places) == 1:  # it may be large, so it is not copied
                yield places[0], *_merged(drawn[places[0]], offsets, self._alteration.pattern[0], raw)
                continue
            # Many small places take no longer than a large one: they are handled as one concatenated array.
            counts = np.array([self._counts[place] for place in places], np.int64)
            starts = np.cumsum(counts) - counts
            sites = [
                drawn[place] + start for place, start in zip(places, (starts * len(offsets)).tolist(), strict=True)
            ]
            index, masks = _merged(np.concatenate(sites), offsets, self._alteration.pattern[0], raw)
            for number, part in _parts(index, starts):
                yield places[number], index[part], masks[part]


def _merged(
    sites: NDArray[np.int64], offsets: range, pattern: int, raw: np.dtype[Any]
) -> tuple[NDArray[np.int64], Raw]:
    """Return the indices of the values that contain sites, each once, and the bits of each to flip.

    Args:
        sites: Ascending; a value has as many sites as there are offsets.
        offsets: The bit of a value at which each site begins.
        pattern: The bits flipped together, counted from that bit.
        raw: The type of the bits.
    """
    index, masks = np.empty(len(sites), np.int64), np.empty(len(sites), raw)
    bits, end = raw.type(pattern), 0
    for start in range(0, len(sites), _BATCH):
        batch = sites[start : start + _BATCH]
        value = batch // len(offsets)
        first = np.flatnonzero(np.diff(value, prepend=-1))
        shift = (batch - value * len(offsets) + offsets.start).astype(raw)
        mask = np.bitwise_or.reduceat(bits << shift, first)
        if end and index[end - 1] == value[0]:  # the previous batch ended within this value
            masks[end - 1] |= mask[0]
            first, mask = first[1:], mask[1:]
        index[end : end + len(first)], masks[end : end + len(first)] = value[first], mask
        end += len(first)
    return index[:end], masks[:end]


def _parts(numbers: NDArray[np.int64], starts: NDArray[np.int64]) -> list[tuple[int, slice]]:
    """Split ascending numbers at some starts, and make each part relative to its start, in place.

    Returns:
        The index of each part's start, and the slice of the part; empty parts are omitted.
    """
    ends = [*np.searchsorted(numbers, starts[1:]).tolist(), len(numbers)]
    parts = [(which, slice(a, b)) for which, (a, b) in enumerate(pairwise([0, *ends])) if b > a]
    for which, part in parts:
        numbers[part] -= starts[which]
    return parts


def _rising(rng: np.random.Generator, count: int, total: int) -> NDArray[np.int64]:
    """Return up to ``count`` distinct numbers below ``total`` in ascending order, every set of them equally likely.

    Scaled cumulative sums of exponential gaps are ordered uniform numbers, so no sort is needed. Duplicates go.
    """
    if count * 4 > total:
        return np.sort(rng.choice(total, count, replace=False, shuffle=False))
    ends = rng.standard_exponential(count + 1)
    np.cumsum(ends, out=ends)
    scale, drawn, end, last = total / ends[-1], ends.view(np.int64), 0, -1
    for start in range(0, count, _BATCH):  # reuses the memory of numbers already read
        batch = np.minimum((ends[start : min(start + _BATCH, count)] * scale).astype(np.int64), total - 1)
        batch = batch[np.diff(batch, prepend=last) > 0]
        drawn[end : end + len(batch)] = batch
        end += len(batch)
        last = drawn[end - 1]
    return drawn[:end]


def _check(name: str, value: object, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise FaultNotAllowed(f"{{{name}}} must be {{}}, got {{!r}}", allowed, value)
