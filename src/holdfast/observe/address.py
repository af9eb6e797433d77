"""Addresses at which a display serves."""

from __future__ import annotations

from holdfast.errors import ConfigError


def host_and_port(given: str, option: str) -> tuple[str, int]:
    """Return host and port of an option; a port alone is of the loopback interface.

    Raises:
        ConfigError: if it is not of the form ``[HOST:]PORT``, with a port from 0 to 65535.
    """
    host, colon, port = given.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535) or (colon and not host):
        raise ConfigError(f"{option} must be [HOST:]PORT with a port from 0 to 65535, got {given!r}")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)
