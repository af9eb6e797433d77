"""Iterative-convergent programs by name; see :class:`~holdfast_lab.workloads.iterative.base.Program`."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from holdfast.errors import ConfigError
from holdfast_lab.workloads.iterative.base import Program, State, copy_of, euclidean

__all__ = ["PROGRAMS", "Program", "State", "copy_of", "euclidean", "make_program"]

_MADE_BY = {
    "quadratic": ("quadratic", "make"),
    "quadratic-diagonal": ("quadratic", "make"),
    **dict.fromkeys(("mlr-digits", "mlr-fashion", "mlr-covertype", "mlr-reuters"), ("mlr", "make")),
    **dict.fromkeys(("als-movielens", "als-jester", "als-ratings"), ("als", "make")),
    **dict.fromkeys(("lda-reuters", "lda-documents"), ("lda", "make")),
    **{
        f"{network}-{optimizer}-{dataset}": ("networks", "make")
        for network in ("mlp", "cnn")
        for optimizer in ("adam", "momentum")
        for dataset in ("digits", "fashion")
    },
    "gpt-adam": ("networks", "make"),
}
"""The module and the function of each program; the function takes name, data, seed and options. Imported on use."""

PROGRAMS = tuple(_MADE_BY)
"""Names that :func:`make_program` accepts."""


def make_program(name: str, data: Path | None = None, seed: int = 0, **options: Any) -> Program:
    """Return the program ``name``: an algorithm and, after the last hyphen, its data.

    Args:
        name: One of :data:`PROGRAMS`.
        data: Directory of the files, for datasets that are read from files; see
            :func:`~holdfast_lab.workloads.load_dataset`. Each dataset is read once per process, and split in the same
            way for every seed.
        seed: Seed of everything random, ``>= 0``.
        **options: Keyword arguments of the program's ``make``, such as ``learning_rate`` or ``rank``.

    Raises:
        ConfigError: if the program or an option is unknown, or the files are missing or damaged.
    """
    if name not in _MADE_BY:
        raise ConfigError(f"program must be one of {', '.join(PROGRAMS)}, got {name!r}")
    if seed < 0:
        raise ConfigError(f"seed must be at least 0, got {seed}")
    module, function = _MADE_BY[name]
    make = getattr(import_module(f"{__name__}.{module}"), function)
    parameters = inspect.signature(make).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise ConfigError(f"options of {name} are: {', '.join(known) or 'none'}; got {option!r}")
    return cast("Program", make(name, data, seed, **options))
