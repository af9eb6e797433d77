"""Displays: the dashboard, Prometheus, Kubeflow, and experiment loggers. They read records; the core does not need them."""
