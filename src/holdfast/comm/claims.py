"""Which group of workers continues if hosts lose contact: each new generation is claimed in the folder of the run.

Open MPI cannot tell a dead process from one out of reach. Where packets between hosts are lost in one direction, each side
may take the other for dead and shrink to a communicator of its own. So all survivors create the same symbolic link, which
only one group can do: its name is the generation, and its target the digest of the members. Unlike a file it has its content
from the beginning. A group whose members are not those of the link ends. Later generations of it are never claimed, so by
induction the claimed generations are one history.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path


class GenerationClaims:
    """The generations of one start of a job.

    Args:
        folder: A folder that all hosts of the job share.
        start: Name of the start, which no other start of the job has.
    """

    def __init__(self, folder: Path, start: str) -> None:
        self._folder = folder
        self._start = start.replace("/", "-")

    @classmethod
    def under_mpirun(cls, run_dir: str, environ: Mapping[str, str]) -> GenerationClaims | None:
        """Return those of this process of mpirun; None if all processes are on one host, or have no folder in common."""
        size = environ.get("OMPI_COMM_WORLD_SIZE", "")
        if not run_dir or environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", size) == size:
            return None
        return cls(Path(run_dir), environ.get("PMIX_NAMESPACE", ""))

    def claim(self, generation: int, members: Sequence[int]) -> bool:
        """Return whether ``members`` are the generation: no others have claimed it.

        Raises:
            OSError: if that cannot be found out.
        """
        link = self._folder / f"generation-{generation}-{self._start}"
        digest = hashlib.sha256(",".join(map(str, members)).encode()).hexdigest()
        with contextlib.suppress(FileExistsError):
            link.symlink_to(digest)
        return os.readlink(link) == digest
