"""The training loop. ``loop`` is the story of a step, ``recovering`` that of a failure; :mod:`holdfast.recovery` orders both.

``regroup`` drives the regroup sequence, also for ``torch.distributed``. ``restorer`` brings all workers to the same state.
``live_config`` reconfigures the running job. ``recovery_log`` records what was decided. ``injection`` is where planned
faults enter. ``reinit_context`` survives when an application is rebuilt.
"""
