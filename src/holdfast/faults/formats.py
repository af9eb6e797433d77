"""Number formats in memory: the meaning of each bit of a value.

Bits are counted from the least significant one, as in the papers: the sign of a float32 is bit 31, and bit 30, the
highest of its exponent, is the *critical* bit (float16: 14, float64: 62). The 2022 injector counts from the other end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIELDS = ("all", "sign", "exponent", "mantissa", "critical")

Raw = NDArray[Any]
"""Values as unsigned integers of the same width."""

_NO_NUMPY = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Formats that numpy has no name for."""


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A number format.

    Args:
        name: Its name in torch and numpy.
        bits: Width of a value: 8, 16, 32 or 64.
        exponent: Number of exponent bits; 0 for integers.
        signed: Whether the highest bit is a sign.
        infinite: Whether it has infinities. Without them the highest exponent also encodes numbers, and all ones is
            the only NaN for each sign.
    """

    name: str
    bits: int
    exponent: int = 0
    signed: bool = True
    infinite: bool = True

    @property
    def is_float(self) -> bool:
        """Whether it is a floating-point format."""
        return self.exponent > 0

    @property
    def mantissa(self) -> int:
        """Return the number of bits below the exponent."""
        return self.bits - 1 - self.exponent

    @property
    def raw(self) -> np.dtype[Any]:
        """The dtype of unsigned integers of this width."""
        return np.dtype(f"u{self.bits // 8}")

    def range_of(self, field: str) -> tuple[int, int]:
        """Return the first and the last bit of a field; the last is below the first if the format has no such field.

        Args:
            field: One of :data:`FIELDS`; ``critical`` is the highest bit of the exponent.
        """
        top = self.bits - 1
        if field == "all":
            return 0, top
        if field == "sign":
            return (top, top) if self.signed else (0, -1)
        if not self.is_float:
            return 0, -1
        low = self.mantissa
        return {"exponent": (low, top - 1), "critical": (top - 1, top - 1), "mantissa": (0, low - 1)}[field]

    def values(self, raw: Raw) -> NDArray[Any]:
        """Return the values that raw bits encode: float64, or integers unchanged.

        Args:
            raw: Unsigned integers of this width, of any shape.
        """
        raw = np.asarray(raw, self.raw)
        if self.name == "bool":
            return raw
        if self.name not in _NO_NUMPY:
            seen: NDArray[Any] = raw.view(self.name)
            with np.errstate(invalid="ignore"):  # a signalling NaN stays a NaN
                return seen.astype(np.float64) if self.is_float else seen
        size = (raw & self.raw.type(self._sizes)).astype(np.int64)
        binade = np.maximum(size >> self.mantissa, 1) - 1
        magnitudes = np.ldexp((size - (binade << self.mantissa)).astype(np.float64), binade + self._lowest)
        odd = np.where(size == self._end, np.inf if self.infinite else np.nan, np.nan)
        values = np.where(size < self._end, magnitudes, odd)
        return np.asarray(np.where(raw >> (self.bits - 1), -values, values))

    def raw_of(self, values: NDArray[Any]) -> Raw:
        """Return the raw bits of the nearest representable values; ties to even.

        Floats that are too large become infinite, or NaN if the format has no infinity; integers become the largest.

        Args:
            values: float64; of any shape.
        """
        if self.name == "bool":
            return np.asarray(values != 0).astype(self.raw)
        if not self.is_float:
            info = np.iinfo(self.name)
            # float(info.max) may be above info.max, and the cast would wrap around.
            large = values >= float(info.max)
            inside = np.maximum(np.rint(np.where(large, 0.0, values)), info.min).astype(self.name)
            return np.asarray(np.where(large, np.array(info.max, self.name), inside)).view(self.raw)
        if self.name not in _NO_NUMPY:
            with np.errstate(over="ignore"):
                return np.asarray(values.astype(self.name)).view(self.raw)
        # In units of the value's binade: rounded once, and from the last unit of a binade into the next.
        finite = np.isfinite(values)
        size = np.where(finite, np.abs(values), 0.0)
        exponent = np.frexp(size)[1].astype(np.int64)
        binade = np.where(size > 0, np.maximum(exponent - 1 - self.mantissa - self._lowest, 0), 0)
        steps = np.rint(np.ldexp(size, -(binade + self._lowest))).astype(np.int64)
        raw = np.minimum((binade << self.mantissa) + steps, self._end)
        quiet = 1 << (self.mantissa - 1)  # distinguishes NaN from infinity
        raw = np.where(finite, raw, np.where(np.isnan(values), self._end | quiet, self._end))
        return np.asarray(raw | np.where(np.signbit(values), 1 << (self.bits - 1), 0)).astype(self.raw)

    def is_finite(self, raw: Raw) -> NDArray[np.bool_]:
        """Return which values are neither infinite nor NaN."""
        if not self.is_float:
            return np.ones(raw.shape, np.bool_)
        return np.asarray((raw & self.raw.type(self._sizes)) < self._end)

    @property
    def _lowest(self) -> int:
        """Return the exponent of the smallest positive number, which is a power of 2."""
        return 2 - (1 << (self.exponent - 1)) - self.mantissa

    @property
    def _end(self) -> int:
        """Return the first raw value, without sign, that is not finite."""
        return ((1 << self.exponent) - 1) << self.mantissa if self.infinite else self._sizes

    @property
    def _sizes(self) -> int:
        """Return a mask of all bits but the sign."""
        return (1 << (self.bits - 1)) - 1


FORMATS = {
    number_format.name: number_format
    for number_format in (
        NumberFormat("float64", 64, 11),
        NumberFormat("float32", 32, 8),
        NumberFormat("float16", 16, 5),
        NumberFormat("bfloat16", 16, 8),
        NumberFormat("float8_e4m3fn", 8, 4, infinite=False),
        NumberFormat("float8_e5m2", 8, 5),
        *(NumberFormat(f"int{bits}", bits) for bits in (8, 16, 32, 64)),
        *(NumberFormat(f"uint{bits}", bits, signed=False) for bits in (8, 16, 32, 64)),
        NumberFormat("bool", 8, signed=False),
    )
}
"""All formats whose values can be altered, by name."""


def bits_of(format: NumberFormat, before: Raw, after: Raw, scale: float | None) -> tuple[NDArray[np.int64], list[Any]]:
    """Return the value index and the bit of every flip, ordered by value, the lowest bit first.

    If values were multiplied by ``scale`` there is one flip for each value, and its bit is None.
    """
    if scale is not None:
        return np.arange(len(before)), [None] * len(before)
    width = format.bits // 8
    flipped = (before ^ after).astype(f"<u{width}", copy=False).view(np.uint8).reshape(-1, width)
    which, bits = np.nonzero(np.unpackbits(flipped, axis=1, bitorder="little"))
    return which, bits.tolist()


def shown(format: NumberFormat, raw: Raw) -> list[float | int | str]:
    """Return values as written in a record; an infinite value or NaN becomes the hexadecimal digits of its bits."""
    values: list[float | int | str] = format.values(raw).tolist()
    for odd in np.flatnonzero(~format.is_finite(raw)).tolist():
        values[odd] = f"0x{int(raw[odd]):0{format.bits // 4}x}"
    return values
