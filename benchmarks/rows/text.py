"""The table as text: for a terminal, and as Markdown for the documentation."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from common import table

from rows.results import Result
from rows.row import Against, Peer, Row, compare, share_of_limit

HEAD = ("what", "Holdfast", "best peer", "limit", "near it", "to the peer (95 %)")
PEERS_HEAD = ("row", "peer", "settings", "median", "Holdfast to it")
NOT_EXPLAINED = "not explained"

Missing = Callable[[Peer], str]


@dataclass(frozen=True, slots=True)
class Found:
    """A row with what became of it.

    Args:
        row: The row.
        result: Its result, None if it was not measured.
    """

    row: Row
    result: Result | None

    @property
    def against(self) -> list[Against]:
        """Holdfast beside each peer, the best one first."""
        return compare(self.row, self.result.measured) if self.result and not self.result.failed else []


def page(founds: Sequence[Found], why_missing: Missing, *, markdown: bool = False) -> str:
    """Return everything that a run has to say: the table, what is not below 1, what is missing, what was tried."""
    title = "Holdfast beside the best peer; below 1 it is better"
    rows = [cells(found) for found in founds]
    parts = [table(title, HEAD, rows) if markdown else aligned(title, HEAD, rows)]
    parts += _listed("Not below 1:", not_below(founds))
    parts += _listed("Without a result:", without_result(founds))
    parts += _listed("Peers that did not run:", absent(founds, why_missing))
    tried = [*peers_tried(founds)]
    if tried:
        title = "Peers and their settings"
        parts.append(table(title, PEERS_HEAD, tried) if markdown else aligned(title, PEERS_HEAD, tried))
    return "\n\n".join(parts)


def cells(found: Found) -> list[str]:
    """Return the cells of a row."""
    row, result = found.row, found.result
    if result is None:
        return [row.what, "not measured", "", "", "", ""]
    if result.failed:
        return [row.what, "failed", "", "", "", ""]
    ours = f"{number(statistics.median(result.ours))} {row.unit}"
    share = share_of_limit(row, result.measured)
    limit = "-" if share is None else f"{number(statistics.median(result.limit))} {row.unit}"
    near = "-" if share is None else f"{share:.0%}"
    if not found.against:
        why = "no peer does this" if not row.peers else "no peer ran"
        return [row.what, ours, why, limit, near, _remark(result) or "-"]
    best = found.against[0]
    return [row.what, ours, _named(row, best, result), limit, near, compared(result, best)]


def compared(result: Result, against: Against) -> str:
    """Return the ratio with its interval; instead of the interval, what forbids one."""
    remark = _remark(result)
    if remark:
        return f"{against.ratio:.2f} ({remark})"
    if against.low is None or against.high is None:
        return f"{against.ratio:.2f} (only {against.values} values)"
    return f"{against.ratio:.2f} ({against.low:.2f}-{against.high:.2f})"


def _remark(result: Result) -> str:
    if result.size == "tiny":
        return "tiny: does not count"
    return f"busy: {result.busy}" if result.busy else ""


def not_below(founds: Sequence[Found]) -> Iterator[str]:
    """Yield a line for each peer that Holdfast was not shown to be better than, with the reason."""
    for found in founds:
        if found.result is None or _remark(found.result):
            continue
        for against in found.against:
            if not against.is_below:
                why = found.row.why.get(against.peer, NOT_EXPLAINED)
                label = found.row.peers[against.peer].label
                yield f"{found.row.name}, {label}: {compared(found.result, against)}: {why}"


def without_result(founds: Sequence[Found]) -> Iterator[str]:
    """Yield a line for each row that has no values or does not count."""
    for found in founds:
        if found.result is None:
            yield f"{found.row.name}: not measured"
        elif found.result.failed:
            yield f"{found.row.name}: {found.result.failed}"
        elif _remark(found.result):
            yield f"{found.row.name}: {_remark(found.result)}"


def absent(founds: Sequence[Found], why_missing: Missing) -> Iterator[str]:
    """Yield a line for each peer of a measured row that has no values."""
    for found in founds:
        if found.result is None or found.result.failed or found.result.size == "tiny":
            continue
        for key, peer in found.row.peers.items():
            if not found.result.peers.get(key):
                yield f"{found.row.name}, {peer.label}: {why_missing(peer) or 'it failed; the output of the row says why'}"


def peers_tried(founds: Sequence[Found]) -> Iterator[list[str]]:
    """Yield the cells of each peer that ran."""
    for found in founds:
        for against in found.against:
            assert found.result is not None, "it was compared"
            peer = found.row.peers[against.peer]
            median = f"{number(against.median)} {found.row.unit}"
            yield [
                found.row.name, _with_version(found.row, against, found.result), peer.settings, median,
                compared(found.result, against),
            ]  # fmt: skip


def aligned(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table for a terminal: columns padded, no lines between them."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(words: Sequence[str]) -> str:
        return "  ".join(word.ljust(width) for word, width in zip(words, widths, strict=True)).rstrip()

    return "\n".join([title, "", line(head), "  ".join("-" * width for width in widths), *map(line, rows)])


def number(value: float) -> str:
    """Return a number with three significant digits, without an exponent."""
    if value == 0:
        return "0"
    digits = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:,.{max(0, 3 - digits)}f}" if abs(value) >= 0.01 else f"{value:.2g}"


def _named(row: Row, against: Against, result: Result) -> str:
    return f"{number(against.median)} {row.unit}, {_with_version(row, against, result)}"


def _with_version(row: Row, against: Against, result: Result) -> str:
    peer, version = row.peers[against.peer], result.versions.get(against.peer, "")
    package = "torch " if peer.package == "torch" and peer.label not in ("import torch",) else ""
    return f"{peer.label} ({package}{version})" if version else peer.label


def _listed(title: str, lines: Iterator[str]) -> list[str]:
    found = [f"- {line}" for line in lines]
    return ["\n".join([title, *found])] if found else []


def by_row(rows: Sequence[Row], results: Mapping[str, Result]) -> list[Found]:
    """Return the rows with their results."""
    return [Found(row, results.get(row.name)) for row in rows]
