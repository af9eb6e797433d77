"""The job of ``benchmarks/long/life.py``, and what is observed of it."""
