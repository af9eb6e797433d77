"""What a worker process connects with, as the settings of its job say."""

from __future__ import annotations

import multiprocessing

from holdfast.comm.fabrics.base import Endpoint
from holdfast.config import Settings
from holdfast.errors import ConfigError, ScriptError
from holdfast.records.beacon import end_notes


def _is_child_of_script() -> bool:
    # While a child imports the script, it has no parent process yet; Python's own check looks at this attribute, too.
    is_importing = getattr(multiprocessing.current_process(), "_inheriting", False)
    return is_importing or multiprocessing.parent_process() is not None


def endpoint_of(settings: Settings) -> Endpoint:
    """Return with what this process connects to the other workers.

    Raises:
        ConfigError: if the ranks are not ascending.
        ScriptError: if this process is a child of a worker that ``holdfast run`` has started.
    """
    if settings.run_dir and _is_child_of_script():
        # It has the worker's environment: it would connect as the same rank, and both would wait forever.
        raise ScriptError(
            "this process was started by the script of a worker, imports the script again, and would train in the worker's"
            ' place: put what trains under `if __name__ == "__main__":`; and start no workers in the script (mp.spawn),'
            " because `holdfast run -n N` starts them"
        )
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
