"""Files of other programs in which values lie one behind the other: .safetensors, .npz, .pt."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from holdfast.checkpoint.foreign import LOCATORS, Spot
from holdfast.faults.alteration import Place
from holdfast.faults.formats import FORMATS
from holdfast_lab.inject.files.base import Box, Bytes, FileValues, Laid, Skipped
from holdfast_lab.inject.files.zips import renew_checksums


class ForeignValues(FileValues):
    """The values of such a file; see :class:`~holdfast_lab.inject.files.base.FileValues`.

    Args:
        path: Which.
        kind: Of which kind it is, as the end of its name, without the dot.
        stack: Closes it.
        write: Whether it may be altered.
    """

    def __init__(self, path: Path, kind: str, stack: ExitStack, *, write: bool) -> None:
        self._path = path
        spots = LOCATORS[f".{kind}"](path)
        self._file = Bytes(path, write=write)
        stack.callback(self._file.close)
        names = {name: str(spot.entry.dtype).removeprefix("torch.") for name, spot in spots.items()}
        shared = _shared(spots)
        known = [n for n, dtype in names.items() if dtype in FORMATS and dtype != "bool" and n not in shared]
        skipped = [
            Skipped(name, "shares values with another tensor" if name in shared else f"is of {dtype}")
            for name, dtype in names.items()
            if name not in set(known)
        ]
        super().__init__(kind, [self._store(name, names[name], spots[name]) for name in known], skipped)

    def _store(self, name: str, dtype: str, spot: Spot) -> Laid:
        shape = spot.entry.shape
        box = Box(self._file, spot.offset, (0,) * len(shape), shape, spot.strides)
        return Laid(Place(name, FORMATS[dtype], shape), [box], spot.order)

    def seal(self, *, keep_digests: bool) -> None:
        """See :meth:`FileValues.seal`; members of an archive in which something was written are read whole."""
        if self.kind != "safetensors" and not keep_digests:
            renew_checksums(self._path, self._file)


def _shared(spots: Mapping[str, Spot]) -> set[str]:
    """Return the names of tensors that share a value with one before them in the file, or have two at one place.

    Who altered both would take for altered what the second writing took back.
    """
    found, end = set(), 0
    for name, spot in sorted(spots.items(), key=lambda item: item[1].offset):
        reach, is_plain = 1, True
        for stride, size in sorted(zip(spot.strides, spot.entry.shape, strict=True)):
            if size > 1:
                is_plain = is_plain and stride >= reach
                reach += stride * (size - 1)
        if not spot.entry.size_bytes:
            continue
        if not is_plain or spot.offset < end:
            found.add(name)
        end = max(end, spot.offset + reach * spot.entry.dtype.itemsize)
    return found
