"""All kinds of attacks, by name."""

from __future__ import annotations

import importlib

from campaign.attacks.base import Kind

MODULES = (
    "signals",
    "limits",
    "files",
    "twins",
    "memory",
    "clocks",
    "disks",
    "network",
    "object_storage",
    "stores",
    "exporter",
)
"""The families, each a module with ``KINDS``."""


def load_kinds() -> dict[str, Kind]:
    """Return all kinds by name."""
    modules = [importlib.import_module(f"campaign.attacks.{name}") for name in MODULES]
    return {kind.name: kind for module in modules for kind in module.KINDS}


KINDS = load_kinds()
