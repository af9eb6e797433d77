"""The few things inside Holdfast that the golden record takes hold of, each found here and nowhere else.

A module that has moved is looked for under its new name first: adapt a list here, and nothing else. Where a class was renamed,
NAMES says what it is called in the record, so that records from before and after compare.
"""

import dataclasses
import enum
import importlib
from collections.abc import Mapping

import renames

PROTOCOL = ["holdfast.recovery.protocol", "holdfast.recovery"]
PLAN = ["holdfast.faults.plan", "holdfast.faults"]
EXPLORER = [
    "model.explorer",
    "holdfast.testing.explorer",
]
STRATEGIES = ["holdfast.recovery"]
SHAPE = ["holdfast.recovery.placement", "holdfast.recovery.homes"]

NAMES = {new: old for old, new in renames.NAMES.items()} | {"PlacementShape": "Shape"}
"""Name in the record of a class of events, orders, progress or placement, by its new name."""


def find(modules, name):
    """Return what has this name, or its new one, in the first of the modules that there is and that has it."""
    for module in modules:
        for called in (name, *(new for new, old in NAMES.items() if old == name)):
            try:
                return getattr(importlib.import_module(module), called)
            except (ImportError, AttributeError):
                continue
    raise SystemExit(f"{name} is in none of {', '.join(modules)}: adapt {__file__}")


def tap_protocol(heard):
    """Let ``heard`` know of each event that a worker's protocol is told, and of the orders that it answers with."""
    protocol = find(PROTOCOL, "Protocol")
    handle = protocol.handle

    def tapped(self, event):
        orders = handle(self, event)
        heard(event, orders)
        return orders

    protocol.handle = tapped


def explore(strategy, split=None, changes=(), **world):
    """Return how many states a small world has, and what goes wrong in it."""
    make, kinds = find(EXPLORER, "World"), {field.name for field in dataclasses.fields(find(EXPLORER, "World"))}
    assert world.keys() <= kinds, f"the explorer's World has other fields: adapt {__file__}"
    if split is not None:
        parts, chains, copies, *exchanges = split
        shape = find(SHAPE, "Shape")(parts=parts, chains=chains, copies=copies)
        world["split"] = find(EXPLORER, "Split")(
            shape=shape, **dict(zip(("transfers", "gathers"), exchanges, strict=False))
        )
    world["changes"] = tuple(find(STRATEGIES, change)() for change in changes)
    result = find(EXPLORER, "explore")(find(STRATEGIES, strategy)(), make(**world))
    return result.states, result.violation


def fault_plan(specs):
    """Return a fault plan as the setting ``faults`` takes it."""
    return find(PLAN, "FaultPlan")(tuple(find(PLAN, "parse")(spec) for spec in specs)).to_json()


def plain(thing):
    """Return an event, an order or progress as text that knows names of classes and values, but no names of fields."""
    if dataclasses.is_dataclass(thing):
        name = type(thing).__name__
        values = ", ".join(plain(getattr(thing, field.name)) for field in dataclasses.fields(thing))
        return f"{NAMES.get(name, name)}({values})"
    if isinstance(thing, Mapping):
        return "{" + ", ".join(f"{key}: {plain(value)}" for key, value in sorted(thing.items())) + "}"
    if isinstance(thing, tuple | list):
        return "[" + ", ".join(map(plain, thing)) + "]"
    return str(int(thing)) if isinstance(thing, enum.IntFlag) else repr(thing)
