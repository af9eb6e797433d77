"""The keyed hash with which both ends of a connection prove that they know a token."""

from __future__ import annotations

import hashlib

_KEY_BYTES = hashlib.blake2s.MAX_KEY_SIZE


def keyed_hash(key: bytes, data: bytes) -> bytes:
    """Return the keyed BLAKE2s (RFC 7693) of ``data``, 32 bytes.

    Python computes it itself. HMAC with SHA-256 is OpenSSL's, whose locks a process inherits that is forked while another
    thread holds one: ``benchmarks/scale/processes.py``, which forks workers beside a hub, hung so.
    """
    if len(key) > _KEY_BYTES:
        key = hashlib.blake2s(key).digest()
    return hashlib.blake2s(data, key=key).digest()
