"""Partial recovery and priority checkpoints (SCAR; Qiao et al. 2019)."""
