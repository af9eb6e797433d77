"""The training loop. ``loop`` computes, sums, votes on and applies one step after another; ``executor`` begins each attempt.

``regroup`` and ``acts`` carry out what :mod:`holdfast.recovery` orders, ``vote`` is what workers say as a step closes, and
``live_config`` changes the running job. ``context`` is what outlives a loop, ``run_log`` and ``recovery_log`` write down what
happens, and ``injection`` is where planned faults enter.
"""
