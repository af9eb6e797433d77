"""Detect and attribute silent data corruption: fingerprints of replicas, out-of-range values, recomputation that does not reproduce.

These modules detect only. :mod:`holdfast.integrity.sdc_guard` puts the findings into the commit vote and applies the policy.
docs/how-to/guard-against-corruption.md lists what is detected and what is not.
"""
