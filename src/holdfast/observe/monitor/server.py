"""The server of dashboards: HTTP from the standard library, on threads of its own, which training never waits for.

It serves a page, the state of runs as JSON and as streams of changes, and takes actions. What it answers, and to which
requests, is described in ``docs/reference/live-view.md``.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from holdfast.errors import ConfigError
from holdfast.observe.monitor.feed import Feed, Refused, encoded
from holdfast.observe.monitor.pages import PageFiles
from holdfast.observe.monitor.token import Token

MOST_STREAMS = 16
"""Readers that follow a run at the same time."""
MOST_CONNECTIONS = 64
"""Connections at the same time; more are closed at once."""
SLOW_S = 10.0
"""A client that takes longer to send a request, or to take an answer, is dropped."""
_MOST_BODY = 4096
_MOST_LINES = 2000
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine's loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class DashboardServer:
    """Serves runs until :meth:`close`.

    Args:
        host: The address or name of an interface of this machine.
        port: The port; 0: a free one.
        token: What actions need, and beyond loopback all data.
        option: Name of the option that gave host and port, for messages.

    Raises:
        ConfigError: if the port cannot be opened.
    """

    def __init__(self, host: str, port: int, token: Token, *, option: str = "--dashboard") -> None:
        self.feeds: dict[str, Feed] = {}
        self.token, self.host = token, host
        self.is_local = is_loopback(host)
        self.files = PageFiles()
        self.streams = threading.BoundedSemaphore(MOST_STREAMS)
        self._closing = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._server = _Server((host, port), self, family)
        except (OSError, UnicodeError) as error:  # a name such as a..b has no encoding
            why = (error.strerror if isinstance(error, OSError) else "") or error
            raise ConfigError(f"{option} {host}:{port} cannot be opened: {why}; choose another one") from error
        self.port: int = self._server.server_address[1]
        self._names = _names(host)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="holdfast-dashboard", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """The URL of the page, without the token."""
        shown = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host  # noqa: S104 - compared only
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{self.port}/"

    @property
    def url(self) -> str:
        """The URL of the page with the token, for its owner only."""
        return self.token.url(self.address)

    def sleep(self, seconds: float) -> bool:
        """Wait; return whether the server ends."""
        return self._closing.wait(seconds)

    def is_ours(self, host: str) -> bool:
        """Return whether the value of a ``Host`` header names this server: else a page may have changed where its name leads."""
        try:
            name = urllib.parse.urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self._names:
            return True
        with contextlib.suppress(ValueError):  # an address cannot be made to lead elsewhere
            return ipaddress.ip_address(name).is_loopback or not self.is_local
        return not self.is_local and name == _full_name()

    def close(self, wait_s: float = 1.0) -> None:
        """End: streams get their last change first, for which it waits at most ``wait_s``."""
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        ends_s = time.monotonic() + wait_s
        for thread in self._server.open_threads():
            thread.join(max(0.0, ends_s - time.monotonic()))


@functools.cache
def _full_name() -> str:
    """Return the name of this machine with its domain. The look-up may take long: only a connection's thread waits for it."""
    return socket.getfqdn().lower()


def _names(host: str) -> set[str]:
    """Return the names that this server may be called by, as far as they are known without a look-up."""
    names = {"localhost", host.lower()}
    if not is_loopback(host):
        names.add(socket.gethostname().lower())
    return names


class _Server(ThreadingHTTPServer):
    """One thread for each connection, and only so many."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, address: tuple[str, int], dashboard: DashboardServer, family: int) -> None:
        self.address_family = socket.AddressFamily(family)
        self.dashboard = dashboard
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._answering: set[threading.Thread] = set()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without a look-up of names, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        os.set_inheritable(self.socket.fileno(), False)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own, if there are not too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could start
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one connection."""
        self._answering.add(threading.current_thread())
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._answering.discard(threading.current_thread())
            self._free.release()

    def open_threads(self) -> list[threading.Thread]:
        """Return the threads of open connections."""
        return list(self._answering)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Drop a connection that broke; a browser that leaves is no event of the run."""


class _Answer(Exception):
    """Raised to answer with an error; the message is one line."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: _Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "holdfast", ""
    timeout = SLOW_S

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: a request line may have the token."""

    def do_GET(self) -> None:
        """Answer with a file of the page, or with data."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Carry out an action."""
        self._answer(self._post)

    def _answer(self, make: Callable[[list[str], Mapping[str, str]], None]) -> None:
        try:
            url = urllib.parse.urlsplit(self.path)
            self._check_origin(is_page=url.path == "/")
            make(url.path.removeprefix("/").split("/"), dict(urllib.parse.parse_qsl(url.query)))
        except _Answer as answer:
            if self.command == "POST":
                self.close_connection = True  # its body may be unread
            self._send(answer.status, "application/json", encoded({"error": str(answer)}))
        except (OSError, ValueError):
            self.close_connection = True

    def _check_origin(self, *, is_page: bool) -> None:
        """Refuse what a page of another site has a browser send."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if not self.server.dashboard.is_ours(host):
            raise _Answer(HTTPStatus.FORBIDDEN, "the Host header names another server; use the address of this one")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            raise _Answer(HTTPStatus.FORBIDDEN, "requests from pages of other sites are refused")
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and not is_page:
            raise _Answer(HTTPStatus.FORBIDDEN, "requests from pages of other sites are refused")

    def _check_token(self, *, acts: bool) -> None:
        dashboard = self.server.dashboard
        if (acts or not dashboard.is_local) and not dashboard.token.is_in(self.headers.get("Authorization", "")):
            raise _Answer(
                HTTPStatus.UNAUTHORIZED, "the token is missing or wrong; open the URL that the launcher printed"
            )

    def _get(self, path: list[str], query: Mapping[str, str]) -> None:
        if path[0] != "api":
            kind, content = self.server.dashboard.files.get("/".join(path)) or _missing()
            self._send(HTTPStatus.OK, kind, content)
            return
        self._check_token(acts=False)
        feeds = self.server.dashboard.feeds
        match path[1:]:
            case ["runs"]:
                self._send(HTTPStatus.OK, "application/json", encoded([feed.summary() for feed in feeds.values()]))
            case ["runs", name] if name in feeds:
                self._send(HTTPStatus.OK, "application/json", feeds[name].full())
            case ["runs", name, "stream"] if name in feeds:
                self._stream(feeds[name])
            case ["runs", name, "log"] if name in feeds:
                self._log(feeds[name], query)
            case _:
                _missing()

    def _post(self, path: list[str], query: Mapping[str, str]) -> None:
        self._check_token(acts=True)
        feeds = self.server.dashboard.feeds
        match path:
            case ["api", "runs", name, "actions"] if name in feeds:
                body = self._body()
                action = body.pop("action", None)
                try:
                    if not isinstance(action, str) or action not in feeds[name].source.actions:
                        raise Refused(f"{action!a:.40} is no action of this run; {_listed(feeds[name])}")
                    reply = feeds[name].source.act(action, body)
                except Refused as error:
                    raise _Answer(HTTPStatus.CONFLICT, str(error)) from None
                self._send(HTTPStatus.OK, "application/json", encoded({"said": reply}))
            case _:
                _missing()

    def _body(self) -> dict[str, Any]:
        """Return the JSON object that was sent."""
        length = self.headers.get("Content-Length", "")
        if self.headers.get_content_type() != "application/json":
            raise _Answer(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "an action must be sent as application/json")
        if not (length.isascii() and length.isdecimal() and int(length) <= _MOST_BODY):
            raise _Answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"an action must have at most {_MOST_BODY} bytes")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise _Answer(HTTPStatus.BAD_REQUEST, "the action is not JSON") from None
        if not isinstance(body, dict):
            raise _Answer(HTTPStatus.BAD_REQUEST, "the action must be a JSON object")
        return body

    def _log(self, feed: Feed, query: Mapping[str, str]) -> None:
        rank, lines = query.get("rank", ""), query.get("lines", "200")
        if not all(text.isascii() and text.isdecimal() and len(text) < 10 for text in (rank, lines)):
            raise _Answer(HTTPStatus.BAD_REQUEST, "rank and lines must be whole numbers")
        try:
            tail = feed.source.log(int(rank), min(int(lines), _MOST_LINES))
        except Refused as error:
            raise _Answer(HTTPStatus.NOT_FOUND, str(error)) from None
        self._send(HTTPStatus.OK, "application/json", encoded({"lines": tail}))

    def _stream(self, feed: Feed) -> None:
        """Send events until the client leaves, stops reading, or the server ends."""
        dashboard = self.server.dashboard
        if not dashboard.streams.acquire(blocking=False):
            raise _Answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{MOST_STREAMS} pages follow runs already; close one")
        try:
            self.close_connection = True
            self._head(HTTPStatus.OK, "text/event-stream")
            for event in feed.stream(dashboard.sleep):
                self.wfile.write(event)  # raises after SLOW_S if the client does not read: nothing waits in memory
        finally:
            dashboard.streams.release()

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self._head(status, kind, len(content))
        self.wfile.write(content)

    def _head(self, status: HTTPStatus, kind: str, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        if length is not None:
            self.send_header("Content-Length", str(length))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()


def _missing() -> Any:
    raise _Answer(HTTPStatus.NOT_FOUND, "there is no such page or run")


def _listed(feed: Feed) -> str:
    actions = ", ".join(feed.source.actions)
    return f"it has {actions}" if actions else "it was started by another launcher, so it has none"
