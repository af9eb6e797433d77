"""Sentences that both a worker and the launcher print."""

from __future__ import annotations

from collections.abc import Sequence

UNDER_RANK_0 = 'what the script does under "rank == 0" (saving, logging)'
USE_IS_LEAD = "use holdfast.distributed.is_lead(), which is true on the lowest surviving rank"
RANK_0_LOST = f"rank 0 is lost: {UNDER_RANK_0} no longer happens; {USE_IS_LEAD}"


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ``"rank 1"``, ``"ranks 1, 2"``, or ``"no rank"``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}" if ranks else "no rank"
