"""Models that are split over workers: what the user says of them, who holds which part, and a step of them."""

from holdfast.train.split.model import Pipeline, Sharded

__all__ = ["Pipeline", "Sharded"]
