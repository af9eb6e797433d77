"""The parsers of bytes from outside. Each takes any bytes, and raises only what its caller expects.

A parser that raises anything else, hangs or takes memory without bound is a finding.
"""

import importlib

from fuzz.base import Parser

_MODULES = ("texts", "network", "files", "foreign")


def parsers_of(module: str) -> dict[str, Parser]:
    """Return the parsers of one module of this package, by name."""
    found: dict[str, Parser] = importlib.import_module(f"fuzz.{module}").PARSERS
    return found


def find_parser(name: str) -> Parser:
    """Return a parser; raise ``KeyError`` if there is none of this name. No more is imported than must be."""
    for module in _MODULES:
        if (found := parsers_of(module).get(name)) is not None:
            return found
    raise KeyError(name)


def all_parsers() -> dict[str, Parser]:
    """Return all parsers by name."""
    return {name: parser for module in _MODULES for name, parser in parsers_of(module).items()}
