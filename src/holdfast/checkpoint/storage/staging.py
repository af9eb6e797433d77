"""A local directory for files that are on their way to another machine.

A worker may be killed while it holds gigabytes in one, so making the next one removes those that no process uses any more.
"""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path

from holdfast.checkpoint.storage.local import explained
from holdfast.temporary import TemporaryFolder, sweep

_PREFIX = "holdfast-upload-"


class Staging:
    """An empty directory below ``TMPDIR``, which is removed by :meth:`close`, or else when this process ends.

    Raises:
        CheckpointError: if there can be none.
    """

    def __init__(self) -> None:
        root = Path(tempfile.gettempdir())
        with explained("make a temporary directory in", root):
            sweep(_PREFIX, root)
            folder = TemporaryFolder.make(_PREFIX, root)
            self.path = folder.path / "files"
            self.path.mkdir()
        self.close = weakref.finalize(self, folder.remove)
