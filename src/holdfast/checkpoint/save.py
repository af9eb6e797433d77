"""Writing a checkpoint in two phases: first the tensors, then the manifest once the step is durable.

Between the phases, and after a crash at any moment, a reader sees the previous checkpoint. The same holds when a complete
step is saved again: its new files are written next to the old ones, and replacing the manifest turns
the old checkpoint into the new one.

Several workers may share the work. Each writes a part of the tensors and describes it; the committing worker merges the
descriptions. The parts may be ranges of a replicated state, or distinct parts that only their writers hold.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.checkpoint.block_writer import write_blocks
from holdfast.checkpoint.files.registry import check_format, make_writer
from holdfast.checkpoint.manifest import MANIFEST_NAME, Manifest, check_info, dump, is_data_folder, parse, versions
from holdfast.checkpoint.parts import merge
from holdfast.checkpoint.reuse import BlockReuse
from holdfast.checkpoint.snapshot import in_host_memory
from holdfast.checkpoint.storage import Storage, Where, as_storage, step_folder, step_of
from holdfast.checkpoint.storage.local import explained
from holdfast.checkpoint.write_plan import WritePlan, take
from holdfast.errors import CheckpointCorrupt, CheckpointError, ConfigError
from holdfast.faults import points

_POLL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A complete checkpoint."""

    url: str  # Directory or URL of all checkpoints
    step: int  # Number of steps that the state contains
    size_bytes: int  # Its size, see :attr:`Manifest.size_bytes <holdfast.checkpoint.manifest.Manifest.size_bytes>`
    new_bytes: int  # Size of what was written; the rest it shares with an earlier checkpoint

    @property
    def path(self) -> str:
        """Directory or URL of this checkpoint."""
        return f"{self.url}/{step_folder(self.step)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCheckpoint:
    """Tensors that are durably stored but do not count yet: they are never loaded."""

    storage: Storage  # The storage
    manifest: Manifest  # Manifest of this worker's part; its generation is not known yet
    part: int = 0  # Index of the part
    parts: int = 1  # Number of parts
    clean: set[int] = field(default_factory=set)
    """Steps known to be complete, without leftovers next to them; they are not checked again, however many there are."""

    @property
    def step(self) -> int:
        """Number of steps that the state contains."""
        return self.manifest.step

    @property
    def _folder(self) -> str:
        return f"{step_folder(self.step)}/{self.manifest.folder}"

    def commit(
        self, generation: int, wait_s: float = 60.0, may_come: Callable[[int], bool] = lambda part: True
    ) -> SavedCheckpoint:
        """Complete the checkpoint. Call it once, at one of the writers, when the step is durable.

        Args:
            generation: Generation of the communicator, saved in the manifest.
            wait_s: Seconds to wait for the parts of other writers.
            may_come: Returns whether a missing part may still arrive, because its writer is alive.

        Raises:
            CheckpointError: if it cannot be written, a part is missing or does not match the others, or files are missing because
                it was abandoned. The checkpoint is then not complete.
        """
        if generation < 0:
            raise ConfigError(f"generation must be at least 0, got {generation}")
        self._check_there(self.manifest)
        whole = dataclasses.replace(merge(self._all_parts(wait_s, may_come)), generation=generation)
        self._check_there(whole)
        data = dump(whole)
        try:
            parse(data)  # an unreadable manifest must not replace a readable one
        except CheckpointCorrupt as error:
            raise CheckpointError(
                f"cannot complete the checkpoint of step {self.step}: its parts do not fit together: {error}"
            ) from error
        points.reach("checkpoint.manifest")
        self.storage.put(f"{step_folder(self.step)}/{MANIFEST_NAME}", data)
        points.reach("checkpoint.committed")
        self._tidy()
        return SavedCheckpoint(
            url=self.storage.url,
            step=self.step,
            size_bytes=whole.size_bytes + len(data),
            new_bytes=whole.new_bytes + len(data),
        )

    def abandon(self) -> None:
        """Remove what this worker wrote, or everything at part 0; does nothing the second time, or after ``commit``.

        Raises:
            CheckpointError: if it cannot be removed.
        """
        folder = step_folder(self.step)
        if _completed_folder(self.storage, self.step) == self.manifest.folder:
            return
        if self.part == 0:
            self.storage.remove(self._folder)
        else:
            # The description first: the files that it describes must exist as long as another worker may rely on it.
            for name in (_description(self.part), *self.manifest.files):
                self.storage.remove(f"{self._folder}/{name}")
        if not self.storage.names(folder):
            self.storage.remove(folder)

    def _check_there(self, manifest: Manifest) -> None:
        if missing := sorted(manifest.files.keys() - set(self.storage.names(self._folder))):
            raise CheckpointError(
                f"cannot complete the checkpoint of step {self.step}: {missing[0]} is not in {self._folder} any more. A "
                "pending checkpoint cannot be committed after abandon(); write the tensors again"
            )

    def _all_parts(self, wait_s: float, may_come: Callable[[int], bool]) -> list[Manifest]:
        end_s = time.monotonic() + wait_s
        return [
            self.manifest if part == self.part else self._read_description(part, end_s, may_come)
            for part in range(self.parts)
        ]

    def _read_description(self, part: int, end_s: float, may_come: Callable[[int], bool]) -> Manifest:
        while True:
            is_alive, is_late = may_come(part), time.monotonic() > end_s  # evaluated before the last read
            data = self.storage.read(f"{self._folder}/{_description(part)}")
            if data:
                return parse(data, is_part=True)
            if data is not None or is_late or not is_alive:
                gone = "was not written in time" if is_alive else "was not written, and its writer is gone"
                why = gone if data is None else "could not be written; its writer says why"
                raise CheckpointError(
                    f"cannot complete the checkpoint of step {self.step}: part {part} of {self.parts} {why}"
                )
            time.sleep(_POLL_S)

    def _tidy(self) -> None:
        # The checkpoint is complete: leftovers are worth a warning, not a failed run.
        try:
            for part in range(self.parts if self.parts > 1 else 0):
                self.storage.remove(f"{self._folder}/{_description(part)}")
            for name in self.storage.names(""):
                step = step_of(name)
                if step is None or step > self.step or step in self.clean:
                    continue
                if _remove_attempts(self.storage, step):
                    self.clean.add(step)
        except CheckpointError as error:
            text = (
                f"the checkpoint of step {self.step} is complete, but leftovers beside it could not be removed: {error}"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=3)


def write(
    storage: Where,
    step: int,
    content: WritePlan,
    info: dict[str, Any],
    *,
    format: str = "safetensors",
    token: str = "",
    clean: set[int] | None = None,
    tell: Callable[[int], None] = lambda size: None,
    reuse: BlockReuse | None = None,
) -> PendingCheckpoint:
    """Write the tensors of a checkpoint, or a part of them, and wait until they are durable.

    Args:
        storage: The storage. Its writers write one step at a time.
        step: Number of steps that the state contains, at least 0.
        content: From :func:`take`; its values must not change before this returns.
        info: Any other metadata, as plain JSON.
        format: One of :func:`~holdfast.checkpoint.files.registry.format_names`.
        token: Identifies this attempt at the step, the same at all writers: lower-case letters, digits, ``-``.
        clean: See :class:`PendingCheckpoint`; pass the same set for each checkpoint.
        tell: Called with the bytes of each block that is written, from any thread.
        reuse: What this writer remembers of its last checkpoints: their unchanged blocks are not written again. The format
            must not be ``dcp``.

    Returns:
        The checkpoint, still to be committed.

    Raises:
        CheckpointError: if the storage rejects it, or the format cannot hold it. Complete checkpoints stay complete.
        ConfigError: if an argument is not allowed.
    """
    storage = as_storage(storage)
    name = _name_folder(step, format, token)
    check_info(info)
    clean = set() if clean is None else clean
    clean.discard(step)  # this attempt may leave files there
    points.reach("checkpoint.begin")
    if token and _completed_folder(storage, step) == name:
        raise CheckpointError(
            f"the checkpoint of step {step} was completed with the token {token!r} already; saving it again needs another"
        )
    folder = f"{step_folder(step)}/{name}"
    part = content.part
    try:
        described = _write_files(storage, step, folder, in_host_memory(content), info, format, tell, reuse)
        if content.parts > 1:
            _describe(storage, step, described, part)
    except BaseException:
        if content.parts == 1:
            _discard(storage, folder)
        else:
            _give_notice(storage, f"{folder}/{_description(part)}")
        raise
    points.reach("checkpoint.tensors")
    return PendingCheckpoint(storage=storage, manifest=described, part=part, parts=content.parts, clean=clean)


def _write_files(
    storage: Storage,
    step: int,
    folder: str,
    content: WritePlan,
    info: dict[str, Any],
    format: str,
    tell: Callable[[int], None],
    reuse: BlockReuse | None,
) -> Manifest:
    """Write and store the files of a part; return its description."""
    path = storage.prepare(folder)
    reused = None if reuse is None else reuse.plan(storage, step, folder, content)
    boxes = content.boxes if reused is None else reused.boxes
    with explained(f"write the checkpoint of step {step} to", path):
        layout = make_writer(format).lay_out(path, f"part-{content.part:05d}", {box.key: box.tensor for box in boxes})
        files, tensors = write_blocks(path, layout, boxes, tell)
    described = Manifest(
        step=step,
        generation=0,
        format=format,
        folder=folder.partition("/")[2],
        files=files if reused is None else files | reused.files,
        tensors=tensors if reused is None else reused.merged(tensors, content.boxes),
        skeleton=content.skeleton,
        info=json.loads(json.dumps(info)) if content.part == 0 else {},
        versions=versions(),
    )
    storage.store(folder, layout.files)
    return described


def _name_folder(step: int, format: str, token: str) -> str:
    """Return the name of the data folder of an attempt; raise a ConfigError if an argument is not allowed."""
    if step < 0:
        raise ConfigError(f"step must be at least 0, got {step}")
    check_format(format)
    name = f"data-{token or secrets.token_hex(4)}"
    if not is_data_folder(name):
        raise ConfigError(
            f"token must be at most 64 lower-case letters, digits and '-', not beginning with '-', got {token!r}"
        )
    return name


def write_tensors(storage: Where, step: int, state: Any, info: dict[str, Any], **options: Any) -> PendingCheckpoint:
    """Write all tensors of a state: :func:`take` and :func:`write`, by one writer.

    Everything is read from ``state`` and ``info`` before the call returns; they may change afterwards.
    """
    return write(storage, step, take(state), info, **options)


def remove(storage: Where, step: int) -> None:
    """Remove the checkpoint of a step: its manifest first, so that a half-removed checkpoint is never found.

    Raises:
        CheckpointError: if it cannot be removed.
    """
    storage = as_storage(storage)
    storage.remove(f"{step_folder(step)}/{MANIFEST_NAME}")
    storage.remove(step_folder(step))


def _description(part: int) -> str:
    return f"part-{part:05d}.json"


def _completed_folder(storage: Storage, step: int) -> str | None:
    """Return the data folder that the manifest of a step names; None if there is no readable manifest."""
    try:
        data = storage.read(f"{step_folder(step)}/{MANIFEST_NAME}")
        return None if data is None else parse(data).folder
    except CheckpointCorrupt:
        return None


def _remove_attempts(storage: Storage, step: int) -> bool:
    """Remove leftovers of attempts at a step that will not be completed; return whether the step is complete and they are gone.

    Foreign files stay.
    """
    folder = step_folder(step)
    names = storage.names(folder)
    attempts = [name for name in names if is_data_folder(name) or name == f"{MANIFEST_NAME}.tmp"]
    is_complete = MANIFEST_NAME in names
    if not is_complete and attempts and attempts == names:
        storage.remove(folder)
        return False
    if is_complete and len(attempts) < 2:
        return True
    kept = _completed_folder(storage, step) if is_complete else ""
    if kept is None:
        return False  # its manifest is damaged, and everything stays for inspection
    for name in attempts:
        if name != kept:
            storage.remove(f"{folder}/{name}")
    return is_complete


def discard(storage: Where, step: int, token: str) -> None:
    """Remove the files of all writers of an attempt at a step, unless the attempt was completed.

    Raises:
        CheckpointError: if it cannot be removed.
    """
    storage = as_storage(storage)
    folder = f"data-{token}"
    if _completed_folder(storage, step) != folder:
        _remove_folder(storage, f"{step_folder(step)}/{folder}")


def _remove_folder(storage: Storage, folder: str) -> None:
    """Remove a folder of files, and its step's folder if that is empty then."""
    storage.remove(folder)
    step = folder.partition("/")[0]
    if not storage.names(step):
        storage.remove(step)


def _describe(storage: Storage, step: int, described: Manifest, part: int) -> None:
    """Publish the description of this part; from then on the committing worker may merge and remove it."""
    try:
        storage.put(f"{step_folder(step)}/{described.folder}/{_description(part)}", dump(described))
    except CheckpointError:
        # put() reads the file back. If the committing worker has already merged and removed it, that is no error.
        if _completed_folder(storage, step) != described.folder:
            raise


def _give_notice(storage: Storage, description: str) -> None:
    """Leave an empty description, so that the committing worker does not wait for this part."""
    try:
        storage.put(description, b"")
    except CheckpointError as error:
        warnings.warn(f"could not report the missing part to the other writers: {error}", RuntimeWarning, stacklevel=3)


def _discard(storage: Storage, folder: str) -> None:
    try:
        _remove_folder(storage, folder)
    except CheckpointError as error:
        warnings.warn(f"the failed attempt {folder} could not be removed: {error}", RuntimeWarning, stacklevel=3)
