"""The options that say which nodes there are, and where they meet."""

from __future__ import annotations

from holdfast.errors import ConfigError
from holdfast.launch.job import Job

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def split_address(url: str) -> tuple[str, int]:
    """Return host and port of ``holdfast://HOST:PORT``; raise a ConfigError if it is not that."""
    host, _, port = url.removeprefix("holdfast://").rpartition(":")
    if not url.startswith("holdfast://") or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"--rdzv must be holdfast://HOST:PORT, the address of the first node, or etcd://HOST:PORT[,HOST:PORT...]/JOB, got {url!r}"
        )
    return host.strip("[]"), int(port)


def check_nodes(job: Job) -> None:
    """Raise a ConfigError if the options about nodes do not go together."""
    if job.nnodes < 1:
        raise ConfigError(f"--nnodes must be at least 1, got {job.nnodes}")
    if not 0.5 <= job.node_timeout_s <= 3600:
        raise ConfigError(f"--node-timeout must be between 0.5 and 3600 seconds, got {job.node_timeout_s:g}")
    if job.nnodes == 1 and not job.rdzv:
        if job.node_rank:
            raise ConfigError(f"--node-rank must be 0 with one node, got {job.node_rank}")
        return
    if not job.fabric.survives_node_loss:
        raise ConfigError(
            f"--nnodes and --rdzv need --fabric gloo, got {job.settings.fabric}; with ulfm mpirun reaches the nodes, see docs/nodes.md"
        )
    if job.nnodes > 1 and job.stragglers == "rebalance":
        raise ConfigError(
            "--stragglers rebalance works on one node: each launcher knows only how fast its own workers are; take warn or replace"
        )
    if not 0 <= job.node_rank < job.nnodes:
        raise ConfigError(
            f"--node-rank must be from 0 to {job.nnodes - 1} (--nnodes {job.nnodes}), got {job.node_rank}"
        )
    if not job.rdzv:
        raise ConfigError(
            "--nnodes needs --rdzv: where do the nodes meet? For instance holdfast://HOST:29400, the address of the first node"
        )
    if not job.rdzv.startswith("etcd://"):
        host, _ = split_address(job.rdzv)
        if host not in _LOOPBACK and not job.settings.token:
            raise ConfigError(
                "--rdzv beyond this machine needs a secret that all nodes share: --rdzv-token, or HOLDFAST_TOKEN"
            )
