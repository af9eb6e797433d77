"""``holdfast inject``: alters a checkpoint file as soft errors do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.progress import progress
from holdfast.cli.tables import count, say, table
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.faults.alteration import Alteration
    from holdfast_lab.inject.inject import Injection, InjectionReplay

_MOST_ROWS = 40
_MOST_NAMES = 8

_Number = float | None
_File = Path | None


def inject(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A checkpoint, a directory of them, or a file.")],
    *,
    flips: Annotated[int | None, typer.Option(metavar="N", help="Flip N distinct bits [1].")] = None,
    percent: Annotated[_Number, typer.Option(metavar="P", help="Flip bits in P percent of all values.")] = None,
    rate: Annotated[_Number, typer.Option(metavar="R", help="Flip each bit with this probability.")] = None,
    probability: Annotated[float, typer.Option(metavar="P", help="Apply each drawn flip with this probability.")] = 1.0,
    bits: Annotated[
        str, typer.Option(metavar="FIRST:LAST|FIELD", help="Bits to flip; 0 is the least significant.")
    ] = "all",
    burst: Annotated[int, typer.Option(metavar="K", help="Flip K neighbouring bits together.")] = 1,
    mask: Annotated[str | None, typer.Option(metavar="BITS", help="Flip this pattern of bits, such as 1011.")] = None,
    scale: Annotated[_Number, typer.Option(metavar="X", help="Multiply values by X instead of flipping bits.")] = None,
    keep_sign: Annotated[bool, typer.Option("--keep-sign", help="Never flip the sign bit.")] = False,
    no_nan: Annotated[bool, typer.Option("--no-nan", help="Redraw flips that give infinity or NaN.")] = False,
    at: Annotated[list[str] | None, typer.Option(metavar="PREFIX", help="Only these tensors; repeatable.")] = None,
    law: Annotated[str, typer.Option(metavar="bits|values|tensors", help="The unit that is drawn uniformly.")] = "bits",
    seed: Annotated[int, typer.Option(metavar="S", help="Seed; same seed, same alterations.")] = 0,
    record: Annotated[_File, typer.Option(metavar="FILE", help="Write a record of the alterations.")] = None,
    replay: Annotated[_File, typer.Option(metavar="FILE", help="Repeat the alterations of a record.")] = None,
    map_: Annotated[
        _File, typer.Option("--map", metavar="FILE", help="Map the record's tensor names to FILE's.")
    ] = None,
    partly: Annotated[bool, typer.Option("--partly", help="Skip the record's tensors that FILE lacks.")] = False,
    out: Annotated[_File, typer.Option("-o", "--out", metavar="OUT", help="Write the altered copy to OUT.")] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Alter FILE itself.")] = False,
    keep_digests: Annotated[
        bool, typer.Option("--keep-digests", help="Leave digests as they are, so that loading fails.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be altered.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every flip as JSON, as in a record.")] = False,
) -> None:
    """Flip bits of values in a checkpoint, as soft errors do.

    FILE is the directory of a checkpoint, a directory of checkpoints (the newest is used), or a file of another program
    (HDF5, .safetensors, .npz, .pt). For uncompressed values, the cost grows with the number of flips and not with the
    size of the file.

    Example: holdfast inject model.h5 --flips 10 --bits critical --seed 1 --record flips.json -o altered.h5
    """
    from holdfast.faults.reading import FaultNotAllowed
    from holdfast_lab.inject.files import find
    from holdfast_lab.inject.inject import inject as carry_out

    options: dict[str, Any] = {
        "flips": flips, "percent": percent, "rate": rate, "probability": probability, "bits": bits, "burst": burst,
        "mask": mask, "scale": scale, "keep-sign": keep_sign, "no-nan": no_nan, "law": law, "seed": seed,
    }  # fmt: skip
    try:
        what = (
            _alteration(map_, partly, options)
            if replay is None
            else _replay(replay, map_, partly, options | {"at": at})
        )
        with progress(f"altering {file}"):
            done = carry_out(
                find(file),
                what,
                at=at or (),
                out=out,
                in_place=in_place,
                dry_run=dry_run,
                keep_digests=keep_digests,
                record=record,
            )
    except FaultNotAllowed as error:
        raise ConfigError(error.named(_option)) from error
    if as_json:
        _print_json(done)
    else:
        _say(done, record)


_DEFAULTS: dict[str, Any] = {"probability": 1.0, "bits": "all", "burst": 1, "law": "bits", "seed": 0}
_OPTIONS = {"count": "--flips", "finite": "--no-nan", "keep_sign": "--keep-sign"}
"""Options of the fields of an alteration whose names differ."""


def _option(name: str) -> str:
    return _OPTIONS.get(name, f"--{name}")


def _alteration(map_: Path | None, partly: bool, options: dict[str, Any]) -> Alteration:
    from holdfast.faults.alteration import Alteration

    for name, given in (("--map", map_), ("--partly", partly)):
        if given:
            raise ConfigError(f"{name} is only for --replay; add --replay RECORD, or leave it out")
    fields = {option.removeprefix("--"): name for name, option in _OPTIONS.items()}
    return Alteration(**{fields.get(name, name): value for name, value in options.items()})


def _replay(record: Path, map_: Path | None, partly: bool, options: dict[str, Any]) -> InjectionReplay:
    from holdfast_lab.inject.files.replay import parse_map, parse_record, read_file
    from holdfast_lab.inject.inject import InjectionReplay

    for name, value in options.items():
        if value and value != _DEFAULTS.get(name):
            raise ConfigError(
                f"--replay repeats a record, and --{name} would draw something else; leave one of them out"
            )
    paths = {} if map_ is None else parse_map(read_file(map_))
    return InjectionReplay(parse_record(read_file(record)), paths, partly)


def _print_json(done: Injection) -> None:
    from holdfast_lab.inject.files.replay import lines

    skipped = [{"path": skipped.path, "why": skipped.why} for skipped in done.skipped]
    more = {
        "written": done.written,
        "kind": done.kind,
        "others": done.others,
        "missing": done.missing,
        "skipped": skipped,
    }
    first, *rest = lines(done.record)
    print(json.dumps(more)[:-1] + "," + first.removeprefix("{"), end="")
    print("".join(rest), end="")


def _say(done: Injection, record: Path | None) -> None:
    tensors = [tensor for tensor in done.record.tensors if len(tensor.index)]
    rows = []
    for tensor in tensors:
        place, flipped = tensor.place, tensor.before ^ tensor.after
        num_odd = int((~place.format.is_finite(tensor.after)).sum())
        num_bits = sum(int(value).bit_count() for value in flipped.tolist())
        shape = "x".join(map(str, place.shape)) or "scalar"
        rows.append((place.path, place.format.name, shape, len(tensor.index), num_bits, num_odd))
    what = count(sum(row[3] for row in rows), "value")
    if done.record.scale is None:
        what = f"{count(sum(row[4] for row in rows), 'bit')} of {what}"
    where = f"in {len(rows)} of {count(done.num_tensors, 'tensor')}"
    say(f"would alter {what} {where}" if done.written is None else f"{done.written}: altered {what} {where}")
    if rows:
        shown = rows if len(rows) <= _MOST_ROWS else rows[: _MOST_ROWS - 5]
        table(("tensor", "dtype", "shape", "values>", "bits>", "infinite or NaN>"), [_cells(row) for row in shown], 2)
        if len(shown) < len(rows):
            say(f"  ... and {count(len(rows) - len(shown), 'more tensor')}; --json prints them", "dim")
    if done.others:
        say(f"{done.others:,} of them had other values when the record was written")
    if done.missing:
        say(f"left out, because they are not in the file: {_names(done.missing)}")
    if done.skipped:
        say(f"cannot be altered: {_names([f'{skipped.path} ({skipped.why})' for skipped in done.skipped])}", "dim")
    if record is not None:
        say(f"record   {record}")


def _cells(row: tuple[str, str, str, int, int, int]) -> tuple[str, ...]:
    return (*row[:3], *(f"{number:,}" for number in row[3:]))


def _names(names: Any) -> str:
    more = f", and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
