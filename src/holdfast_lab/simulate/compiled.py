"""Runs histories: the first ones of a process as plain Python, those that follow compiled by numba.

Both run the same functions on the same numbers, so the result does not depend on it. To compile takes some seconds, to
load what was compiled before about half a second: small simulations are done by then.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from holdfast_lab.simulate import decision_table, history, history_inputs, history_state, training
from holdfast_lab.simulate.decision_table import SimulatedDecision
from holdfast_lab.simulate.history import run_history
from holdfast_lab.simulate.history_inputs import Calendar, Outage, Parameters, Price, record
from holdfast_lab.simulate.history_state import HistoryState

States = npt.NDArray[np.void]
_Run = Callable[[States, int, Parameters, Calendar], None]
_Row = TypeVar("_Row", bound=NamedTuple)

PLAIN_OUTAGES = 20_000
"""Outages that a process simulates as plain Python, which takes about half a second, before it compiles."""

_FIELDS = [one.name for one in fields(HistoryState)]
_simulated = [0]
"""Outages that this process has simulated as plain Python."""


def run(states: States, number: int, given: Parameters, calendar: Calendar) -> None:
    """Run one history.

    Args:
        states: Array of records like :class:`~holdfast_lab.simulate.history_state.HistoryState`.
        number: The history's place in it.
        given: As :func:`~holdfast_lab.simulate.history_inputs.parameters` returns them.
        calendar: The history's outages.
    """
    if _simulated[0] >= PLAIN_OUTAGES and (run_compiled := compiled()) is not None:
        run_compiled(states, number, given, calendar)
        return
    _simulated[0] += len(calendar.outages)
    run_plain(states, number, given, calendar)


def states_at_start(number: int, total: int) -> States:
    """Return the states of ``number`` histories in which ``total`` workers are up and none is a member."""
    state = HistoryState(available=total)
    return np.full(number, np.array(_row_of(state), record(HistoryState)))


def run_plain(states: States, number: int, given: Parameters, calendar: Calendar) -> None:
    """Run one history as plain Python."""
    state = HistoryState(*states[number].item())
    prices: Any = _Rows(Price, given.prices)
    decisions: Any = _Rows(SimulatedDecision, given.decisions)
    given = given._replace(prices=prices, decisions=decisions)
    outages, ready_at = np.asarray(calendar.outages), np.asarray(calendar.ready_at)
    calendar = calendar._replace(outages=[Outage(*row) for row in outages.tolist()], ready_at=ready_at.tolist())
    run_history(state, given, calendar)
    states[number] = _row_of(state)


def _row_of(state: HistoryState) -> tuple[Any, ...]:
    return tuple(getattr(state, name) for name in _FIELDS)


class _Rows(dict[int, _Row], Generic[_Row]):
    """Rows of an array of records as tuples, made where one is used: most of a large cluster's are not."""

    def __init__(self, kind: type[_Row], array: Any) -> None:
        self._kind, self._array = kind, array

    def __missing__(self, index: int) -> _Row:
        row = self[index] = self._kind(*self._array[index].item())
        return row


@cache
def compiled() -> _Run | None:
    """Return what runs one history compiled; None without numba, or with ``NUMBA_DISABLE_JIT=1``."""
    try:
        import numba
        from numba.extending import register_jitable
    except ImportError as why:
        text = "the simulator runs as plain Python, about 40 times slower than compiled by numba"
        warnings.warn(f"{text}: {why}; pip install 'holdfast[lab]'", RuntimeWarning, stacklevel=2)
        return None
    config: Any = numba.config  # its fields are made at run time
    if config.DISABLE_JIT:  # then njit returns the function as it is, which takes other arguments
        return None
    for module in (training, history):
        for one in list(vars(module).values()):
            if isinstance(one, FunctionType) and one.__module__ == module.__name__:
                register_jitable(one)
    run_record = _entry(_version())
    try:
        return cast("_Run", numba.njit(cache=True)(run_record))
    except RuntimeError:  # no folder for the cache can be written
        return cast("_Run", numba.njit(run_record))


def _entry(version: int) -> _Run:
    """Return what is compiled.

    Numba looks for a change of this function and of what it is closed over, before it takes what is in its cache, but
    not for one of the functions that it calls.
    """

    def run_record(states: Any, number: int, given: Parameters, calendar: Calendar) -> None:
        if version:
            run_history(states[number], given, calendar)

    return run_record


def _version() -> int:
    """Return a number of the source of all that is compiled, not 0."""
    sources = [
        Path(str(module.__file__)).read_bytes()
        for module in (training, history, history_inputs, history_state, decision_table)
    ]
    return int.from_bytes(hashlib.sha256(b"".join(sources)).digest()[:7], "big") + 1
