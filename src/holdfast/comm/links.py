"""Small messages between members, over TCP connections that are opened when they are first needed.

A process group of Gloo connects every member with every other one. That is what a recovery among many processes would
mostly consist of, while an agreement on a few integers needs only a few peers of each member. No thread takes part: the
calling thread waits for its sockets and for changes of the membership store at the same time. Connections outlive a
generation. Each message names its own, so what was sent in an earlier one, which a failure has ended, is dropped.

A connection begins with a proof that the process that opened it knows the token of the store: a MAC, whose key follows
from the token and from a name of the accepting process that its peers read in the store. The proof is of use once. The
process that opened the connection sends on it, and so does the other one, unless it has opened one itself at the same
moment. What follows has no MACs, as on the connections of Gloo.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from holdfast.errors import PeerFailed
from holdfast.membership.keyed_hash import keyed_hash

_HEAD = struct.Struct("!IIQQ")
"""Of a message: its generation, its tag, the number of messages sent to this peer before in this generation, and the
number of its bytes."""
_NAME_BYTES = 16
_HELLO = struct.Struct("!16sI32s")
"""Of a connection: random bytes, the rank of the process that opened it, and the MAC of both."""

_LOOK_S = 0.05
"""Longest time between two checks for failures while the store does not change, seconds."""
_CONNECT_S = 0.1
"""Time within which a peer is reached unless something is wrong: meanwhile nothing else is looked at, seconds."""
_MAX_READ = 1 << 16
_WAITING_CONNECTIONS = 1024
_MAX_STRANGERS = 256
"""More connections without an introduction end the oldest one."""
_SIOCGIFADDR = 0x8915


class _Connection:
    """A non-blocking connection with ``rank``, which is -1 until that process has introduced itself."""

    __slots__ = ("incoming", "outgoing", "rank", "socket", "until_s")

    def __init__(self, its_socket: socket.socket, rank: int = -1, until_s: float = 0.0) -> None:
        its_socket.setblocking(False)
        its_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = its_socket
        self.rank = rank
        self.incoming, self.outgoing = bytearray(), bytearray()
        self.until_s = until_s
        """When an attempt to connect, or to introduce itself, has taken too long; 0 once that is done."""


class Links:
    """The connections of this member; see :meth:`begin`.

    Args:
        rank: This member.
        address: The address of this machine at which peers reach it; that of the first interface in
            ``GLOO_SOCKET_IFNAME`` takes precedence.
        wake_fd: Becomes readable when ``check`` has something new to look at; emptied here.
        timeout_s: Time within which a peer must accept a connection, and one that opens a connection introduce itself.
        key_for: Returns the key that follows from a text and from the token, which all members know.
    """

    def __init__(
        self, rank: int, address: str, wake_fd: int, timeout_s: float, key_for: Callable[[str], bytes]
    ) -> None:
        self._rank = rank
        self._generation = 0
        self._timeout_s = timeout_s
        self._wake_fd = wake_fd
        self._host = _interface_address() or address
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._listener = socket.create_server((self._host, 0), family=family, backlog=_WAITING_CONNECTIONS)
        self._listener.setblocking(False)
        self._name = secrets.token_hex(_NAME_BYTES)
        self._key_for = key_for
        self._key = self._key_of(self._name)
        self._used: set[bytes] = set()
        """The random bytes of the connections that members have opened: no proof counts twice."""
        self._peers: dict[int, tuple[str, int, bytes]] = {}
        self._connections: dict[int, _Connection] = {}
        self._way_to: dict[int, _Connection] = {}
        """The connection on which messages to a peer are sent."""
        self._messages: defaultdict[tuple[int, int, int], deque[bytes]] = defaultdict(deque)
        """By generation, rank and tag."""
        self._posted: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._received: defaultdict[tuple[int, int], int] = defaultdict(int)
        """Numbers of messages to and from each peer, by generation and rank."""
        self._gone: dict[int, str] = {}
        """Why a connection with a peer has ended; there may be a second one, see above."""
        self._undelivered: set[int] = set()
        """Peers whose connection has ended before all was sent to them."""
        self._poll = select.epoll()
        for fd in (self._listener.fileno(), wake_fd):
            self._poll.register(fd, select.EPOLLIN)
        _all_links.add(self)

    @property
    def own_address(self) -> str:
        """What peers need to connect to this process, besides the token: host, port and a name, which is no secret."""
        return f"{self._host} {self._listener.getsockname()[1]} {self._name}"

    def _key_of(self, name: str) -> bytes:
        return self._key_for(f"link to {name}")

    @property
    def are_of_one_machine(self) -> bool:
        """Whether all members have the same address."""
        return len({host for host, _, _ in self._peers.values()}) == 1

    def meet(self, addresses: Mapping[int, str]) -> None:
        """Set the :attr:`own_address` of each member."""
        for rank, text in addresses.items():
            host, port, name = text.split(" ")
            self._peers[rank] = host, int(port), self._key_of(name)

    def know(self, members: Iterable[int]) -> bool:
        """Return whether the addresses of all of these have been set."""
        return self._peers.keys() >= set(members)

    def begin(self, generation: int, members: Collection[int]) -> None:
        """Begin a generation: drop messages of earlier ones, and all connections with ranks that are not members."""
        self._generation = generation
        self._handle_all(0)  # the end of a connection that is met only later would count as one in this generation
        self._gone.clear()
        self._undelivered.clear()
        numbered: list[dict[Any, Any]] = [self._messages, self._posted, self._received]
        for by_generation in numbered:
            for key in [key for key in by_generation if key[0] < generation]:
                del by_generation[key]
        for connection in [each for each in self._connections.values() if 0 <= each.rank not in members]:
            self._end(connection, "it is no member")
        self._peers = {rank: peer for rank, peer in self._peers.items() if rank in members}

    def post(self, rank: int, data: bytes, tag: int) -> None:
        """Start to send a message to a peer; more is sent in later calls if the connection cannot take all of it.

        Raises:
            PeerFailed: if a connection with the peer has ended in this generation, or none can be opened.
        """
        if rank in self._gone:  # what was sent may be lost, so nothing may follow it on another connection
            raise self._failed(rank)
        connection = self._way_to.get(rank) or self._open(rank)
        number = self._posted[self._generation, rank]
        self._posted[self._generation, rank] += 1
        connection.outgoing += _HEAD.pack(self._generation, tag, number, len(data)) + data
        self._flush(connection)

    def exchange(
        self, send: Sequence[tuple[int, bytes]], sources: Sequence[int], tag: int, check: Callable[[], None]
    ) -> list[bytes]:
        """Send messages, and return the next message of this tag from each source.

        Args:
            send: Ranks and what to send to them.
            sources: Ranks.
            tag: Separates messages.
            check: Called while this waits; raises if it should not wait any longer.

        Raises:
            PeerFailed: if the connection with one of the peers has ended.
        """
        for rank, data in send:
            self.post(rank, data, tag)
        targets = [rank for rank, _ in send]
        while not (self._are_sent(targets) and self._have_arrived(sources, tag)):
            self._handle_all(_LOOK_S)
            self._end_late()
            check()
        return [self._messages[self._generation, rank, tag].popleft() for rank in sources]

    def close(self) -> None:
        """Close all connections, which ends the waits of peers for this process."""
        for each in self._connections.values():
            _hang_up(each.socket)
        _hang_up(self._listener)
        self._forget()

    def __del__(self) -> None:
        """Close them if the communicator is dropped."""
        if hasattr(self, "_poll"):  # the last thing that the constructor creates
            self.close()

    def _forget(self) -> None:
        """Close all file descriptors of this process; after a fork, in the child: those of the parent stay connected."""
        for each in self._connections.values():
            each.socket.close()
        self._connections.clear()
        self._way_to.clear()
        self._listener.close()
        self._poll.close()

    # -- progress

    def _are_sent(self, ranks: Sequence[int]) -> bool:
        for rank in ranks:
            if rank in self._undelivered:  # a peer may end as soon as it has everything
                raise self._failed(rank)
        return not any(way.outgoing for way in map(self._way_to.get, ranks) if way is not None)

    def _have_arrived(self, ranks: Sequence[int], tag: int) -> bool:
        lacking = [rank for rank in ranks if not self._messages[self._generation, rank, tag]]
        for rank in lacking:
            if rank in self._gone and not self._may_be_connected_with(rank):
                raise self._failed(rank)
        return not lacking

    def _may_be_connected_with(self, rank: int) -> bool:
        return any(each.rank in (rank, -1) for each in self._connections.values())

    def _failed(self, rank: int) -> PeerFailed:
        return PeerFailed(f"the connection with worker {rank} has ended: {self._gone[rank]}")

    def _handle_all(self, longest_s: float) -> None:
        """Wait until something happens on a socket, at most ``longest_s``, and handle it."""
        for fd, events in self._poll.poll(longest_s):
            self._handle(fd, events)

    def _handle(self, fd: int, events: int) -> None:
        if fd == self._wake_fd:
            with contextlib.suppress(BlockingIOError):  # another reader was faster
                os.eventfd_read(fd)
        elif fd == self._listener.fileno():
            self._accept()
        elif connection := self._connections.get(fd):
            if events & select.EPOLLOUT:
                connection.until_s = 0.0
                self._flush(connection)
            if events & ~select.EPOLLOUT:
                self._read(connection)

    def _end_late(self) -> None:
        now_s = time.monotonic()
        for connection in [each for each in self._connections.values() if 0 < each.until_s < now_s]:
            self._end(connection, f"no connection within {self._timeout_s:g} s")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # no more, it has ended already, or this process has no more descriptors
            while True:
                until_s = time.monotonic() + self._timeout_s
                self._add(connection := _Connection(self._listener.accept()[0], until_s=until_s))
                self._read(connection)
                strangers = [each for each in self._connections.values() if each.rank < 0]
                for oldest in strangers[:-_MAX_STRANGERS]:
                    self._end(oldest, "too many strangers")

    def _add(self, connection: _Connection) -> None:
        self._connections[connection.socket.fileno()] = connection
        is_connecting = connection.rank >= 0 and connection.until_s > 0
        self._poll.register(connection.socket, select.EPOLLIN | select.EPOLLOUT * is_connecting)

    def _open(self, rank: int) -> _Connection:
        host, port, key = self._peers[rank]
        its_socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        its_socket.settimeout(_CONNECT_S)
        until_s = 0.0
        try:
            its_socket.connect((host, port))
        except TimeoutError:
            until_s = time.monotonic() + self._timeout_s  # it goes on
        except OSError as error:
            its_socket.close()
            self._gone[rank] = error.strerror or str(error)
            raise self._failed(rank) from error
        connection = self._way_to[rank] = _Connection(its_socket, rank, until_s)
        once = secrets.token_bytes(_NAME_BYTES)
        connection.outgoing += _HELLO.pack(once, self._rank, _proof(key, once, self._rank))
        self._add(connection)
        return connection

    def _flush(self, connection: _Connection) -> None:
        """Send as much as the connection takes; be woken when it takes more."""
        try:
            while connection.outgoing and not connection.until_s:
                del connection.outgoing[: connection.socket.send(connection.outgoing)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(connection, error.strerror or str(error))
            return
        more = bool(connection.outgoing or connection.until_s)
        self._poll.modify(connection.socket, select.EPOLLIN | select.EPOLLOUT * more)

    def _read(self, connection: _Connection) -> None:
        try:
            while data := connection.socket.recv(self._readable(connection)):
                connection.incoming += data
                if connection.rank < 0 and not self._introduce(connection):
                    return
        except BlockingIOError:
            self._split(connection)
        except OSError as error:
            self._split(connection)
            self._end(connection, error.strerror or str(error))
        else:
            self._split(connection)
            self._end(connection, "it was closed there")

    @staticmethod
    def _readable(connection: _Connection) -> int:
        """Return how many bytes to read at once; of a stranger, no more than the introduction."""
        return _MAX_READ if connection.rank >= 0 else _HELLO.size - len(connection.incoming)

    def _split(self, connection: _Connection) -> None:
        """Take the messages that are complete."""
        incoming = connection.incoming
        while connection.rank >= 0 and len(incoming) >= _HEAD.size:
            generation, tag, number, size = _HEAD.unpack_from(incoming)
            if len(incoming) < (end := _HEAD.size + size):
                return
            if generation >= self._generation:
                if number != self._received[generation, connection.rank]:
                    self._end_all_with(connection.rank, "a message is lost")
                    return
                self._received[generation, connection.rank] += 1
                self._messages[generation, connection.rank, tag].append(bytes(incoming[_HEAD.size : end]))
            del incoming[:end]

    def _introduce(self, connection: _Connection) -> bool:
        """Read the beginning of a connection; return whether a member has opened it."""
        if len(connection.incoming) < _HELLO.size:
            return False
        once, rank, proof = _HELLO.unpack_from(connection.incoming)
        if not hmac.compare_digest(proof, _proof(self._key, once, rank)) or once in self._used:
            self._end(connection, "it was opened by a stranger")
            return False
        self._used.add(once)
        del connection.incoming[: _HELLO.size]
        connection.rank, connection.until_s = rank, 0.0
        self._way_to.setdefault(rank, connection)
        return True

    def _end_all_with(self, rank: int, why: str) -> None:
        for connection in [each for each in self._connections.values() if each.rank == rank]:
            self._end(connection, why)

    def _end(self, connection: _Connection, why: str) -> None:
        if self._connections.pop(connection.socket.fileno(), None) is None:
            return
        self._poll.unregister(connection.socket)  # to close it is not enough while a child that was forked has it, too
        _hang_up(connection.socket)
        connection.socket.close()
        rank = connection.rank
        if connection.outgoing:
            self._undelivered.add(rank)
        if self._way_to.get(rank) is connection:
            del self._way_to[rank]
        if rank >= 0:
            self._gone.setdefault(rank, why)


def _proof(key: bytes, once: bytes, rank: int) -> bytes:
    return keyed_hash(key, once + rank.to_bytes(4, "big"))


def _hang_up(its_socket: socket.socket) -> None:
    """End a connection, or stop to listen, also if a forked child still has the socket; what was sent still arrives."""
    with contextlib.suppress(OSError):  # it has ended already
        its_socket.shutdown(socket.SHUT_RDWR)


def _interface_address() -> str:
    """Return the IPv4 address of the first interface in ``GLOO_SOCKET_IFNAME``, "" if there is none."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not names:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        request = struct.pack("256s", names[0].encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
    return ""


_all_links: weakref.WeakSet[Links] = weakref.WeakSet()


def _after_fork() -> None:
    for links in list(_all_links):
        links._forget()


os.register_at_fork(after_in_child=_after_fork)
