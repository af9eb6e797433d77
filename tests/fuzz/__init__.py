"""Fuzzers of everything that reads bytes from outside: ``make fuzz``, and each for a moment in ``tests/unit/test_fuzz.py``."""
