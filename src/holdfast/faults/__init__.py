"""Faults on purpose: what can happen (:mod:`~holdfast.faults.plan`) and how it is made to happen (:mod:`~holdfast.faults.process`)."""
