"""Pages for results other than runs: demos, studies and simulations, drawn by the lab if it is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from holdfast.base.registered import named
from holdfast.errors import ConfigError
from holdfast.observe.page.canvas import kept_in
from holdfast.summary.files import read_json

Draw = Callable[[Any, Path], str]
"""Returns the page of the results in a folder; raises ConfigError if the lab cannot have written them."""


DRAWN_BY = {"study": "holdfast_lab.pages.study:page_of", "simulated": "holdfast_lab.pages.simulated:page_of"}
"""By the key that identifies the content of ``results.json``: the module, and in it the :data:`Draw`."""
_DEMO = "holdfast_lab.pages.demo:page_of"
"""Draws results without any of these keys."""


def draw_results(directory: Path) -> str | None:
    """Return the page of the demo, the study or the simulation in ``directory``, None if it holds none of them.

    The figures of a study and of a simulation are also written to a folder ``figures``.

    Raises:
        ConfigError: if ``results.json`` is damaged, or if the lab is not installed.
    """
    path = directory / "results.json"
    if not path.is_file():
        return None
    results = read_json(path)
    kind = next((key for key in DRAWN_BY if isinstance(results, dict) and key in results), None)
    if kind is None:
        return _find(_DEMO, path)(results, path)
    with kept_in(directory / "figures"):
        return _find(DRAWN_BY[kind], path)(results, path)


def _find(place: str, path: Path) -> Draw:
    try:
        return cast("Draw", named(place))
    except ModuleNotFoundError as error:
        module = place.partition(":")[0]
        if not f"{module}.".startswith(f"{error.name}."):  # a dependency of the lab is missing
            raise
        raise ConfigError(
            f"{path} was written by the lab, which draws its page and is not installed; install it with: pip install 'holdfast[lab]'"
        ) from error
