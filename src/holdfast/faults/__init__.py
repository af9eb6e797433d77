"""Fault injection: fault plans (:mod:`~holdfast.faults.plan`) and their execution (:mod:`~holdfast.faults.process`)."""
