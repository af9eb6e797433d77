"""Fault injection: fault plans (:mod:`~holdfast.faults.plan`) and how faults are carried out (:mod:`~holdfast.faults.process`)."""
