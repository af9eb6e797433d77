"""Parsers of texts that a scheduler, a list or a request of another program sets."""

import contextlib
import itertools

from fuzz.base import Parser, folder
from holdfast.base.options import request_in
from holdfast.base.slurm import first_host, hosts
from holdfast.checkpoint.storage import is_remote, step_of
from holdfast.comm.launchers import launched_group, sole_process
from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.launch.control import check_values
from holdfast.launch.fleet.hostlist import parse_hosts
from holdfast.launch.fleet.rendezvous import split_place
from holdfast.launch.schedulers import read_scheduler
from holdfast.membership import client
from holdfast.membership.gateway import EtcdCluster


def read_hosts(data: bytes) -> bool:
    """A list of hosts, as a text and as a file."""
    path = folder() / "hosts"
    path.write_bytes(data)
    is_read = False
    for text in (data.decode("utf-8", "surrogateescape").replace("\0", ""), str(path)):
        with contextlib.suppress(ConfigError):
            parse_hosts(text, {})
            is_read = True
    return is_read


def read_nodes(data: bytes) -> bool:
    """A list of nodes of Slurm."""
    text = data.decode("utf-8", "surrogateescape")
    first_host(text)
    with contextlib.suppress(ValueError):
        return bool(list(itertools.islice(hosts(text), 1000)))
    return False


def read_environment(data: bytes) -> bool:
    """The environment that a scheduler or another launcher sets, one ``NAME=VALUE`` a line."""
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    env = {name: value for name, _, value in (line.partition("=") for line in lines) if name}
    with contextlib.suppress(ConfigError):
        launched_group(env)
    with contextlib.suppress(ConfigError):
        sole_process(env)
    with contextlib.suppress(ConfigError):
        read_scheduler(env, {}, 4)
        Settings.from_env(env)
        return True
    return False


def read_addresses(data: bytes) -> bool:
    """The address of a membership store, or the name of a checkpoint's folder."""
    text = data.decode("utf-8", "surrogateescape")
    is_remote(text)
    step_of(text)
    with contextlib.suppress(ConfigError):
        client._split(text)
    with contextlib.suppress(ConfigError):
        split_place(text)
    with contextlib.suppress(ConfigError):
        EtcdCluster(text, "", 1.0)
        return True
    return False


def read_request(data: bytes) -> bool:
    """A request to change settings of a running job, as the dashboard and commands send it."""
    with contextlib.suppress(ConfigError):
        check_values(request_in(data.decode("utf-8", "replace")))
        return True
    return False


PARSERS = {
    "hosts": Parser(read_hosts, (b"node0:8,node1:8", b"node0:8\nnode1 slots=8 # fast\n")),
    "nodes": Parser(read_nodes, (b"node[01-04,07],gpu3", b"a[1-2]b[3-4]")),
    "environment": Parser(
        read_environment,
        (
            b"PET_NNODES=2\nPET_NODE_RANK=1\nPET_NPROC_PER_NODE=4\nPET_RDZV_ENDPOINT=a:1\nPET_MAX_RESTARTS=3",
            b"SLURM_STEP_ID=0\nSLURM_STEP_NUM_TASKS=2\nSLURM_NNODES=2\nSLURM_NODEID=1\nSLURM_JOB_ID=7\n"
            b"SLURM_JOB_NODELIST=n[1-2]\nSLURM_PROCID=1",
            b"JOB_COMPLETION_INDEX=1\nJOBSET_NAME=a\nREPLICATED_JOB_NAME=b\nJOB_INDEX=1\nPROCESSES_IN_JOB=2\nPET_NNODES=4",
            b"RANK=1\nWORLD_SIZE=2\nMASTER_ADDR=a\nMASTER_PORT=1\nTORCHELASTIC_RESTART_COUNT=0\nLOCAL_WORLD_SIZE=2",
            b"HOLDFAST_SLICES=auto:2\nHOLDFAST_STRATEGY=rollback\nHOLDFAST_GUARD=off",
        ),
    ),
    "addresses": Parser(read_addresses, (b"user@a:1,[::1]:2,b", b"step-00000020", b"s3://bucket/run")),
    "request": Parser(read_request, (b'{"workers": 4, "lr": 0.5}', b'{"strategy": "forward", "save": true}')),
}
