"""The server of the dashboard: what it refuses, and that nothing secret leaves it."""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
import threading
import time
from contextlib import contextmanager

import pytest
from some_records import some

from holdfast.errors import ConfigError
from holdfast.observe.monitor import server as of_server
from holdfast.observe.monitor.feed import Feed, Refused, run_id
from holdfast.observe.monitor.log_lines import last_lines
from holdfast.observe.monitor.server import MOST_STREAMS, DashboardServer, is_loopback
from holdfast.observe.monitor.token import NAME, Token
from holdfast.observe.monitor.view import LiveState, RunInfo
from holdfast.records.types import StepCommitted

BAD = "<script>alert('&\")</script>"


class Source:
    """A run with one action."""

    actions = ("kill",)

    def __init__(self, folder):
        self.live = LiveState(RunInfo(id="run", script=BAD, started=range(2), is_live=True))
        self.folder, self.done = folder, []

    def now_s(self):
        return 5.0

    def log(self, rank, lines):
        return last_lines(self.folder / f"rank-{rank}.log", lines)

    def act(self, action, values):
        if values.get("rank") == 99:
            raise Refused("no worker 99 is alive")
        self.done.append((action, dict(values)))
        return "killed"


@contextmanager
def serving(folder, host="127.0.0.1", source=None):
    server = DashboardServer(host, 0, Token.in_folder(folder))
    server.source = source or Source(folder)
    server.feeds["run"] = Feed(server.source)
    try:
        yield server
    finally:
        server.close()


def ask(server, path, method="GET", body=None, **headers):
    """Return status, headers and text; ``token=True`` sends the token."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    if headers.pop("token", False):
        headers["Authorization"] = "Bearer " + server.token._text
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None:
        named.setdefault("Content-Type", "application/json")
    try:
        connection.request(method, path, body if body is None or isinstance(body, str) else json.dumps(body), named)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def act(server, body=None, path="/api/runs/run/actions", **headers):
    return ask(server, path, "POST", {"action": "kill", "rank": 1} if body is None else body, **headers)


def test_the_page_and_the_data_are_served(tmp_path):
    with serving(tmp_path) as server:
        status, headers, text = ask(server, "/")
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert "<script" in text
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"

        (listed,) = json.loads(ask(server, "/api/runs")[2])
        assert listed["id"] == "run"
        assert json.loads(ask(server, "/api/runs/run")[2])["run"]["actions"] == ["kill"]
        assert act(server, token=True)[::2] == (200, '{"said":"killed"}')
        assert server.source.done == [("kill", {"rank": 1})]


@pytest.mark.parametrize("header", [None, "", "Bearer ", "Bearer wrong", "Basic {token}", "{token}", "Bearer {token}x"])
def test_no_action_without_the_token(tmp_path, header):
    with serving(tmp_path) as server:
        named = {} if header is None else {"Authorization": header.format(token=server.token._text)}

        status, _, text = act(server, **named)

        assert status == 401
        assert "open the URL that the launcher printed" in text
        assert act(server, path=f"/api/runs/run/actions?token={server.token._text}")[0] == 401  # it would be in logs
        assert server.source.done == []


@pytest.mark.parametrize(
    "host", ["evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", "8.8.8.8", "", "[::1", "a@b:c"]
)
def test_a_strange_host_is_refused(tmp_path, host):
    with serving(tmp_path) as server:
        assert ask(server, "/api/runs", Host=host)[0] == 403
        assert ask(server, "/", Host=host)[0] == 403
        assert act(server, token=True, Host=host)[0] == 403
        assert server.source.done == []


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9000", "[::1]:1"])
def test_this_machine_by_any_of_its_names_and_behind_a_forwarded_port_is_not_refused(tmp_path, host):
    with serving(tmp_path) as server:
        assert ask(server, "/api/runs", Host=host)[0] == 200
        assert act(server, token=True, Host=host, Origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1", "http://localhost:1", "file://"])
def test_a_strange_origin_is_refused(tmp_path, origin):
    with serving(tmp_path) as server:
        assert act(server, token=True, Origin=origin)[0] == 403
        assert ask(server, "/api/runs", Origin=origin)[0] == 403
        assert act(server, token=True, Sec_Fetch_Site="cross-site")[0] == 403
        assert ask(server, "/?token=x", Sec_Fetch_Site="cross-site")[0] == 200  # a link to the page
        assert server.source.done == []


def test_beyond_loopback_reading_needs_the_token(tmp_path):
    (tmp_path / "rank-0.log").write_text("line\n")
    with serving(tmp_path, "0.0.0.0") as server:  # noqa: S104 - that is what is tested
        for path in ("/api/runs", "/api/runs/run", "/api/runs/run/stream", "/api/runs/run/log?rank=0"):
            assert ask(server, path)[0] == 401, path
        assert ask(server, "/")[0] == 200
        assert ask(server, "/api/runs", token=True)[0] == 200
        assert ask(server, "/api/runs/run/log?rank=0", token=True)[2] == '{"lines":["line"]}'
        assert ask(server, "/api/runs", token=True, Host="10.1.2.3:80")[0] == 200  # an address leads nowhere else
        assert ask(server, "/api/runs", token=True, Host="evil.example")[0] == 403


@pytest.mark.parametrize(
    "path",
    [
        "/../token.py", "/..%2ftoken.py", "/%2e%2e/view.py", "//etc/passwd", "/page/../../view.py", "/api/../token.py",
        "/api/runs/../../../etc/passwd", "/api/runs/run/log?rank=../../etc/passwd", "/api/runs/run/log?rank=-1",
        "/api/runs/run/log?rank=0&lines=x", f"/{NAME}", "/api/runs/run/log?rank=%00", "/api", "/api/runs/other",
        "/index.html/../app.js/../../token.py", "/api/runs/run/log?rank=7",
    ],
)  # fmt: skip
def test_no_path_leads_out_of_the_page(tmp_path, path):
    with serving(tmp_path) as server:
        status, _, text = ask(server, path)

        assert status in (400, 404)
        assert set(json.loads(text)) == {"error"}


def test_a_log_that_is_a_link_or_a_pipe_is_not_read(tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "rank-0.log").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "rank-1.log")
    with serving(tmp_path) as server:
        assert [ask(server, f"/api/runs/run/log?rank={rank}")[0] for rank in (0, 1)] == [404, 404]


def test_the_last_lines_of_a_log(tmp_path):
    (tmp_path / "rank-0.log").write_text("".join(f"line {n}\n" for n in range(100_000)) + "half")
    found = last_lines(tmp_path / "rank-0.log", 3)

    assert found == ["line 99998", "line 99999", "half"]
    assert len(last_lines(tmp_path / "rank-0.log", 10**9)) < 30_000


def test_html_in_names_is_json_text_that_no_browser_takes_for_html(tmp_path):
    with serving(tmp_path) as server:
        server.source.live.take([some(StepCommitted, t_s=1.0, metrics={BAD: 1.0, "b": 2.0})])
        _, headers, text = ask(server, "/api/runs/run")

        assert headers["Content-Type"] == "application/json"
        told = json.loads(text)
        assert (told["run"]["script"], told["series"][0]["id"]) == (BAD, BAD)
        assert BAD not in ask(server, "/")[2]


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        ("{", "application/json", 400), ("[1]", "application/json", 400), ("[" * 4000, "application/json", 400),
        ({"action": "format"}, "application/json", 409), ({"rank": 1}, "application/json", 409),
        ({"action": ["kill"]}, "application/json", 409), ({"action": "kill", "rank": 99}, "application/json", 409),
        ({"action": "kill"}, "text/plain", 415), ("x" * 5000, "application/json", 413),
    ],
)  # fmt: skip
def test_a_wrong_action_is_refused_in_one_line(tmp_path, body, kind, status):
    with serving(tmp_path) as server:
        found, _, text = act(server, body, token=True, Content_Type=kind)

        assert found == status
        assert "\n" not in json.loads(text)["error"]
        assert server.source.done == []
        assert ask(server, "/api/runs")[0] == 200


def test_the_token_is_in_a_file_of_its_owner_and_is_used_again(tmp_path):
    token = Token.in_folder(tmp_path)
    path = tmp_path / NAME

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(token._text) >= 32
    assert Token.in_folder(tmp_path)._text == token._text  # a launcher that starts again after it died
    assert token._text not in repr(token)
    token.remove()
    assert not path.exists()
    assert Token.in_folder(tmp_path)._text != token._text


def test_a_token_that_others_can_read_or_that_is_none_is_refused(tmp_path):
    path = tmp_path / NAME
    path.write_text("x" * 40)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="other users can read"):
        Token.in_folder(tmp_path)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(ConfigError, match="holds no token"):
        Token.in_folder(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be used"):
        Token.in_folder(tmp_path)


def test_a_stream_begins_with_everything_and_goes_on_with_changes(tmp_path):
    with serving(tmp_path) as server, socket.create_connection(("127.0.0.1", server.port), timeout=10) as reader:
        reader.sendall(b"GET /api/runs/run/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        lines = reader.makefile("rb")
        events = (line for line in lines if line.startswith((b"event", b"data")))
        assert next(events) == b"event: full\n"
        assert json.loads(next(events).removeprefix(b"data: "))["progress"]["step"] == 0

        server.source.live.take([some(StepCommitted, t_s=1.0, step=4, metrics={"loss": 1.0})])
        assert next(events) == b"event: change\n"
        assert json.loads(next(events).removeprefix(b"data: "))["progress"]["step"] == 5

        server.source.live.close(9.0)
        threading.Thread(target=server.close).start()
        ends = [json.loads(line.removeprefix(b"data: ")) for line in events if line.startswith(b"data")]
        assert ends[-1]["run"]["ended"]


def test_a_reader_that_stops_reading_is_dropped_and_holds_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(of_server._Handler, "timeout", 0.3)
    monkeypatch.setattr("holdfast.observe.monitor.feed.CHANGE_S", 0.001)
    with serving(tmp_path) as server, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", server.port))
        reader.sendall(b"GET /api/runs/run/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        big = {f"metric {n} {'x' * 5000}": 1.0 for n in range(16)}
        ends_s, step = time.monotonic() + 20, 0
        while (step < 5 or server._server.open_threads()) and time.monotonic() < ends_s:
            server.source.live.take([some(StepCommitted, t_s=2.0 * step, step=step, metrics=big)])
            step += 1
            time.sleep(0.005)

        assert server._server.open_threads() == []
        assert ask(server, "/api/runs")[0] == 200


def test_only_so_many_streams(tmp_path):
    with serving(tmp_path) as server:
        readers = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(MOST_STREAMS)]
        for reader in readers:
            reader.sendall(b"GET /api/runs/run/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert reader.recv(15) == b"HTTP/1.1 200 OK"
        assert ask(server, "/api/runs/run/stream")[0] == 503
        assert ask(server, "/api/runs")[0] == 200
        for reader in readers:
            reader.close()


def test_a_port_in_use_is_refused_in_one_line(tmp_path):
    with serving(tmp_path) as server, pytest.raises(ConfigError, match=f"--dashboard 127.0.0.1:{server.port} cannot"):
        DashboardServer("127.0.0.1", server.port, server.token)


def test_a_host_without_an_encoding_is_refused_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"--dashboard a\.\.b:1 cannot be opened") as refused:
        DashboardServer("a..b", 1, Token.in_folder(tmp_path))
    assert "\n" not in str(refused.value)


def test_the_full_name_of_this_machine_is_looked_up_only_for_a_request_that_uses_it(tmp_path, monkeypatch):
    looked_up = []
    monkeypatch.setattr(socket, "getfqdn", lambda: looked_up.append(0) or "Node-1.example")
    of_server._full_name.cache_clear()
    try:
        with serving(tmp_path, "0.0.0.0") as server:  # noqa: S104 - that is what is tested
            assert ask(server, "/api/runs", token=True)[0] == 200
            assert looked_up == []
            assert ask(server, "/api/runs", token=True, Host=f"node-1.example:{server.port}")[0] == 200
            assert ask(server, "/api/runs", token=True, Host="node-1.evil.example")[0] == 403
        assert looked_up == [0]
    finally:
        of_server._full_name.cache_clear()


def test_a_connection_for_which_no_thread_can_start_is_closed_and_counts_no_longer(tmp_path, monkeypatch):
    def fail(self):
        raise RuntimeError("can't start new thread")

    with serving(tmp_path) as server:
        free = server._server._free._value
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            with pytest.raises((OSError, http.client.HTTPException)):
                ask(server, "/api/runs")
        assert server._server._free._value == free
        assert ask(server, "/api/runs")[0] == 200


def test_names_of_runs_are_safe_in_an_address():
    taken = {}
    for name in ("out", "out", "../../etc", "a b<c>", "", "."):
        taken[run_id(name, taken)] = None

    assert list(taken) == ["out", "out-2", "etc", "a-b-c", "run", "run-2"]


def test_what_is_this_machine():
    hosts = ("127.0.0.1", "127.8.0.1", "::1", "localhost", "0.0.0.0", "node-1")  # noqa: S104
    assert list(filter(is_loopback, hosts)) == ["127.0.0.1", "127.8.0.1", "::1", "localhost"]


def test_a_path_without_a_slash_is_answered_like_any_other_that_is_not_there(tmp_path):
    with serving(tmp_path) as server, socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(b"GET nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 404 ")
