"""The job of ``benchmarks/long_life.py``, and what is observed of it."""
