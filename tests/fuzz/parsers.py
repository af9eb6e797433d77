"""The parsers of bytes from outside. Each takes any bytes, and raises only what its caller expects.

A parser that raises anything else, hangs or takes memory without bound is a finding.
"""

from fuzz import files, foreign, network, texts

PARSERS = network.PARSERS | files.PARSERS | foreign.PARSERS | texts.PARSERS
