"""A cable that delays, loses, reorders and doubles what is on it: a process that copies frames between two devices.

For kernels without ``netem``. The process runs in the namespace that has both devices::

    python frame_relay.py DEVICE DEVICE SEED

Each line of its standard input holds the :class:`Conditions` of both directions, ``[AWAY, TOWARD]``, or ``[]``, which
changes nothing; it answers each with a line that counts frames, those under any condition as struck. It ends when its standard input is closed, so that it never outlives its parent.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import select
import socket
import sys
import time
from dataclasses import asdict, dataclass, field

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
"""From <linux/if_packet.h>; Python does not name them."""
ETH_P_ALL = 3
LARGEST = 1 << 17
"""Bytes of the largest frame: the kernel splits it into packets only where it leaves the machine."""
BUFFER_BYTES = 32 << 20
QUEUE_S = 1.0
"""Frames that a limited rate would delay for longer are lost, as in the queue of a switch."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What happens to frames in one direction.

    Attributes:
        delay_s: Seconds that each frame takes.
        jitter_s: Seconds up to which a frame takes longer, drawn for each; it does not overtake its predecessors.
        loss: Share of frames that are lost; 1 is silence.
        duplicate: Share of frames that arrive twice.
        reorder: Share of frames that skip the delay, and so overtake others.
        rate: Bytes in a second, 0 for no limit.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    rate: int = 0

    def netem(self) -> list[str]:
        """The same in the words of ``tc qdisc ... netem``; none if nothing happens to frames."""
        words = []
        if self.delay_s or self.jitter_s:
            words += ["delay", f"{self.delay_s * 1e6:.0f}us", f"{self.jitter_s * 1e6:.0f}us"]
        for name, share in (("loss", self.loss), ("duplicate", self.duplicate), ("reorder", self.reorder)):
            if share:
                words += [name, f"{100 * share:g}%"]
        if self.rate:
            words += ["rate", f"{8 * self.rate}bit"]
        return [*words, "limit", "100000"] if words else []


FREE = Conditions()


@dataclass(slots=True)
class Direction:
    """Decides when frames arrive that go in one direction."""

    chance: random.Random
    conditions: Conditions = field(default_factory=Conditions)
    _free_s: float = 0.0
    _last_s: float = 0.0

    def arrivals(self, num_bytes: int, now_s: float) -> list[float]:
        """When a frame of this size arrives: never, once or twice."""
        now, chance = self.conditions, self.chance
        if now.loss and chance.random() < now.loss:
            return []
        sent_s = now_s
        if now.rate:
            sent_s = self._free_s = max(now_s, self._free_s) + num_bytes / now.rate
            if sent_s - now_s > QUEUE_S:
                self._free_s -= num_bytes / now.rate
                return []
        if now.reorder and chance.random() < now.reorder:
            return [sent_s]
        at_s = sent_s + now.delay_s + (chance.random() * now.jitter_s if now.jitter_s else 0.0)
        at_s = self._last_s = max(at_s, self._last_s)
        return [at_s, at_s] if now.duplicate and chance.random() < now.duplicate else [at_s]


class Relay:
    """Copies frames between two sockets until its control is closed."""

    def __init__(self, near: socket.socket, far: socket.socket, control: int, seed: int) -> None:
        self._control = control
        self._ways = {near: (far, Direction(random.Random(seed))), far: (near, Direction(random.Random(seed + 1)))}
        self._directions = [direction for _, direction in self._ways.values()]
        self._waiting: list[tuple[float, int, socket.socket, bytes]] = []
        self._numbers = iter(range(sys.maxsize))
        self._buffer = bytearray(LARGEST)
        self._told = b""
        self.seen = self.sent = self.struck = 0

    def run(self) -> None:
        while True:
            due_s = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            ready, _, _ = select.select([self._control, *self._ways], [], [], due_s)
            self._send_due()
            for source in ready:
                if source == self._control:
                    if not self._obey():
                        return
                else:
                    self._take(source)

    def _obey(self) -> bool:
        data = os.read(self._control, 1 << 16)
        *lines, self._told = (self._told + data).split(b"\n")
        for line in lines:
            for direction, told in zip(self._directions, json.loads(line)):  # noqa: B905
                direction.conditions = Conditions(**told)
            print(json.dumps({"seen": self.seen, "sent": self.sent, "struck": self.struck}), flush=True)
        return bool(data)

    def _take(self, source: socket.socket) -> None:
        """Take all frames that have come from one device."""
        target, direction = self._ways[source]
        for _ in range(64):
            try:
                size = source.recv_into(self._buffer)
            except OSError:  # there are no more, or the device is down
                return
            self.seen += 1
            self.struck += direction.conditions != FREE
            now_s = time.monotonic()
            for at_s in direction.arrivals(size, now_s):
                if at_s <= now_s and not self._waiting:
                    self._send(target, memoryview(self._buffer)[:size])
                else:
                    frame = bytes(memoryview(self._buffer)[:size])
                    heapq.heappush(self._waiting, (at_s, next(self._numbers), target, frame))

    def _send_due(self) -> None:
        now_s = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now_s:
            _, _, target, frame = heapq.heappop(self._waiting)
            self._send(target, frame)

    def _send(self, target: socket.socket, frame: bytes | memoryview) -> None:
        try:
            target.send(frame)
        except OSError:  # its queue is full, or the device is down: the frame is lost, as on any cable
            return
        self.sent += 1


def open_device(name: str) -> socket.socket:
    """A socket for all frames of a device, also for those that the kernel has not yet split into packets."""
    device = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    device.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    device.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for option in (33, 32):  # SO_RCVBUFFORCE, SO_SNDBUFFORCE
        device.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    device.setblocking(False)
    device.bind((name, ETH_P_ALL))
    return device


def words_of(away: Conditions, toward: Conditions) -> str:
    """A line for the standard input of a relay."""
    return json.dumps([asdict(away), asdict(toward)]) + "\n"


if __name__ == "__main__":
    Relay(open_device(sys.argv[1]), open_device(sys.argv[2]), sys.stdin.fileno(), int(sys.argv[3])).run()
