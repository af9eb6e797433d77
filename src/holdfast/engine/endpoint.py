"""What a worker process connects with, as the settings of its job say."""

from __future__ import annotations

from holdfast.comm.fabrics.base import Endpoint
from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.records.beacon import end_notes


def endpoint_of(settings: Settings) -> Endpoint:
    """Return with what this process connects to the other workers.

    Raises:
        ConfigError: if the ranks are not ascending.
    """
    ranks = [int(rank) for rank in settings.ranks.split(",")] if settings.ranks else None
    if ranks is not None and ranks != sorted(set(ranks)):
        raise ConfigError(f"ranks must be ascending, each once, got {settings.ranks}")
    return Endpoint(
        workers=settings.workers + settings.spares,
        ranks=ranks,
        rank=settings.rank,
        store=settings.store,
        token=settings.token,
        end_notes=end_notes(settings.run_dir),
        run_dir=settings.run_dir,
    )
