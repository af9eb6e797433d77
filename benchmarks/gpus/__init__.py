"""The sections of ``benchmarks/gpu.py``, and what they share."""
