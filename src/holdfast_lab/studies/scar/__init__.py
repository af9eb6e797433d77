"""Partial recovery and prioritised checkpoints (Qiao 2019)."""
