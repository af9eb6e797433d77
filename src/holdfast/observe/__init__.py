"""Displays: terminal, page, dashboard, Prometheus, Kubeflow, and experiment loggers. The core does not need them."""
