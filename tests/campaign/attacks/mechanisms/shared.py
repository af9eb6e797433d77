"""Modules of ``tests/support``: hosts made of namespaces, servers of etcd and with the protocol of S3."""

import sys
from pathlib import Path

_SUPPORT = str(Path(__file__).parents[3] / "support")
if _SUPPORT not in sys.path:
    sys.path.append(_SUPPORT)

from etcd import Cluster as EtcdCluster  # noqa: E402
from etcd import find_etcd  # noqa: E402
from netns import Hosts, ip  # noqa: E402
from s3 import Server, running_server  # noqa: E402

__all__ = ["EtcdCluster", "Hosts", "Server", "find_etcd", "ip", "running_server"]
