"""Soft errors in data-parallel and model-parallel training (Rojas 2024)."""
