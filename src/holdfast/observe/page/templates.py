"""The environment of the page templates, and the filters that they use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.base import formatting as words
from holdfast.errors import ConfigError
from holdfast.observe.page.canvas import NEEDED
from holdfast.observe.report_text import headline

if TYPE_CHECKING:
    from jinja2 import Environment


def environment(*folders: Path) -> Environment:
    """Return the jinja2 environment with the templates of this folder and of ``folders``.

    Raises:
        ConfigError: if jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise ConfigError(NEEDED) from error
    environment = Environment(
        loader=FileSystemLoader([Path(__file__).parent, *folders]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "seconds": words.seconds,
        "percent": words.percent,
        "number": words.number,
        "listing": words.listing,
        "headline": headline,
    }
    return environment
