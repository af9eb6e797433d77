"""How numbers lie in memory: which bit of a value is what.

Bits are counted from the least significant one, as the papers do: the sign of a float32 is bit 31, and bit 30, the
highest of its exponent, is the *critical* one (float16: 14, float64: 62). The injector of 2022 counts from the other end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIELDS = ("all", "sign", "exponent", "mantissa", "critical")

Raw = NDArray[Any]
"""Values as unsigned whole numbers of the same width."""


@dataclass(frozen=True, slots=True)
class Format:
    """A number format.

    Args:
        name: As torch and numpy call it.
        bits: Width of a value: 8, 16, 32 or 64.
        exponent: Bits of its exponent; 0 for whole numbers.
        signed: Whether its highest bit is a sign.
    """

    name: str
    bits: int
    exponent: int = 0
    signed: bool = True

    @property
    def is_float(self) -> bool:
        """Whether it has an exponent."""
        return self.exponent > 0

    @property
    def raw(self) -> np.dtype[Any]:
        """The unsigned whole numbers of this width."""
        return np.dtype(f"u{self.bits // 8}")

    def range_of(self, field: str) -> tuple[int, int]:
        """Return the first and the last bit of a field; the last below the first if the format has no such field.

        Args:
            field: One of :data:`FIELDS`; ``critical`` is the highest bit of the exponent.
        """
        top = self.bits - 1
        mantissa = top - self.exponent
        if field == "all":
            return 0, top
        if field == "sign":
            return (top, top) if self.signed else (0, -1)
        if not self.is_float:
            return 0, -1
        return {"exponent": (mantissa, top - 1), "critical": (top - 1, top - 1), "mantissa": (0, mantissa - 1)}[field]

    def values(self, raw: Raw) -> NDArray[Any]:
        """Return what raw numbers mean; float64, or whole numbers as they are.

        Args:
            raw: Unsigned, of this width; of any shape.
        """
        raw = np.ascontiguousarray(raw, self.raw)
        if self.name == "bfloat16":
            return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if self.name == "float8_e5m2":
            return (raw.astype(np.uint16) << 8).view(np.float16).astype(np.float64)
        if self.name == "float8_e4m3fn":
            return _E4M3[raw]
        if self.name == "bool":
            return raw
        seen = raw.view(np.dtype(self.name))
        return seen.astype(np.float64) if self.is_float else seen

    def raw_of(self, values: NDArray[Any]) -> Raw:
        """Return the raw numbers nearest to values; ties to even. Too large floats become infinite, or NaN where there is no such.

        Args:
            values: float64; of any shape.
        """
        if self.name == "bfloat16":
            # Once to float32 and then by hand; where the first rounding meets a tie of the second, odd bits decide rightly.
            single = values.astype(np.float32).view(np.uint32)
            even = (single >> 16) & 1
            rounded = ((single + np.uint32(0x7FFF) + even) >> 16).astype(self.raw)
            return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
        if self.name == "float8_e5m2":
            half = values.astype(np.float16).view(np.uint16)
            even = (half >> 8) & 1
            rounded = ((half.astype(np.uint32) + 0x7F + even) >> 8).astype(self.raw)
            return np.where(np.isnan(values), np.uint8(0x7E), rounded)
        if self.name == "float8_e4m3fn":
            return _to_e4m3(values)
        if not self.is_float:
            info = np.iinfo(self.name)
            return np.clip(np.rint(values), info.min, info.max).astype(self.name).view(self.raw)
        with np.errstate(over="ignore"):
            return values.astype(self.name).view(self.raw)

    def is_finite(self, raw: Raw) -> NDArray[np.bool_]:
        """Return which are neither infinite nor NaN."""
        if not self.is_float:
            return np.ones(raw.shape, np.bool_)
        if self.name == "float8_e4m3fn":
            return (raw & 0x7F) != 0x7F
        first, last = self.range_of("exponent")
        ones = self.raw.type(((1 << (last - first + 1)) - 1) << first)
        return (raw & ones) != ones


def _e4m3_table() -> NDArray[np.float64]:
    """Return the value of each byte: four bits of exponent with bias 7, three of mantissa, no infinity, one NaN a sign."""
    raw = np.arange(256)
    exponent, mantissa = (raw >> 3) & 15, raw & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[(raw & 0x7F) == 0x7F] = np.nan
    table: NDArray[np.float64] = np.where(raw & 0x80, -size, size)
    return table


_E4M3 = _e4m3_table()


def _to_e4m3(values: NDArray[Any]) -> Raw:
    sizes = _E4M3[:0x7F]
    middles = (sizes[:-1] + sizes[1:]) / 2
    size = np.abs(values)
    # A tie goes to the even byte: below an odd one it lies above, below an even one it does not.
    raw = np.searchsorted(middles, size, side="left")
    raw = np.where(
        (raw < len(middles)) & (raw % 2 == 1) & (size == middles[np.minimum(raw, len(middles) - 1)]), raw + 1, raw
    )
    raw = np.where(np.isnan(values) | (size > 464), 0x7F, raw)
    return (raw | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


FORMATS = {
    known.name: known
    for known in (
        Format("float64", 64, 11),
        Format("float32", 32, 8),
        Format("float16", 16, 5),
        Format("bfloat16", 16, 8),
        Format("float8_e4m3fn", 8, 4),
        Format("float8_e5m2", 8, 5),
        *(Format(f"int{bits}", bits) for bits in (8, 16, 32, 64)),
        *(Format(f"uint{bits}", bits, signed=False) for bits in (8, 16, 32, 64)),
        Format("bool", 8, signed=False),
    )
}
"""All formats whose values can be altered, by name."""
