"""``holdfast inject``: alters a checkpoint file, in place or in a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.faults.alteration import Alteration, ValueChange, ValuePosition, Values, apply, draw
from holdfast.faults.formats import Raw
from holdfast.faults.names import chosen
from holdfast_lab.inject.files import InjectionTarget, copied, opened
from holdfast_lab.inject.files.base import FileValues, Skipped
from holdfast_lab.inject.files.replay import ReplayResult, lines, replay
from holdfast_lab.inject.files.replay import ReplayTarget as Mapped
from holdfast_lab.inject.locate.base import Index
from holdfast_lab.inject.record import InjectionRecord, record_of


@dataclass(frozen=True, slots=True)
class InjectionReplay:
    """A repetition of recorded alterations.

    Args:
        record: The recorded alterations.
        paths: Names of tensors here; see :func:`~holdfast_lab.inject.files.replay.parse_map`.
        partly: Skip tensors that are not here, as where a file holds one stage of several.
    """

    record: InjectionRecord
    paths: dict[str, Mapped] = field(default_factory=dict)
    partly: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """The result of an alteration.

    Args:
        written: The altered file or directory; None if nothing was written.
        kind: Kind of the file.
        num_tensors: Number of tensors that can be altered.
        record: The alterations.
        skipped: The rest of the file.
        missing: In a replay, tensors that are not here.
        others: In a replay, the number of values that differed from the record beforehand.
    """

    written: str | None
    kind: str
    num_tensors: int
    record: InjectionRecord
    skipped: tuple[Skipped, ...]
    missing: tuple[str, ...] = ()
    others: int = 0


class ValueSubset:
    """A subset of the places of values; see :class:`~holdfast.faults.alteration.Values`."""

    def __init__(self, values: Values, chosen: Sequence[int]) -> None:
        self._values = values
        self._chosen = chosen
        self.places: Sequence[ValuePosition] = [values.places[number] for number in chosen]

    def read(self, wanted: Sequence[tuple[int, Index]]) -> list[Raw]:
        """See :meth:`Values.read`."""
        return self._values.read([(self._chosen[place], index) for place, index in wanted])

    def write(self, changes: Sequence[ValueChange]) -> None:
        """See :meth:`Values.write`."""
        self._values.write([replace(change, place=self._chosen[change.place]) for change in changes])


def inject(
    target: InjectionTarget,
    what: Alteration | InjectionReplay,
    *,
    at: Sequence[str] = (),
    out: Path | None = None,
    in_place: bool = False,
    dry_run: bool = False,
    keep_digests: bool = False,
    record: Path | None = None,
) -> Injection:
    """Alter a checkpoint, or a file of another program.

    Args:
        target: The file or checkpoint.
        what: The alteration.
        at: Alter only tensors whose path equals, begins with or matches one of these; see
            :func:`~holdfast.faults.names.chosen`.
        out: Path of the altered copy: a new file; for a checkpoint, a directory of checkpoints.
        in_place: Alter the file itself.
        dry_run: Alter nothing; the record is written.
        keep_digests: Leave the file's own digests unchanged, so that loading it detects the alterations.
        record: File for the record, which is written before the alteration.

    Raises:
        ConfigError: if the arguments are inconsistent or not applicable.
        CheckpointError: if the file cannot be read or altered.
    """
    if out is not None and in_place:
        raise ConfigError("an altered copy (-o) and --in-place exclude each other; leave one of them out")
    if out is None and not in_place and not dry_run:
        raise ConfigError(
            f"no destination is given: use -o OUT for an altered copy, or --in-place to alter {target} itself"
        )
    if record is not None and record.exists():
        raise ConfigError(
            f"{record} already exists, and may be needed to undo an alteration; give another file for the record"
        )
    to_copy = None if dry_run else out
    with opened(target, write=in_place and not dry_run) if to_copy is None else copied(target, to_copy) as values:
        part = _part(target, values, at)
        found = _changes(part, what)
        scale = what.record.scale if isinstance(what, InjectionReplay) else what.scale
        done = record_of(part.places, found.changes, scale)
        if record is not None:
            _write(record, done)
        if not dry_run:
            apply(part, found.changes)
            values.seal(keep_digests=keep_digests)
    return Injection(
        written=None if dry_run else str(out or target),
        kind=values.kind,
        num_tensors=len(values.places),
        record=done,
        skipped=values.skipped,
        missing=found.missing,
        others=found.others,
    )


def _part(target: InjectionTarget, values: FileValues, at: Sequence[str]) -> Values:
    if not values.places:
        why = f": {values.skipped[0].path} {values.skipped[0].why}" if values.skipped else ""
        raise ConfigError(f"{target} holds nothing that can be altered{why}")
    if not at:
        return values
    numbers = {place.path: number for number, place in enumerate(values.places)}
    return ValueSubset(values, list(chosen(numbers, [pattern.lstrip("/") for pattern in at]).values()))


def _changes(values: Values, what: Alteration | InjectionReplay) -> ReplayResult:
    if isinstance(what, Alteration):
        return ReplayResult(draw(values, what), (), 0)
    found = replay(values, what.record, what.paths)
    if found.missing and not what.partly:
        raise ConfigError(
            "tensors of the record are not in the file: "
            f"{', '.join(found.missing[:8])}{', ...' if len(found.missing) > 8 else ''}; map their names with --map, "
            "or skip them with --partly"
        )
    return found


def _write(path: Path, record: InjectionRecord) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write("".join(lines(record)))
    except OSError as error:
        raise ConfigError(f"cannot write the record {path}: {error.strerror or error}") from error
