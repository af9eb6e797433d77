"""A running job, seen from outside: metrics for Prometheus (``metrics.py``, ``exporter.py``), progress for Kubeflow Trainer."""
