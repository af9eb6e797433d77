"""The directories of a run."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from holdfast.base.system_errors import is_limit
from holdfast.base.temporary import TemporaryFolder, is_missing, sweep
from holdfast.errors import ConfigError
from holdfast.launch.supervise.processes import this_node

_PREFIX = "holdfast-"
SHARED = "shared"
"""Name of the link to a run directory on a shared file system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPaths:
    """The directories of a run.

    Args:
        run_dir: Records and beacons; removed with the run.
        log_dir: Output of each worker, and of mpirun.
        memory_dir: In-memory directory for MPI's shared segments, which mpirun leaves behind when it is killed. None if
            the machine has none, or the job uses several machines.
        own: Temporary directories of this machine, removed at the end. The first is, or links to, the run directory.
        is_shared: Whether the run directory is on a file system that several machines share.
    """

    run_dir: Path
    log_dir: Path
    memory_dir: Path | None
    own: tuple[TemporaryFolder, ...] = ()
    is_shared: bool = False

    @classmethod
    def make(cls, log_dir: Path | None, shared: Path | None = None) -> Self:
        """Create the directories: by default, logs inside the run directory; the run directory inside ``shared`` if given.

        Raises:
            ConfigError: if one cannot be created.
        """
        memory, temporary = Path("/dev/shm"), Path(tempfile.gettempdir())  # noqa: S108 - a folder of our own is made in it
        usable = os.access(memory, os.W_OK) and shared is None
        with contextlib.ExitStack() as undo:
            own = []
            for parent in (temporary, *([memory] if usable else [])):
                sweep(_PREFIX, parent, _remove_shared)
                own.append(_make(parent))
                undo.callback(own[-1].remove)
            run_dir = own[0].path
            if shared is not None:  # swept by its link alone: only the launcher's machine knows whether it is in use
                run_dir = Path(tempfile.mkdtemp(prefix=_shared_prefix(), dir=shared))
                undo.callback(shutil.rmtree, run_dir)
                (own[0].path / SHARED).symlink_to(run_dir)
            log_dir = (log_dir or run_dir / "logs").absolute()
            log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            undo.pop_all()
        memory_dir = own[1].path if usable else None
        return cls(
            run_dir=run_dir, log_dir=log_dir, memory_dir=memory_dir, own=tuple(own), is_shared=shared is not None
        )

    @property
    def mpirun_log(self) -> Path:
        """Output of what starts the workers."""
        return self.log_dir / "mpirun.log"

    def mpirun_output(self) -> str:
        """Return what is in :attr:`mpirun_log`."""
        try:
            return self.mpirun_log.read_text(errors="replace").strip()
        except OSError:
            return ""

    def clear_logs(self) -> None:
        """Remove the logs of an earlier run, which has ended."""
        for old in (*self.log_dir.glob("rank-*.log"), self.mpirun_log):
            old.unlink(missing_ok=True)

    @property
    def locks(self) -> tuple[int, ...]:
        """File descriptors to pass to child processes: the directories exist for as long as a process holds one."""
        return tuple(folder.lock for folder in self.own)

    def lost(self) -> Path | None:
        """Return the run directory if it was removed while the job runs, else None; MPI has its memory open already."""
        if self.own and self.own[0].was_removed():
            return self.own[0].path
        return self.run_dir if self.is_shared and is_missing(self.run_dir) else None

    def touch(self) -> None:
        """Make all files look new: many machines remove old ones from temporary directories, where a run may take weeks."""
        folders = [folder.path for folder in self.own] + ([self.run_dir] if self.is_shared else [])
        for top in folders:
            for folder, _, names in os.walk(top):
                for path in (folder, *(os.path.join(folder, name) for name in names)):
                    with contextlib.suppress(OSError):  # it was removed just now
                        os.utime(path, follow_symlinks=False)

    def clear(self) -> None:
        """Remove the temporary directories."""
        if self.is_shared:
            shutil.rmtree(self.run_dir, ignore_errors=True)
        for folder in self.own:
            folder.remove()


def _shared_prefix() -> str:
    return f".holdfast-run-{this_node()}-"


def _remove_shared(abandoned: Path) -> None:
    """Remove the run directory on a shared file system to which an abandoned folder links."""
    link = abandoned / SHARED
    with contextlib.suppress(OSError):  # there is no link
        target = link.readlink()
        if target.name.startswith(_shared_prefix()):
            shutil.rmtree(target, ignore_errors=True)


def _make(parent: Path) -> TemporaryFolder:
    try:
        return TemporaryFolder.make(f"{_PREFIX}{os.getpid()}-", parent)
    except OSError as error:
        if is_limit(error):
            raise
        raise ConfigError(
            f"cannot create a directory for the run in {parent}: {error.strerror}; free space there, or set TMPDIR to another directory"
        ) from error
