"""Images and histograms that a script logs: encoded by one worker, and only if the launcher logs to what can show them."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import ConfigError
from holdfast.records.types import HistogramLogged, ImageLogged, Record

MOST_BYTES = 4 << 20
"""Bytes of an image before compression: its pixels times its channels."""
MOST_BINS = 512
_COLORS = {1: 0, 3: 2, 4: 6}
"""The colour type of a PNG file by the number of channels: grey, RGB, RGBA."""
_LEVEL = 3
"""Of compression: half as slow as usual, and hardly larger."""


class Image:
    """An image for ``step.log``.

    Args:
        pixels: A tensor or an array of shape H x W, H x W x C or C x H x W, where C is 1 (grey), 3 (RGB) or 4 (RGBA).
            Integers must be ``uint8``. Floats are taken from 0 to 1, and clipped. At most 4 MiB with one byte a channel.
        layout: ``"HWC"`` or ``"CHW"``, needed only if the first and the last dimension both could be channels.

    Raises:
        ConfigError: if it is not an image of this form and size.
    """

    def __init__(self, pixels: Any, layout: str | None = None) -> None:
        tensor = _tensor(pixels)
        if tensor.dtype != torch.uint8 and not tensor.is_floating_point():
            raise ConfigError(f"the values of an image must be uint8, or floats from 0 to 1, got {tensor.dtype}")
        self._pixels = _by_rows(tensor, layout)
        if not self._pixels.numel():
            raise ConfigError(f"an image must have pixels, got shape {tuple(tensor.shape)}")
        if self._pixels.numel() > MOST_BYTES:
            raise ConfigError(
                f"an image may have at most {MOST_BYTES >> 20} MiB, one byte a channel, got"
                f" {self._pixels.numel() / (1 << 20):.1f} MiB in shape {tuple(tensor.shape)}: log a smaller one"
            )

    def record(self, name: str, file: Path | None) -> Record:
        """Write the image to a file, and return the record that refers to it, without stamps; None writes nothing.

        Raises:
            OSError: if it cannot be written, such as on a full disk; then there is no file.
        """
        height, width, channels = self._pixels.shape
        if file is not None:
            _write_whole(file, self.png())
        name_of_file = "" if file is None else file.name
        return ImageLogged(name=name, file=name_of_file, width=width, height=height, channels=channels)

    def png(self) -> bytes:
        """Return the image as a PNG file."""
        pixels = self._pixels.cpu()
        if pixels.is_floating_point():
            pixels = (pixels.float().nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8)
        height, width, channels = pixels.shape
        rows = torch.zeros(height, 1 + width * channels, dtype=torch.uint8)  # each begins with its filter, 0: none
        rows[:, 1:] = pixels.reshape(height, -1)
        header = struct.pack(">IIBBBBB", width, height, 8, _COLORS[channels], 0, 0, 0)
        data = zlib.compress(rows.numpy().tobytes(), _LEVEL)
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            _chunk(kind, body) for kind, body in ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
        )


class Histogram:
    """A histogram for ``step.log``, of the values of a tensor, such as weights or activations.

    Args:
        values: A tensor or an array of any shape; values that are not finite are left out.
        bins: Number of bins of equal width, 1 to 512.

    Raises:
        ConfigError: if there are no values, or ``bins`` is not allowed.
    """

    def __init__(self, values: Any, bins: int = 64) -> None:
        tensor = _tensor(values)
        if not tensor.numel() or tensor.is_complex():
            raise ConfigError(f"a histogram needs real values, got shape {tuple(tensor.shape)} of {tensor.dtype}")
        if not 1 <= bins <= MOST_BINS:
            raise ConfigError(f"bins must be from 1 to {MOST_BINS}, got {bins}")
        self._values, self._bins = tensor, bins

    def record(self, name: str, file: Path | None) -> Record:
        """Return the record with the bins, without stamps; it needs no file."""
        values = self._values.flatten().cpu().double()
        values = values[values.isfinite()]
        low, high = (values.min().item(), values.max().item()) if len(values) else (0.0, 0.0)
        if low == high:
            low, high = low - 0.5, high + 0.5
        counts = torch.histc(values, self._bins, low, high)
        return HistogramLogged(
            name=name,
            low=low,
            high=high,
            counts=tuple(map(int, counts.tolist())),
            total=values.sum().item(),
            squares=values.square().sum().item(),
        )


Media = (Image, Histogram)
"""What ``step.log`` takes besides numbers."""


def _tensor(values: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(values).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"an image or a histogram must be a tensor or an array, got {type(values).__name__}"
        ) from error


def _by_rows(given: torch.Tensor, layout: str | None) -> torch.Tensor:
    """Return an image as rows of pixels of channels."""
    if layout not in (None, "HWC", "CHW"):
        raise ConfigError(f"layout must be 'HWC' or 'CHW', got {layout!r}")
    if given.dim() == 2:
        return given.unsqueeze(2)
    shape = tuple(given.shape)
    fits = [] if given.dim() != 3 else [name for name, at in (("HWC", 2), ("CHW", 0)) if shape[at] in _COLORS]
    if layout is not None:
        fits = [name for name in fits if name == layout]
    if not fits:
        wanted = "H x W, H x W x C or C x H x W" if layout is None else " x ".join(layout)
        raise ConfigError(f"an image must have shape {wanted}, where C is 1, 3 or 4, got {shape}")
    if len(fits) > 1:
        raise ConfigError(f"an image of shape {shape} may be H x W x C or C x H x W: say layout='HWC' or layout='CHW'")
    return given if fits == ["HWC"] else given.permute(1, 2, 0)


def _write_whole(file: Path, data: bytes) -> None:
    try:
        file.touch(mode=0o600)
        file.write_bytes(data)
    except OSError:
        file.unlink(missing_ok=True)  # no record refers to it, so no logger would remove it
        raise


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
