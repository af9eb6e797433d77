"""Plans of faults, as a job is given them."""

from holdfast.faults.plan import FaultPlan, parse


def faults(*specs):
    return FaultPlan(tuple(map(parse, specs))).to_json()
