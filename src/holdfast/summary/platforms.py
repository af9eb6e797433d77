"""The platforms of a run's workers, and whether bit-exactness was given up for them."""

from __future__ import annotations

from typing import Any

from holdfast.records.run_model import RunModel
from holdfast.records.types import RunStarted, WorkerRefused


def workers_platforms(history: RunModel) -> dict[str, Any] | None:
    """Return the platforms, their workers, what differing ones gave up, and refused workers; None if not recorded.

    ``promise`` is only there if GPUs were used: what holds of the bits, and why. ``given_up`` is "" for a single platform, or an inexact strategy. The last platform of a worker counts.
    """
    starts = [record for record in history.of(RunStarted) if record.platform]
    if not starts:
        return None
    platforms = {record.rank: dict(record.platform) for record in starts}
    groups: list[dict[str, Any]] = []
    for rank, platform in sorted(platforms.items()):
        group = next((group for group in groups if group["platform"] == platform), None)
        if group is None:
            groups.append(group := {"ranks": [], "platform": platform})
        group["ranks"].append(rank)
    promises = sorted({platform["promise"] for platform in platforms.values() if "promise" in platform})
    return {
        "of": groups,
        **({"promise": "; ".join(promises)} if promises else {}),
        "given_up": next((record.given_up for record in starts if record.given_up), ""),
        "refused": [{"rank": r.rank, "t_s": round(r.t_s, 6), "why": r.why} for r in history.of(WorkerRefused)],
    }
