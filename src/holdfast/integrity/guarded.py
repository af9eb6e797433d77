"""What the guard reads of a replicated model; :class:`holdfast.models.part.ModelPart` has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch


class GuardedBucket(Protocol):
    """The layout of one all-reduced vector."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of its numbers."""

    @property
    def gradients_end(self) -> int:
        """Number of gradients, with which it begins."""


class GuardedBuckets(Protocol):
    """The layout of the gradients."""

    @property
    def layouts(self) -> Sequence[GuardedBucket]:
        """All buckets, in the order of their all-reduces."""

    def name_at(self, bucket: int, index: int) -> str:
        """Return the name of the parameter whose gradient lies at an index of a bucket."""


class GuardedGradients(Protocol):
    """The results of the step in progress."""

    @property
    def sums(self) -> Sequence[torch.Tensor]:
        """All-reduce results of the first buckets."""

    def given(self) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
        """Yield for each slice computed here the data that reveals a wrong one."""

    def metrics(self, names: Sequence[str]) -> dict[str, float]:
        """Return the means of the metrics ``names`` and of the loss, after all all-reduces."""


class GuardedModel(Protocol):
    """A model that every worker has, so that replicas and values can be compared."""

    @property
    def buckets(self) -> GuardedBuckets:
        """The layout of its gradients."""

    @property
    def gradients(self) -> GuardedGradients:
        """The results of the step in progress: another object in each step."""

    @property
    def scales_loss(self) -> bool:
        """Whether gradients may overflow: then the step is skipped."""

    def wait_updated(self) -> None:
        """Wait until no parameter update is running."""
