"""How often a checkpoint pays, in closed form: Young (1974), Daly (2006)."""

from __future__ import annotations

import math

from holdfast.errors import ConfigError


def young(cost_s: float, mtbf_s: float) -> float:
    """Return the first-order optimum of the time between two checkpoints, ``sqrt(2 C M)``, seconds.

    Args:
        cost_s: What one checkpoint costs, ``> 0``.
        mtbf_s: Mean time between failures of the whole job, ``> 0``.

    Raises:
        ConfigError: if one is not positive.

    Source:
        Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.
    """
    _check(cost_s, mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """Return the higher-order optimum of the time between the end of one checkpoint and the begin of the next, seconds.

    ``sqrt(2 C M) [1 + 1/3 sqrt(C / 2M) + 1/9 (C / 2M)] - C`` where ``C < 2M``, else ``M``.

    Args:
        cost_s: What one checkpoint costs, ``> 0``.
        mtbf_s: Mean time between failures of the whole job, ``> 0``.

    Raises:
        ConfigError: if one is not positive.

    Source:
        Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006, eq. 37.
    """
    _check(cost_s, mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def _check(cost_s: float, mtbf_s: float) -> None:
    if not cost_s > 0 or not mtbf_s > 0:
        msg = f"cost and MTBF must be positive, got {cost_s:g} s and {mtbf_s:g} s"
        raise ConfigError(msg)
