"""How both ends of a connection prove that they know the token, and how each line is authenticated after that.

The token is a key and is never sent. All lines of the handshake are JSON, as in :mod:`holdfast.membership.wire`:

=======  ======================================================================
client   ``{"hello": 4, "nonce": ...}``: 16 random bytes in hexadecimal digits
hub      ``{"nonce": ...}``: its own ones
client   ``{"proof": ...}``: a MAC of both nonces
hub      ``{"proof": ...}``: another one
=======  ======================================================================

The client proves it first, so that a stranger who connects gets nothing to guess tokens with. Each line that follows
begins with its MAC. Its key depends on both nonces and on the direction, and the MAC covers the number of the line: a
line that was changed, repeated, left out or moved ends the connection. All MACs are keyed BLAKE2s.
"""

from __future__ import annotations

import hmac
import re
import secrets
from typing import Any

from holdfast.membership.keyed_hash import keyed_hash
from holdfast.membership.wire import HELLO, dump, parse

_NONCE_BYTES = 16
_NONCE = re.compile(rf"[0-9a-f]{{{2 * _NONCE_BYTES}}}")
_MAC_BYTES = 16
"""Of the 32 bytes of a MAC, as many as these begin a line."""
MAC_DIGITS = 2 * _MAC_BYTES

WRONG_TOKEN = "a wrong token"  # noqa: S105
"""Why a hub refuses a client that cannot prove that it knows the token."""
_OTHER_VERSION = "an unknown greeting"
"""Why a hub of any version refuses a client of another one."""


class HandshakeRefused(ConnectionError):
    """The two ends of a connection do not belong together; the message continues "the store at ADDRESS"."""


class LineAuthenticator:
    """The keys of one connection: proofs for both ends, and the MACs of their lines.

    Args:
        token: Token that both ends must know.
        nonces: That of the client, and that of the hub, in hexadecimal digits.
        is_client: Which of them this end is.
    """

    def __init__(self, token: str, nonces: tuple[str, str], *, is_client: bool) -> None:
        secret = token.encode("utf-8", "surrogatepass")
        both = b"".join(bytes.fromhex(nonce) for nonce in nonces)
        keys = [
            keyed_hash(secret, purpose + both) for purpose in (b"proof of client", b"proof of hub", b"client", b"hub")
        ]
        own_index, other_index = (0, 1) if is_client else (1, 0)
        self.proof = keys[own_index].hex()
        """What proves to the other end that this one knows the token."""
        self._other_proof = keys[other_index].hex()
        self._send_key, self._receive_key = keys[2 + own_index], keys[2 + other_index]
        self._sent = self._received = 0

    def is_proof(self, proof: object) -> bool:
        """Return whether the other end knows the token."""
        return type(proof) is str and hmac.compare_digest(proof.encode("utf-8", "replace"), self._other_proof.encode())

    def sign(self, line: bytes) -> bytes:
        """Return a line with its MAC in front; it must be the next one that is sent."""
        mac = keyed_hash(self._send_key, self._sent.to_bytes(8, "big") + line[:-1])[:_MAC_BYTES]
        self._sent += 1
        return mac.hex().encode() + line

    def verify(self, line: bytes) -> bytes:
        """Return the next received line without its MAC; raise ``ValueError`` if the MAC is wrong."""
        mac = keyed_hash(self._receive_key, self._received.to_bytes(8, "big") + line[MAC_DIGITS:])[:_MAC_BYTES]
        if not hmac.compare_digest(mac.hex().encode(), line[:MAC_DIGITS]):
            raise ValueError("a line was changed, repeated or left out on its way, or was inserted by another program")
        self._received += 1
        return line[MAC_DIGITS:]


def new_nonce() -> str:
    """Return a nonce for one handshake."""
    return secrets.token_hex(_NONCE_BYTES)


def check_greeting(greeting: dict[str, Any]) -> None:
    """Raise :class:`HandshakeRefused` if this is not the first line of a client of this version."""
    version = greeting.get("hello")
    if version != HELLO:
        detail = (
            f"protocol {version}, here {HELLO}: another version of Holdfast" if type(version) is int else "no client"
        )
        raise HandshakeRefused(f"{_OTHER_VERSION} ({detail})")
    if not is_nonce(greeting.get("nonce")):
        raise HandshakeRefused(_OTHER_VERSION)


def is_nonce(text: object) -> bool:
    """Return whether this is a nonce of the other end."""
    return type(text) is str and _NONCE.fullmatch(text) is not None


class ClientHandshake:
    """The client's half of a handshake; it only says what to send, and reads lines.

    Args:
        token: Token of the hub.
        hello: What to say in the first line with a MAC.
    """

    def __init__(self, token: str, hello: dict[str, Any]) -> None:
        self._token, self._hello = token, hello
        self._nonce = new_nonce()
        self.greeting = dump({"hello": HELLO, "nonce": self._nonce})
        """The first line."""
        self._keys: LineAuthenticator | None = None
        self.done: LineAuthenticator | None = None
        """Authenticates all further lines; None until the hub has proved that it knows the token."""

    def take(self, line: bytes) -> bytes:
        """Take a line of the hub, and return what to send next.

        Raises:
            HandshakeRefused: if the hub refuses this client, or does not know the token.
            ValueError: if this is not a line of a handshake.
        """
        message = parse(line)
        if "refused" in message:
            raise HandshakeRefused(_explain(str(message["refused"])))
        if self._keys is None:
            if not is_nonce(message.get("nonce")):
                raise HandshakeRefused(f"{_NOT_A_HUB} of protocol {HELLO}; {_SAME_VERSION}")
            self._keys = LineAuthenticator(self._token, (self._nonce, message["nonce"]), is_client=True)
            return dump({"proof": self._keys.proof}) + self._keys.sign(dump(self._hello))
        if not self._keys.is_proof(message.get("proof")):
            raise HandshakeRefused("has not proved that it knows the token: another program may be listening there")
        self.done = self._keys
        return b""


_NOT_A_HUB = "does not answer like a launcher of Holdfast"
_SAME_VERSION = "all nodes need the same version of Holdfast"


def _explain(refusal: str) -> str:
    """Return the rest of a sentence about a refusal before the handshake is over."""
    if refusal.startswith(_OTHER_VERSION):
        return f"belongs to another version of Holdfast than this one, whose protocol is {HELLO}: {_SAME_VERSION}"
    return f"refused the connection for {refusal:.200}: --rdzv-token (HOLDFAST_TOKEN) must be the token of its launcher"
