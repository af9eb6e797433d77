"""Closed forms for memoryless failures, to check the simulators against. All times in seconds."""

from __future__ import annotations

import math

from holdfast.checkpoint.interval import check_times
from holdfast_lab.simulate.checks import check_range

_LARGEST = 700.0
"""Larger exponents overflow a float."""


def daly_expected_s(work_s: float, interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the mean duration of work with equally spaced checkpoints and exponential failures.

    ``M e^(R/M) (e^((tau + delta)/M) - 1) W/tau``. Failures occur during work, saves and restarts; each costs the work
    since the newest checkpoint and a restart, which may fail too.

    Args:
        work_s: ``W``, without failures and checkpoints, ``> 0``.
        interval_s: ``tau``, work between two checkpoints, ``> 0``.
        save_s: ``delta``, the cost of a checkpoint, ``>= 0``.
        restart_s: ``R``, from a failure until work resumes, ``>= 0``.
        mtbf_s: ``M``, mean time between failures of the whole job, ``> 0``.

    Returns:
        Seconds; infinity if the result overflows a float.

    Raises:
        ConfigError: if a number is out of range.

    Source:
        Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006: the
        complete model.
    """
    for name, value in (("work_s", work_s), ("interval_s", interval_s), ("mtbf_s", mtbf_s)):
        check_range(name, value, 0, above=True)
    check_range("save_s", save_s, 0)
    check_range("restart_s", restart_s, 0)
    if (interval_s + save_s + restart_s) / mtbf_s > _LARGEST:
        return math.inf
    return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + save_s) / mtbf_s) * work_s / interval_s


def exact_interval_s(save_s: float, mtbf_s: float) -> float:
    """Return the work between two checkpoints that minimises :func:`daly_expected_s`.

    It solves ``(1 - tau/M) e^((tau + delta)/M) = 1`` by bisection, lies between 0 and ``M``, and does not depend on
    ``R``. Young's and Daly's formulas (:mod:`holdfast.checkpoint.interval`) approximate it.

    Args:
        save_s: ``delta``, the cost of a checkpoint, ``> 0``.
        mtbf_s: ``M``, mean time between failures of the whole job, ``> 0``.

    Returns:
        Seconds.

    Raises:
        ConfigError: if a value is not positive.
    """
    check_range("save_s", save_s, 0, above=True)
    check_range("mtbf_s", mtbf_s, 0, above=True)
    low, high, cost = 0.0, 1.0, save_s / mtbf_s
    for _ in range(200):
        middle = (low + high) / 2
        if math.log1p(-middle) + middle + cost > 0 if middle < 1 else False:
            low = middle
        else:
            high = middle
    return low * mtbf_s


def young(cost_s: float, mtbf_s: float) -> float:
    """Return the first-order optimum of the time between two checkpoints, ``sqrt(2 C M)``, seconds.

    Args:
        cost_s: The cost of one checkpoint, ``> 0``.
        mtbf_s: Mean time between failures of the whole job, ``> 0``.

    Raises:
        ConfigError: if a value is not positive.

    Source:
        Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.
    """
    check_times(cost_s, mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s)
