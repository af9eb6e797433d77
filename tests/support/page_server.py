"""A server of the dashboard's page that shows the states a test gives it, in the form of the launcher's server."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = Path(str(files("holdfast.observe.monitor"))) / "page"
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
KEEP_ALIVE_S = 5.0


class PageServer:
    """Serves runs until the end of a `with` block; can end and come back on the same port, as a launcher does.

    Args:
        runs: The full state of each run, by id.
        token: If not empty, reading needs it; actions always need one.
    """

    def __init__(self, runs: dict[str, dict[str, Any]], token: str = "") -> None:
        self.runs, self.token = runs, token
        self.logs: dict[int, list[str]] = {}
        self.actions: list[dict[str, Any]] = []
        self.is_full = False
        """Whether no more page may follow a run."""
        self.answer: tuple[int, dict[str, str]] = (200, {"said": "requested"})
        self.port = 0
        self._changes: dict[str, list[dict[str, Any]]] = {run: [] for run in runs}
        self._news = threading.Condition()
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://127.0.0.1:{self.port}/"

    def change(self, run: str, /, **sections: Any) -> None:
        """Send a change of a run to every page that follows it."""
        with self._news:
            state = self.runs[run]
            state["version"] += 1
            for name, value in sections.items():
                state[name] = _merged(state.get(name), value)
            self._changes[run].append({"version": state["version"], **sections})
            self._news.notify_all()

    def start(self) -> None:
        """Listen; on the same port again after `stop`."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), type("Handler", (_Handler,), {"page": self}))
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """End every connection and stop listening."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        with self._news:
            self._news.notify_all()

    def __enter__(self) -> PageServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def follow(self, run: str, send: Any) -> None:
        """Send the full state and then each change, until the server stops."""
        server = self._server
        with self._news:
            sent = len(self._changes[run])
            text = json.dumps(self.runs[run])
        send(f"event: full\ndata: {text}\n\n")
        while True:
            with self._news:
                if len(self._changes[run]) == sent and self._server is server:
                    self._news.wait(KEEP_ALIVE_S)
                if self._server is not server:
                    return
                new, sent = self._changes[run][sent:], len(self._changes[run])
            for change in new:
                send(f"event: change\ndata: {json.dumps(change)}\n\n")
            if not new:
                send(": keep-alive\n\n")


def _merged(old: Any, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return list(({row["id"]: row for row in old or []} | {row["id"]: row for row in value}).values())


class _Handler(BaseHTTPRequestHandler):
    page: PageServer

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if not path.startswith("/api/"):
            self._file(path)
        elif self.page.token and not self._is_allowed():
            self._json(401, {"error": "this needs the token of the job"})
        elif path == "/api/runs":
            self._json(200, [_listed(run) for run in self.page.runs.values()])
        elif (run := path.split("/")[3]) not in self.page.runs:
            self._json(404, {"error": f"there is no run {run}"})
        elif path.endswith("/stream") and self.page.is_full:
            self._json(503, {"error": "16 pages follow runs already; close one"})
        elif path.endswith("/stream"):
            self._stream(run)
        elif path.endswith("/log"):
            rank = int(parse_qs(urlsplit(self.path).query)["rank"][0])
            self._json(200, {"lines": self.page.logs.get(rank, [])})
        else:
            self._json(200, self.page.runs[run])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._is_allowed():
            self._json(401, {"error": "this needs the token of the job"})
            return
        self.page.actions.append(body)
        self._json(*self.page.answer)

    def _is_allowed(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.page.token or 'secret'}"

    def _file(self, path: str) -> None:
        file = PAGE / (path.lstrip("/") or "index.html")
        if not file.is_file():
            self._json(404, {"error": f"there is no {path}"})
            return
        self._send(200, TYPES[file.suffix], file.read_bytes())

    def _json(self, status: int, value: Any) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, run: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()

        def send(text: str) -> None:
            self.wfile.write(text.encode())
            self.wfile.flush()

        try:
            self.page.follow(run, send)
        except (BrokenPipeError, ConnectionResetError):
            return  # the page was closed


def _listed(run: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": run["run"]["id"],
        "name": run["run"]["script"],
        "live": run["run"]["live"],
        **{section: run[section] for section in ("state", "progress", "goodput")},
    }
