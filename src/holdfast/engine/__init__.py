"""The training loop. ``loop`` runs steps: compute, all-reduce, commit vote, optimizer. ``executor`` begins attempts.

``regroup`` and ``acts`` carry out the actions that :mod:`holdfast.recovery` orders. ``vote`` is the commit vote of a
step. ``live_config`` reconfigures the running job. ``context`` is the job state that outlives one loop. ``run_log`` and
``recovery_log`` write records. ``injection`` is where planned faults enter.
"""
