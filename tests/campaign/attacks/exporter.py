"""Clients of the port at which the launcher serves metrics: silent, slow, or with other words than HTTP's."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import random
import re
import socket
import struct
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import replace

from campaign.attacks.base import End, Found, Kind, Launch, Running, moment
from campaign.plan import Attack, Job

REQUEST = b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n"
SAYS = {"silent": b"", "half": REQUEST[:-2], "garbage": bytes(range(256)) * 64, "unread": REQUEST, "reset": REQUEST}
"""What a client sends; none reads an answer."""
CLIENTS = (1, 20, 60)
ANSWERS_S = 20.0
_PORT = re.compile(rb"metrics at http://127\.0\.0\.1:(\d+)/metrics")


class BadClients(Kind):
    """Connections to the exporter that are of no use; the job goes on, and others get their metrics."""

    name = "exporter"
    weight = 0.7
    takes = frozenset(("nodes",))

    def missing(self) -> str:
        is_there = importlib.util.find_spec("prometheus_client") is not None
        return "" if is_there else "the package prometheus_client is not installed"

    def draw(self, rng: random.Random, job: Job) -> Attack:
        values = {
            "says": rng.choice(sorted(SAYS)),
            "clients": rng.choice(CLIENTS),
            "lasts_s": rng.choice((0, 0.3, 2.0)),
        }
        return Attack(self.name, values=values, **moment(rng))

    def end(self, attack: Attack, job: Job) -> End:
        return End.SURVIVES

    def prepare(self, attack: Attack, launch: Launch) -> None:
        if "--metrics-port" not in launch.options:
            launch.options += ["--metrics-port", "0"]

    def strike(self, attack: Attack, running: Running) -> bool:
        while (port := _port_of(running)) is None:
            if not running.sleep(0.01):
                return False
        values = attack.values
        with contextlib.ExitStack() as ends:
            try:
                for _ in range(values["clients"]):
                    ends.enter_context(_client(port, values["says"]))
            except OSError:  # the job has just ended, or is too busy to accept them all
                running.notes.append("not all clients reached the exporter")
            running.notes.append(f"{values['clients']} clients of the exporter: {values['says']}")
            if values["lasts_s"]:
                running.sleep(values["lasts_s"])
            else:
                while running.sleep(1.0):
                    _scrape(port, running)
            _scrape(port, running)
        return True

    def simpler(self, attack: Attack) -> Iterable[Attack]:
        if attack.values["clients"] > 1:
            yield replace(attack, values={**attack.values, "clients": 1})


def _port_of(running: Running) -> int | None:
    """The port that the launcher printed, None if it has not yet."""
    output = running.launch.folder / f"{running.launch.report.name}.output"
    found = _PORT.search(output.read_bytes())
    return int(found[1]) if found else None


@contextlib.contextmanager
def _client(port: int, says: str) -> Iterator[None]:
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWERS_S) as client:
        if says == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(ConnectionError):
            client.sendall(SAYS[says])
        yield


def _scrape(port: int, running: Running) -> None:
    """Read the metrics, as Prometheus does."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=ANSWERS_S) as answer:
            said = answer.read()
    except (OSError, http.client.HTTPException) as error:
        if running.sleep(1.0):  # else the job has ended meanwhile
            raise Found("hang", f"the exporter does not answer: {error}") from None
    else:
        if b"holdfast_" not in said:
            raise Found("false success", f"the exporter answered {said[:200]!r}")


KINDS: tuple[Kind, ...] = (BadClients(),)
