"""Experiment loggers and traces: TensorBoard, Weights & Biases, MLflow, OpenTelemetry. Each step is logged once.

They run in the launcher of the first node, each in a thread of its own (:mod:`holdfast.records.queued`). A step is logged
when it is committed, whichever worker is the lead, and however often failures made workers compute it.
"""
