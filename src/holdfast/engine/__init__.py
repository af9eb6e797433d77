"""The training loop. ``loop`` runs steps: compute, all-reduce, commit vote, optimizer. ``executor`` begins attempts.

``regroup`` and ``acts`` carry out the actions that :mod:`holdfast.recovery` orders. ``restorer`` brings all workers to
the same state. ``live_config`` reconfigures the running job. ``recovery_log`` records what was decided. ``injection`` is
where planned faults enter. ``reinit_context`` survives when an application is rebuilt.
"""
