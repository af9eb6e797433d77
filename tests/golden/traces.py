"""Order traces: for many seeds, every event that the protocol is told and every order that it answers with, as a digest."""

from concurrent.futures import ThreadPoolExecutor

SEEDS = 200
PROCESSES = 2


def record(tree, work):
    """Return by seed how many lines its trace has, their digest, and the bits that came out."""
    size = -(-SEEDS // PROCESSES)
    with ThreadPoolExecutor(PROCESSES) as pool:
        parts = pool.map(
            lambda first: tree.script("traced.py", "seeds", first, min(first + size, SEEDS)), range(0, SEEDS, size)
        )
    return {seed: found for part in parts for seed, found in part.items()}


def trace(tree, seed):
    """Return the whole trace of a seed."""
    return tree.script("traced.py", "whole", seed)


def drop_bits(traces):
    """Leave out what depends on the machine."""
    for found in traces.values():
        found.pop("bits", None)
