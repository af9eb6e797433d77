"""Parsers of files that Holdfast writes and others may give: checkpoints, reports, plans, scenarios."""

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import xxhash

from fuzz.base import Parser, folder
from holdfast.checkpoint import manifest
from holdfast.checkpoint.format import unflatten
from holdfast.data.stream_state import decode_state, encode_state
from holdfast.errors import CheckpointError, ConfigError
from holdfast.faults.plan import Fault, FaultPlan
from holdfast.observe.monitor.followed import FollowedFolder
from holdfast.records.encoding import record_to_dict
from holdfast.records.files import load_events, parse_record
from holdfast.records.types import StepCommitted, WorkerEnded
from holdfast.summary.build import SCHEMA
from holdfast.summary.files import load_report
from holdfast.tools.against import read_losses
from holdfast.tools.formats.safetensors import read_header
from holdfast_lab.inject.files import replay
from holdfast_lab.simulate import (
    schema,  # noqa: F401 - so that it is instrumented
    toml,
)
from holdfast_lab.simulate.measured import read_measured

SCENARIOS = Path(__file__).parents[2] / "examples" / "scenarios"


def read_manifest(data: bytes) -> bool:
    """A manifest without its last line, the digest, which is appended: without a right one nothing is looked into."""
    with contextlib.suppress(CheckpointError):
        manifest.parse(data)
    text = data + b",\n"
    with contextlib.suppress(CheckpointError):
        manifest.parse(text + b'"xxh3": "' + xxhash.xxh3_64_hexdigest(text).encode() + b'"\n}\n')
        return True
    return False


def read_safetensors(data: bytes) -> bool:
    """The header of a ``.safetensors`` file, with its length in front."""
    path = folder() / "tensors.safetensors"
    is_read = False
    for whole in (data, *(len(data).to_bytes(8, "little") + data + bytes(values) for values in (0, 2, 24))):
        path.write_bytes(whole)
        with contextlib.suppress(CheckpointError, ConfigError):
            read_header(path, io.BytesIO(whole))
            is_read = True
    return is_read


def read_fault_plan(data: bytes) -> bool:
    """A fault plan."""
    with contextlib.suppress(ConfigError):
        FaultPlan.from_json(data.decode("utf-8", "surrogateescape"))
        return True
    return False


def read_scenario(data: bytes) -> bool:
    """A scenario of the simulator."""
    path = folder() / "scenario.toml"
    path.write_bytes(data)
    if not (outages := folder() / "outages.csv").exists():
        outages.write_bytes((SCENARIOS / "outages.csv").read_bytes())
    with contextlib.suppress(ConfigError):
        toml.read_scenario(path)
        return True
    return False


def read_events(data: bytes) -> bool:
    """``events.jsonl`` of a report folder, and the records of a worker."""
    for line in data.splitlines():
        parse_record(line)
    (folder() / "events.jsonl").write_bytes(data)
    with contextlib.suppress(ConfigError):
        return bool(load_events(folder()))
    return False


def read_report(data: bytes) -> bool:
    """``report.json`` of a report folder, with two records beside it; what was checked is found, or refused in one line."""
    directory = folder() / "report"
    directory.mkdir(exist_ok=True)
    (directory / "report.json").write_bytes(data)
    (directory / "events.jsonl").write_bytes(EVENTS)
    FollowedFolder(directory, "run")
    readers: tuple[Callable[[Path], object], ...] = (read_losses, read_measured, load_report)
    is_read = False
    for read in readers:
        with contextlib.suppress(ConfigError):
            read(directory)
            is_read = True
    return is_read


def read_skeleton(data: bytes) -> bool:
    """The part of a manifest that says how a state is made of its tensors."""
    with contextlib.suppress(CheckpointError, ValueError, RecursionError):
        skeleton = json.loads(data)
        with contextlib.suppress(CheckpointError):
            unflatten({"w": torch.ones(2)}, skeleton)
            return True
    return False


def read_stream_state(data: bytes) -> bool:
    """Where a dataset that is a stream was, as a checkpoint has it."""
    with contextlib.suppress(CheckpointError):
        decode_state(data.decode("utf-8", "replace"))
        return True
    return False


def read_injection(data: bytes) -> bool:
    """A record of flipped bits, to be applied again."""
    with contextlib.suppress(ConfigError):
        replay.parse_record(data.decode("utf-8", "replace"))
        return True
    return False


RECORDS = (
    StepCommitted(t_s=1.5, rank=0, step=3, epoch=0, samples=16, workers=2, metrics={"loss": 0.5}),
    WorkerEnded(t_s=2.5, rank=1, step=3, exit_code=-9, pid=4711),
)
EVENTS = b"".join(json.dumps(record_to_dict(record)).encode() + b"\n" for record in RECORDS)
REPORT = {
    "schema": SCHEMA,
    "outcome": "done",
    "wall_s": 9.5,
    "steps": 3,
    "step_s": {"p50": 0.25, "p99": 0.5},
    "restarts": 0,
    "workers": {"started": 2, "ranks_started": [0, 1], "ranks_spare": []},
    "failures": [],
    "samples": {},
    "replicas": {},
    "metrics": {},
    "job": {"script": "train.py", "settings": {"guard": "off"}},
}
PARSERS = {
    "manifest": Parser(
        read_manifest,
        (
            b'{\n"schema": 2,\n"step": 3,\n"generation": 0,\n"format": "safetensors",\n"folder": "data-6ef27ff0",\n'
            b'"files": {"part-00000.safetensors": {"bytes": 176, "rest_xxh3": "3607741f69a0b632"}},\n"versions": '
            b'{"holdfast": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7"},\n"info": {},\n"tensors": {"w": {"dtype": '
            b'"float32", "shape": [4, 3], "pieces": [{"file": "part-00000.safetensors", "offset": 128, "start": [0, 0], '
            b'"shape": [4, 3], "bytes": 48, "blocks": ["8c8a0567fe99b74a"]}]}},\n"skeleton": {"dict": [["w", {"tensor": '
            b'"w"}], ["n", 5]]}',
        ),
    ),
    "safetensors": Parser(
        read_safetensors,
        (
            b'{"__metadata__":{"step":"3"},"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}',
            b'{"w":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}}',
        ),
    ),
    "fault-plan": Parser(
        read_fault_plan,
        (
            FaultPlan((Fault("kill", 1, 20, "allreduce", 2), Fault("kill", 3, 20)), 7).to_json().encode(),
            b'{"seed": 0, "faults": [], "fired": []}',
        ),
    ),
    "scenario": Parser(
        read_scenario, tuple((SCENARIOS / name).read_bytes() for name in ("llama.toml", "spot.toml", "trace.toml"))
    ),
    "events": Parser(read_events, (EVENTS,)),
    "report": Parser(read_report, (json.dumps(REPORT).encode(),)),
    "skeleton": Parser(
        read_skeleton,
        (
            b'{"dict": [["w", {"tensor": "w"}], ["n", 5], ["x", {"float": "3ff8000000000000"}], ["t", {"tuple": [null]}]]}',
        ),
    ),
    "stream-state": Parser(
        read_stream_state,
        tuple(
            str(encode_state(state)).encode()
            for state in (
                {"at": 3, "seen": (1, b"x"), "order": np.arange(3), "last": np.float32(2.5)},
                [torch.arange(4.0).reshape(2, 2), torch.ones(0)],
            )
        ),
    ),
    "injection": Parser(
        read_injection,
        (
            b'{"schema": 1, "scale": null, "places": [{"path": "w", "dtype": "float32", "shape": [4]}], "flips": '
            b'[{"path": "w", "index": 1, "bit": 30, "before": 0.5, "after": 1.7014118346046923e+38}]}',
        ),
    ),
}
