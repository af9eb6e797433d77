"""The environments of the peers, and which versions of them are installed."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from functools import cache

from common import PYTHONS

from rows.row import Peer, Row

_ASK = """
import importlib.metadata, json, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""
ASK_S = 60.0
OWN = ("torch", "numpy", "numba", "h5py")
"""Packages that Holdfast's own figures depend on."""


def version_of(peer: Peer) -> str:
    """Return the installed version of a peer, "" if it is not installed or has none."""
    if not peer.package:
        return ""
    return _versions(peer.environment).get(peer.package, "")


def why_missing(peer: Peer) -> str:
    """Return why a peer cannot run here, in one line; "" if it can."""
    if not PYTHONS[peer.environment].exists():
        return f"{PYTHONS[peer.environment].parents[1].name} is missing: run make bench-peers"
    if peer.package and not version_of(peer):
        return f"{peer.package} is not in {PYTHONS[peer.environment].parents[1].name}: run make bench-peers"
    return ""


def versions_for(row: Row) -> dict[str, str]:
    """Return the versions of all peers of a row, and of what Holdfast itself runs on; a result counts for these only."""
    return {key: version_of(peer) for key, peer in row.peers.items()} | _own_versions()


@cache
def _own_versions() -> dict[str, str]:
    installed = dict.fromkeys(OWN, "")
    for name in OWN:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return {f"own {name}": version for name, version in {"python": platform.python_version(), **installed}.items()}


@cache
def _versions(environment: str) -> dict[str, str]:
    from rows.catalogue import ROWS

    packages = sorted(_packages(environment, ROWS))
    if not PYTHONS[environment].exists():
        return {}
    asked = [str(PYTHONS[environment]), "-c", _ASK, *packages]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=ASK_S, check=False)
    found: dict[str, str] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found


def _packages(environment: str, rows: Iterable[Row]) -> set[str]:
    return {
        peer.package for row in rows for peer in row.peers.values() if peer.environment == environment and peer.package
    }
