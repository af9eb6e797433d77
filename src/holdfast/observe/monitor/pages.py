"""The files of the dashboard's page, read from the package once; no path of a request leads to a file."""

from __future__ import annotations

import importlib.resources

_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class PageFiles:
    """The files of ``observe/monitor/page``, by name."""

    def __init__(self) -> None:
        folder = importlib.resources.files("holdfast.observe.monitor").joinpath("page")
        self._files = {
            file.name: (_KINDS[kind], file.read_bytes())
            for file in folder.iterdir()
            if (kind := file.name.rpartition(".")[2]) in _KINDS
        }

    def get(self, path: str) -> tuple[str, bytes] | None:
        """Return content type and content of a file, None if the page has no such file; "" is the page itself."""
        return self._files.get(path or "index.html")
