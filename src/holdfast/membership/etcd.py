"""The store in an etcd cluster, which outlives every launcher; it needs no client library.

All requests go to one member of the cluster, and to the next when it does not answer. The local copy is read once and
then updated by a watch; it includes this client's own writes before :meth:`EtcdStore.put` and the other methods return.
etcd counts no votes, so each client does, in the order of the changes; a decision is created by the first one.

``etcd://USER@HOST:PORT/JOB`` names an etcd user, whose password is the token; without USER, etcd must allow anonymous
access. The connection is not encrypted: use a trusted network.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import queue
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from holdfast.errors import ConfigError, StoreLost
from holdfast.membership import gateway
from holdfast.membership.acts import ActDecision, Tally, vote_key
from holdfast.membership.gateway import (
    EtcdCluster,
    EtcdConnection,
    EtcdRefused,
    EtcdUnavailable,
    decode,
    encode,
    under,
)
from holdfast.membership.store import (
    LEASE_S,
    SilenceTimer,
    Store,
    beat_s,
    best_address,
    check_size,
    patience_s,
    search_s,
)

logger = logging.getLogger(__name__)

SUPPORTED = (3, 5, 6)
"""The first version whose data stay consistent when members crash, with users, too."""
_NAP_S = 0.1
_PAGE = 256


class EtcdStore(Store):
    """A connection to an etcd cluster.

    The store is lost when no member answers for :func:`~holdfast.membership.store.patience_s` of a lease, with several
    members for :func:`~holdfast.membership.store.search_s`: to find that one is dead, and elect a leader, takes etcd seconds.

    Args:
        where: ``[USER@]HOST:PORT[,HOST:PORT...]``.
        token: Password of the user.
        job: Keys are prefixed with ``holdfast/JOB/``.
        lease_s: Duration of leases; etcd may extend them, as during a leader election.

    Raises:
        ConfigError: if an argument is invalid, or etcd refuses access.
        StoreLost: if no member answers.
    """

    def __init__(self, where: str, token: str, job: str, *, lease_s: float = LEASE_S) -> None:
        if not job:
            raise ConfigError(f"the name of the job is missing: etcd://{where}/JOB")
        self._where = where.rpartition("@")[2]
        self._prefix = f"holdfast/{job}/"
        self._lease_s = lease_s
        self._cluster = EtcdCluster(where, token, min(gateway.ANSWER_S, patience_s(lease_s) / 3))
        self._token = token
        self._me, self._numbers = secrets.token_hex(4), itertools.count()
        self._lease = ""
        self._revision = 0
        self._tally = Tally()
        self._votes: dict[str, tuple[str, str]] = {}
        """A vote of each act: its key in etcd, and the revision that created it."""
        self._decisions: queue.SimpleQueue[tuple[ActDecision, tuple[str, str]] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._asking = threading.Lock()
        self._line, self._beat_line, self._watch_line = (EtcdConnection(self._cluster) for _ in range(3))
        super().__init__()  # from here on, a fork closes open sockets
        self._begin()
        self._threads = [
            threading.Thread(target=self._guard, args=[work], name=f"holdfast-etcd-{name}", daemon=True)
            for name, work in (("watch", self._watch), ("beat", self._beat), ("decide", self._decide))
        ]
        for thread in self._threads:
            thread.start()

    def _begin(self) -> None:
        """Read all keys, without retries if the cluster does not answer."""
        for _ in self._cluster.members:
            try:
                self._read_all(self._line)
            except EtcdUnavailable as error:
                why: Exception = error
            except EtcdRefused as error:
                self._line.drop()
                raise ConfigError(
                    f"etcd at {self._where} refuses access: {error}; --rdzv etcd://USER@... names the user, --rdzv-token (HOLDFAST_TOKEN) its password"
                ) from error
            else:
                self._check_version()
                return
        self._line.drop()
        raise StoreLost(f"there is no etcd at {self._where}: {why}") from why

    def _check_version(self) -> None:
        with contextlib.suppress(EtcdRefused, EtcdUnavailable):  # a user may not be allowed to know it
            version = str(self._line.request("maintenance/status", {}).get("version"))
            if () < tuple(map(int, re.findall(r"[0-9]{1,9}", version)[:3])) < SUPPORTED:
                _warn_of_version(self._where, version)

    @property
    def own_address(self) -> str:
        """See :attr:`Store.own_address`; a member on this machine does not show the route to others."""
        return best_address(self._cluster.members)

    def put(self, key: str, value: str, *, leased: bool = False) -> None:
        check_size(key, value)
        answer = self._request("kv/put", self._pair(key, value), leased=leased)
        self._catch_up(answer["header"]["revision"])

    def create(self, key: str, value: str) -> bool:
        check_size(key, value)
        pair = self._pair(key, value)
        body = {
            "compare": [_created_at(pair["key"], "0")],
            "success": [{"request_put": pair}],
            "failure": [{"request_range": {"key": pair["key"]}}],
        }
        answer = self._request("kv/txn", body)
        if answer.get("succeeded"):
            self._catch_up(answer["header"]["revision"])
            return True
        entry = answer["responses"][0]["response_range"]["kvs"][0]
        self._catch_up(entry["mod_revision"])
        return bool(entry["value"] == pair["value"])  # our own value: the answer to the first attempt was lost

    def delete(self, key: str) -> None:
        check_size(key, "")
        path = self._prefix + key
        answer = self._request("kv/deleterange", under(path) if key.endswith("/") else {"key": encode(path)})
        if "deleted" in answer:
            self._catch_up(answer["header"]["revision"])

    def close(self) -> None:
        self._lose("the connection was closed here")
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        with self._asking:
            self._line.drop()

    # -- requests

    def _pair(self, key: str, value: str) -> dict[str, Any]:
        """Return key and value; a tag distinguishes the value from an equal one of another client."""
        tag = f"{self._me}.{next(self._numbers)}"
        return {"key": encode(self._prefix + key), "value": encode(f"{tag} {value}")}

    def _request(self, path: str, body: dict[str, Any], *, leased: bool = False) -> dict[str, Any]:
        """Send a request until a member answers; if an answer is lost, the request may be executed twice."""
        silence = self._new_silence()
        while not self._lost:
            try:
                with self._asking:
                    seen = self._revision
                    answer = self._line.request(path, body | ({"lease": self._take_lease()} if leased else {}))
                if self._has_kept(answer, seen):
                    return answer
            except EtcdUnavailable as error:
                if silence.is_too_long():
                    self._lose(error)
                self._closing.wait(_NAP_S)
            except EtcdRefused as error:
                if error.code != gateway.NOT_FOUND or not self._lease:
                    self._lose(error)
                self._lease = ""  # it has expired
        raise StoreLost(self._lost)

    def _has_kept(self, answer: dict[str, Any], seen: int) -> bool:
        """Return whether etcd still has what this client saw. If not, the store is lost: the watch would wait forever.

        Raises:
            EtcdUnavailable: if the answer does not say.
        """
        try:
            now = int(answer["header"]["revision"])
        except (KeyError, TypeError, ValueError) as error:
            raise EtcdUnavailable("an answer without a revision") from error
        if now >= seen:
            return True
        self._lose(f"it has lost its data: it is at revision {now}, and was at {seen}")
        return False

    def _catch_up(self, revision: str) -> None:
        """Wait until the local copy includes this revision."""
        self.wait(lambda: True if self._revision >= int(revision) else None)

    def _take_lease(self) -> str:
        if not self._lease:
            self._lease = self._line.request("lease/grant", {"TTL": math.ceil(self._lease_s)})["ID"]
        return self._lease

    def _new_silence(self) -> SilenceTimer:
        limit_s = (search_s if len(self._cluster.members) > 1 else patience_s)(self._lease_s)
        return SilenceTimer(limit_s, gateway.CONNECT_S + self._cluster.answer_s)

    def _lose(self, why: object) -> None:
        self._note_lost(f"the connection to etcd at {self._where} is lost: {why}")
        self._closing.set()
        self._decisions.put(None)
        for line in (self._line, self._beat_line, self._watch_line):
            line.wake()

    # -- decisions

    def _count(self, pair: dict[str, Any], value: str | None) -> None:
        """Apply a change: count a vote, or put anything else into the local copy."""
        key = self._key(pair)
        vote = vote_key(key)
        if vote is None:
            self._note(key, value)
        elif value is not None:
            self._votes[vote.act] = pair["key"], pair["create_revision"]
        else:
            self._votes.pop(vote.act, None)
        for decision in self._tally.note(key, value):
            self._decisions.put((decision, self._votes[decision.act]))

    def _decide(self) -> None:
        """Create decisions, in a thread of its own: the one that counts must read on meanwhile."""
        while (item := self._decisions.get()) is not None:
            (key, value, _), vote = item
            if self.get(key) is None:
                pair = self._pair(key, value)
                # Without the vote the act is over: this client has slept, and must not decide it anew.
                conditions = [_created_at(pair["key"], "0"), _created_at(*vote)]
                self._request("kv/txn", {"compare": conditions, "success": [{"request_put": pair}]})

    # -- heartbeat, in a thread

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # any error: otherwise the waiting threads would never wake
            self._lose(f"{error!r:.200}")

    def _beat(self) -> None:
        silence, nap_s = self._new_silence(), beat_s(self._lease_s)
        while not self._closing.wait(nap_s):
            began_s, nap_s = time.monotonic(), beat_s(self._lease_s)
            why = ""
            try:
                self._show_life()
                silence.broken(began_s)  # not the current time: etcd also counts from when it received the request
            except EtcdUnavailable as error:
                nap_s, why = _NAP_S, str(error)
            if silence.is_too_long():
                self._lose(why)
            if self._watch_line.member != self._cluster.member:
                self._watch_line.wake()  # the member that it watches may hang, or be cut off from the majority
        self._beat_line.drop()

    def _show_life(self) -> None:
        """Renew the lease, and check that the member is connected to the majority, which still has what this client saw."""
        if lease := self._lease:
            kept = self._beat_line.request("lease/keepalive", {"ID": lease})
            if "TTL" not in kept.get("result", {}) and self._lease == lease:
                self._lease = ""  # it has expired
        seen = self._revision
        self._has_kept(self._beat_line.request("kv/range", {"key": encode(self._prefix), "count_only": True}), seen)

    # -- local copy, in a thread

    def _read_all(self, line: EtcdConnection) -> None:
        """Replace the local copy by all keys of the store."""
        request: dict[str, Any] = under(self._prefix) | {"limit": _PAGE}
        pairs: list[dict[str, Any]] = []
        while True:
            page = line.request("kv/range", request)
            request.setdefault("revision", page["header"]["revision"])
            pairs += page.get("kvs", ())
            if not page.get("more"):
                break
            request["key"] = encode(decode(page["kvs"][-1]["key"]) + "\0")
        keys = {pair["key"]: self._key(pair) for pair in pairs}
        with self._changed:
            for gone in self._items.keys() - keys.values():
                self._note(gone, None)
            self._tally, self._votes = Tally(), {}
            # Votes come last: a decision follows from what else there is.
            for pair in sorted(pairs, key=lambda pair: vote_key(keys[pair["key"]]) is not None):
                self._count(pair, _value(pair))
            self._advance(request["revision"])

    def _watch(self) -> None:
        silence, line = self._new_silence(), self._watch_line
        while not self._closing.is_set():
            wish = under(self._prefix) | {"start_revision": str(self._revision + 1), "fragment": True}
            why = "it ended the watch"
            try:
                for result in line.stream("watch", {"create_request": wish}):
                    silence.broken(time.monotonic())
                    if self._lost or not self._take(result):
                        break
            except (EtcdUnavailable, EtcdRefused, ValueError, KeyError) as error:
                why = str(error)
            line.drop()
            if silence.is_too_long():
                self._lose(why)
            self._cluster.give_up(line.member)
            self._closing.wait(_NAP_S)

    def _take(self, result: dict[str, Any]) -> bool:
        """Apply a result to the local copy; return whether the watch continues."""
        if result.get("canceled"):
            if "compact_revision" not in result:
                self._cluster.log_out()
                raise EtcdUnavailable(str(result.get("cancel_reason")))
            self._read_all(line := EtcdConnection(self._cluster))  # the missed changes are no longer available
            line.drop()
            return False
        with self._changed:
            for event in result.get("events", ()):
                self._count(event["kv"], None if event.get("type") == "DELETE" else _value(event["kv"]))
            if "events" in result and not result.get("fragment"):
                self._advance(result["events"][-1]["kv"]["mod_revision"])
        return True

    def _advance(self, revision: str) -> None:
        self._revision = max(self._revision, int(revision))
        self._wake()

    def _key(self, pair: dict[str, Any]) -> str:
        return decode(pair["key"]).removeprefix(self._prefix)

    def _sockets(self) -> list[socket.socket]:
        return [*self._line.sockets, *self._beat_line.sockets, *self._watch_line.sockets]

    def _forget(self) -> None:
        super()._forget()
        self._asking = threading.Lock()
        self._closing = threading.Event()


@functools.cache  # once in a process, however many stores it opens
def _warn_of_version(where: str, version: str) -> None:
    oldest = ".".join(map(str, SUPPORTED))
    logger.warning(
        "etcd at %s has version %s: versions before %s may lose or corrupt data; upgrade it", where, version, oldest
    )


def _created_at(key: str, revision: str) -> dict[str, str]:
    """Return the condition that a key exists since this revision; "0": that it does not exist."""
    return {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": revision}


def _value(pair: dict[str, Any]) -> str:
    return decode(pair.get("value", "")).partition(" ")[2]
