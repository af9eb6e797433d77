"""Bit flips in checkpoint files."""
