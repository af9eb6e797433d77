"""Fault plans from their words."""

from holdfast.faults.plan import FaultPlan, parse


def plan(*specs):
    """The plan of these faults, as settings take it; empty without any."""
    return FaultPlan(tuple(map(parse, specs))).to_json() if specs else ""
