"""Metrics of a running job, for Prometheus: what they are (``metrics.py``), and how they get there (``exporter.py``)."""
