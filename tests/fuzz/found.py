"""What fuzzers found once, by parser: inputs that ended in a traceback, or took long. Each must do no harm any more."""

import json

DIGITS = b"9" * 5000
"""More than Python converts to a number."""
NESTED = b"[" * 100_000


def _answer(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


FOUND = {
    "addresses": (b"step-" + DIGITS, b"a:" + DIGITS, "a:\u00b2".encode()),
    "hosts": (b"n\xde0:8", b"a:" + DIGITS, ",".join(f"node{number:03}:8" for number in range(100)).encode()),
    "etcd": (
        _answer("200 OK", b"[]"),
        _answer("200 OK", NESTED),
        _answer("400 Bad Request", b"7"),
        _answer("400 Bad Request", b'{"code": "five"}'),
        b"HTTP/1.1 200 OK\r\nContent-Length: " + DIGITS[:30] + b"\r\n\r\n{}",
    ),
    "environment": (
        b"PET_NNODES=" + DIGITS,
        b"PET_NNODES=2\nPET_NODE_RANK=" + DIGITS,
        b"HOLDFAST_SLICES=auto:" + DIGITS,
    ),
    "report": (
        NESTED,
        b"[]",
        json.dumps({"failures": [], "seed": 0, "slices": 1, "steps_planned": 3, "parameters": 2}).encode(),
    ),
    "stream-state": (
        b"",
        b"{}",
        b'{"array": "00", "dtype": "O", "shape": [1]}',
        b'{"tensor": "00", "dtype": "save", "shape": []}',
        b'{"array": "00", "dtype": "<,i8", "shape": [1]}',
    ),
    "trace": (
        b"\x032024-01-02, 03-04:05, 3\n2024-01-02, 03:05:05,22\n",
        b"\x032024-01-02, 03:04:05, " + DIGITS[:70] + b"\n",
    ),
    "dataset": (
        bytes.fromhex(
            "08506776696549322c312e352c2d392c39390a504b0102140314000038000000b800000000007090000000000000000a0000"
            "00000000000000000080010000000005eb7374657231637376504b0506000000000900010038000000b80000000000"
        ),
    ),
    "injection": (b'{"schema": ' + DIGITS + b"}",),
    "log": (b"time node event\n" + (DIGITS * 3 + b" n failed\n") * 40,),
}
