"""``holdfast ckpt``: list, show, verify, compare, convert and remove checkpoints."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from holdfast.base.formatting import size
from holdfast.cli.progress import progress
from holdfast.cli.tables import count, moment, need_command, print_json, say, table, warn, warn_of
from holdfast.errors import CheckpointMissing, ConfigError

if TYPE_CHECKING:
    from holdfast.tools.checkpoints.compare import Comparison, TensorDiff
    from holdfast.tools.checkpoints.listing import CheckpointStatus

_DAMAGED = 3
"""Exit code if damaged data was found."""
_GUARDS = ("warn", "stop", "off")
_MOST_ROWS = 40
_MOST_LETTERS = 100

ckpt = typer.Typer(name="ckpt", rich_markup_mode=None)

_Dir = Annotated[str, Argument(metavar="DIR", help="Directory or URL of checkpoints.", show_default=False)]
_Path = Annotated[str, Argument(metavar="PATH", help="A checkpoint, a directory of them, or a file.")]
_Json = Annotated[bool, Option("--json", help="Print JSON instead of text.")]
_All = Annotated[bool, Option("--all", help="Print everything; otherwise long lists are truncated.")]


@ckpt.callback(invoke_without_command=True)
def about(context: typer.Context) -> None:
    """List, verify, compare, convert and remove checkpoints.

    PATH is a checkpoint, a directory or URL of checkpoints, or a file of another program (.pt, .safetensors, .npz,
    .h5). Nothing in these files is executed.

    Example: holdfast ckpt ls runs/a
    """
    need_command(context)


@ckpt.command("ls")
def ls(
    directory: _Dir,
    *,
    fast: Annotated[bool, Option("--fast", help="Read only the manifests, not every byte.")] = False,
    as_json: _Json = False,
) -> int:
    """List checkpoints, and whether each is intact.

    Reads every byte. Also lists incomplete checkpoints. Exits with 3 if a checkpoint is damaged.

    Example: holdfast ckpt ls runs/a
    """
    from holdfast.tools.checkpoints.listing import attempts, examine_all
    from holdfast.tools.checkpoints.paths import find_root

    storage = find_root(directory)
    with progress(f"reading {storage.url}", quiet=as_json) as now:
        checkpoints = examine_all(storage, lambda step: now(f"reading step {step}"), read_all=not fast)
        unfinished = attempts(storage)
    if as_json:
        rows = [_described(examined) for examined in checkpoints]
        attempt_rows = [dataclasses.asdict(attempt) for attempt in unfinished]
        print_json({"url": storage.url, "checkpoints": rows, "attempts": attempt_rows})
    else:
        heads = ("step>", "size>", "tensors>", "workers>", "format", "written", "state")
        if checkpoints:
            table(heads, [_ls_row(examined) for examined in checkpoints])
        else:
            say(f"no checkpoints in {storage.url}")
        if any(examined.damage for examined in checkpoints):
            say(f"holdfast ckpt verify {directory} shows the damage")
        for attempt in unfinished:
            what = f"{attempt.folder}, {size(attempt.size_bytes)}"
            say(f"incomplete: {what}; being written, or abandoned; never loaded")
    return _DAMAGED if any(examined.damage for examined in checkpoints) else 0


def _described(examined: CheckpointStatus) -> dict[str, Any]:
    manifest = examined.manifest
    return {
        "step": examined.step,
        "bytes": None if manifest is None else manifest.size_bytes,
        "new_bytes": None if manifest is None else manifest.new_bytes,
        "tensors": None if manifest is None else len(manifest.tensors),
        "workers": None if manifest is None else manifest.info.get("workers"),
        "format": None if manifest is None else manifest.format,
        "written_s": examined.written_s,
        "intact": False if examined.damage else True if examined.was_read else None,
        "damage": [dataclasses.asdict(damage) for damage in examined.damage],
    }


def _ls_row(examined: CheckpointStatus) -> tuple[str, ...]:
    row = _described(examined)
    state = {True: "intact", False: "DAMAGED", None: "not read"}[row["intact"]]
    if examined.damage:
        state += f" ({count(len(examined.damage), 'place')})"
    shared = "" if row["new_bytes"] == row["bytes"] else f", {size(row['new_bytes'])} of it new"
    numbers = (str(row["step"]), size(row["bytes"]) + shared, _number(row["tensors"]), _number(row["workers"]))
    return (*numbers, row["format"] or "-", moment(row["written_s"]), state)


@ckpt.command("show")
def show(
    path: _Path,
    *,
    step: Annotated[
        int | None, Option(metavar="N", help="Step of the checkpoint in a directory [default: newest intact].")
    ] = None,
    everything: _All = False,
    as_json: _Json = False,
) -> int:
    """Show the contents of a checkpoint, or of a file.

    Lists tensors with dtype, shape, size and digest, and other saved values. For a directory, shows the newest intact
    checkpoint. Files of other programs can be shown, too.

    Example: holdfast ckpt show runs/a --step 20
    """
    from holdfast.tools.checkpoints.paths import opened
    from holdfast.tools.checkpoints.source import facts_of

    with (
        progress(f"opening {path}", quiet=as_json) as now,
        opened(path, step, now, on_damaged=warn_of) as source,
    ):
        facts = facts_of(source, now)
    facts["written"] = None if facts["written"] is None else moment(facts["written"])
    if as_json:
        print_json(facts)
        return 0
    for name in ("path", "format", "step", "generation", "files", "written", "versions"):
        if facts[name] is not None:
            say(f"{name:<12}{_inline(facts[name])}")
    for name, value in facts["info"].items():
        say(f"{'info':<12}{name}: {_cut(json.dumps(value), everything)}")
    say("")
    heads = ("tensor", "dtype", "shape", "size>", "xxh3")
    rows = [(t["path"], t["dtype"], _shape(t["shape"]), size(t["bytes"]), t["xxh3"]) for t in facts["tensors"]]
    _show_rows(heads, rows, "tensor", everything)
    for name, first in facts["ties"].items():
        say(f"{name} is tied to {first}")
    say(f"{count(len(facts['tensors']), 'tensor')}, {size(facts['bytes'])}")
    return 0


@ckpt.command("verify")
def verify(path: _Path, *, everything: _All = False, as_json: _Json = False) -> int:
    """Read every byte, and report all damage.

    Verifies one checkpoint, or all in a directory. Exits with 3 if any is damaged.

    Example: holdfast ckpt verify runs/a/step-00000020
    """
    from holdfast.tools.checkpoints.counted import CountedStorage
    from holdfast.tools.checkpoints.listing import bytes_of, examine, examine_all
    from holdfast.tools.checkpoints.paths import find

    if Path(path).is_file() and Path(path).name != "manifest.json":
        what = f"{path} is a file of another program, which has no digests"
        raise ConfigError(f"{what}; name a checkpoint, or a directory of checkpoints")
    storage, named = find(path)
    with progress(f"reading {storage.url}", quiet=as_json) as now:
        now.expect(bytes_of(storage, named))
        storage = CountedStorage(storage, now.advance)
        if named is None:
            checkpoints = examine_all(storage, lambda step: now(f"reading step {step}"))
        else:
            now(f"reading step {named}")
            checkpoints = [examine(storage, named)]
    if not checkpoints:
        raise CheckpointMissing(f"there is no complete checkpoint in {storage.url}; name a directory that contains one")
    if as_json:
        print_json({"url": storage.url, "checkpoints": [_described(examined) for examined in checkpoints]})
    else:
        for examined in checkpoints:
            _say_verified(examined, everything)
    return _DAMAGED if any(examined.damage for examined in checkpoints) else 0


def _say_verified(examined: CheckpointStatus, everything: bool) -> None:
    if not examined.damage:
        manifest = examined.manifest
        assert manifest is not None
        say(f"step {examined.step}: intact; {count(len(manifest.tensors), 'tensor')}, {size(manifest.size_bytes)}")
        return
    say(f"step {examined.step}: DAMAGED, {count(len(examined.damage), 'place')}", "bold red")
    for damage in examined.damage:
        if not damage.tensor:
            say(f"  {damage.what}")
    rows = [(d.tensor, str(d.start), str(d.end), d.file) for d in examined.damage if d.tensor]
    if rows:
        _show_rows(("damaged tensor", "from byte>", "to byte>", "file"), rows, "place", everything, indent=2)


@ckpt.command("diff")
def diff(
    first: Annotated[str, Argument(metavar="A", help="A checkpoint, a directory of them, or a file.")],
    second: Annotated[str, Argument(metavar="B", help="The checkpoint or file to compare with.")],
    *,
    everything: _All = False,
    as_json: _Json = False,
) -> int:
    """Compare two checkpoints, or files, tensor by tensor.

    Prints how many values differ, the largest absolute and relative error (relative to the larger of the two values),
    the Euclidean distance, and NaNs. For a directory, compares the newest intact checkpoint. Prints "identical" if
    nothing differs. Exits with 0 either way.

    Example: holdfast ckpt diff runs/a/step-00000020 exported.safetensors
    """
    from holdfast.tools.checkpoints.compare import compare
    from holdfast.tools.checkpoints.paths import opened

    with (
        progress(f"opening {first}", quiet=as_json) as now,
        opened(first, now=now, on_damaged=warn_of) as a,
        opened(second, now=now, on_damaged=warn_of) as b,
    ):
        comparison = compare(a, b, lambda path: now(f"comparing {path}"))
        names, kinds = {"a": a.name, "b": b.name}, {"a": a.kind, "b": b.kind}
    if as_json:
        print_json({**names, "identical": comparison.is_identical, **dataclasses.asdict(comparison)})
        return 0
    for letter, name in names.items():
        say(f"{letter}  {name} ({kinds[letter]})")
    _say_differences(comparison, everything)
    return 0


def _say_differences(comparison: Comparison, everything: bool) -> None:
    odd = [tensor for tensor in comparison.tensors if not tensor.is_same]
    if odd:
        say("")
        heads = ("tensor", "differ>", "of>", "max abs>", "max rel>", "distance>", "note")
        _show_rows(heads, [_diff_row(tensor) for tensor in odd], "tensor", everything)
    for letter, paths in (("a", comparison.only_first), ("b", comparison.only_second)):
        if paths:
            say("")
            say(f"only in {letter}:")
            _show_rows(("",), [(path,) for path in paths], "tensor", everything, indent=2)
    if comparison.scalars:
        say("")
        say("other saved values:")
        pairs = comparison.scalars.items()
        cells = [(path, _cut(a, everything) or "-", _cut(b, everything) or "-") for path, (a, b) in pairs]
        _show_rows(("value", "a", "b"), cells, "value", everything, indent=2)
    num_same = len(comparison.tensors) - len(odd)
    say("")
    if comparison.is_identical:
        beside = "" if comparison.scalars is not None else "; one of the two has no other values"
        say(f"identical: {count(num_same, 'tensor')}{beside}", "green")
    else:
        alone = len(comparison.only_first) + len(comparison.only_second)
        say(f"{count(num_same, 'tensor')} identical, {len(odd)} different, {alone} in one only")


def _diff_row(tensor: TensorDiff) -> tuple[str, ...]:
    notes = []
    if tensor.dtypes[0] != tensor.dtypes[1]:
        notes.append(f"{tensor.dtypes[0]} / {tensor.dtypes[1]}")
    if any(tensor.nans):
        notes.append(f"{tensor.nans[0]:,} / {tensor.nans[1]:,} NaNs")
    if tensor.shapes[0] != tensor.shapes[1]:
        notes.append(f"shape {_shape(tensor.shapes[0])} / {_shape(tensor.shapes[1])}")
        return (tensor.path, "-", "-", "-", "-", "-", ", ".join(notes))
    numbers = (f"{number:.3g}" for number in (tensor.max_abs, tensor.max_rel, tensor.distance))
    return (tensor.path, f"{tensor.differ:,}", f"{tensor.values:,}", *numbers, ", ".join(notes))


@ckpt.command("convert")
def convert(
    source: Annotated[str, Argument(metavar="A", help="A checkpoint, a directory of them, or a file.")],
    target: Annotated[str, Argument(metavar="B", help="Directory or URL of the new checkpoint.")],
    *,
    to: Annotated[str, Option(metavar="safetensors|hdf5|npz|dcp", help="Format of the new checkpoint.")],
    guard: Annotated[
        str,
        Option(
            metavar="|".join(_GUARDS),
            help="Response to absurd values in a file of another program, which has no digests.",
        ),
    ] = "warn",
    as_json: _Json = False,
) -> int:
    """Write a checkpoint, or a file, in another format.

    The result is the same step in B, and every tensor keeps its digest. For a directory, converts the newest intact
    checkpoint. A file of another program becomes step 0, unless it names a step. B must not have that step.

    Example: holdfast ckpt convert runs/a/step-00000020 exported --to hdf5
    """
    from holdfast.checkpoint.files.registry import check_format
    from holdfast.checkpoint.storage import open_storage
    from holdfast.tools.checkpoints.convert import convert as carry_out
    from holdfast.tools.checkpoints.counted import CountedStorage
    from holdfast.tools.checkpoints.paths import opened
    from holdfast.tools.checkpoints.plausible import check_values

    check_format(to, "the format")
    if guard not in _GUARDS:
        raise ConfigError(f"--guard must be one of {', '.join(_GUARDS)}, got {guard!r}")
    if Path(target).is_file():
        raise ConfigError(f"{target} is a file; name a directory or URL for the new checkpoint")
    with (
        progress(f"opening {source}", quiet=as_json) as now,
        opened(source, now=now, count=now.advance, on_damaged=warn_of) as opened_source,
    ):
        size_bytes = sum(tensor.size_bytes for tensor in opened_source.tensors.values())
        now.expect((2 if opened_source.manifest is None else 3) * size_bytes)  # read, written, and read again
        if opened_source.manifest is None and guard != "off":
            now(f"checking the values of {opened_source.name}")
            check_values(opened_source, is_fatal=guard == "stop", tell=warn)
        now(f"converting {opened_source.name}")
        saved = carry_out(opened_source, CountedStorage(open_storage(target), now.advance), to, now.advance)
        num_tensors = len(opened_source.tensors) - len(opened_source.ties)
    if as_json:
        print_json({"path": saved.path, "step": saved.step, "bytes": saved.size_bytes, "tensors": num_tensors})
    else:
        say(f"{saved.path}: {to}, {count(num_tensors, 'tensor')}, {size(saved.size_bytes)}; all digests match")
    return 0


@ckpt.command("prune")
def prune(
    directory: _Dir,
    *,
    keep_last: Annotated[int, Option(metavar="K", help="Number of newest checkpoints to keep, at least 2.")],
    keep_every: Annotated[int, Option(metavar="N", help="Also keep steps that N divides.")] = 0,
    dry_run: Annotated[bool, Option("--dry-run", help="Only print what would be removed.")] = False,
    as_json: _Json = False,
) -> int:
    """Remove old and incomplete checkpoints.

    Incomplete ones are removed if a newer one is complete. The newest intact checkpoint is always kept. Exits with 3 if
    a damaged checkpoint was found.

    Example: holdfast ckpt prune runs/a --keep-last 3 --keep-every 1000 --dry-run
    """
    from holdfast.tools.checkpoints.listing import prune as carry_out
    from holdfast.tools.checkpoints.paths import find_root

    for name, value, least in (("--keep-last", keep_last, 2), ("--keep-every", keep_every, 0)):
        if value < least:
            why = "; the newest may be damaged" if least else ""
            raise ConfigError(f"{name} must be at least {least}, got {value}{why}")
    storage = find_root(directory)
    with progress(f"reading {storage.url}", quiet=as_json):
        done = carry_out(storage, keep_last, keep_every, dry_run=dry_run, on_damaged=warn_of)
    if as_json:
        print_json({"url": storage.url, "dry_run": dry_run, **dataclasses.asdict(done)})
        return _DAMAGED if done.damaged else 0
    word = "would remove" if dry_run else "removed"
    for step in done.steps:
        say(f"{word} step {step}")
    for attempt in done.attempts:
        say(f"{word} {attempt.folder}, {size(attempt.size_bytes)}, which is incomplete")
    kept = f"{count(len(done.kept), 'checkpoint')} kept"
    freed = f"{'would free' if dry_run else 'freed'} {size(done.freed_bytes)}"
    say(f"{freed}; {kept}" if done.steps or done.attempts else f"nothing to remove; {kept}")
    return _DAMAGED if done.damaged else 0


# -- formatting


def _show_rows(
    heads: Sequence[str], rows: Sequence[Sequence[str]], what: str, everything: bool, indent: int = 0
) -> None:
    """Print a table; truncate a long one, unless ``everything`` is wanted, and print how many rows are missing."""
    shown = rows if everything or len(rows) <= _MOST_ROWS else rows[: _MOST_ROWS - 5]
    table(heads, shown, indent)
    if more := len(rows) - len(shown):
        say(f"... and {count(more, f'more {what}')}; --all prints them", "dim")


def _cut(text: str, everything: bool) -> str:
    return text if everything or len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 4]} ..."


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _number(value: Any) -> str:
    return f"{value:,}" if type(value) is int else "-"


def _inline(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{key} {size(item) if isinstance(item, int) else item}" for key, item in value.items())
