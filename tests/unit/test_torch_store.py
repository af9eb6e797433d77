"""The store of torch's rendezvous, which asks for no secret: in a job on one machine it listens on loopback alone."""

import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from holdfast.distributed import rendezvous
from holdfast.engine.start_rank import CHOSEN_ALONE
from holdfast.errors import ConfigError

LISTENS = "0A"


def listens_at(port):
    """The addresses at which something listens on a port, as the kernel writes them."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    ends = [words[1].split(":") for words in lines if words[3] == LISTENS]
    return {host for host, at in ends if int(at, 16) == port}


@pytest.fixture
def place(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for name, value in (("RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port))):
        monkeypatch.setenv(name, value)
    return port


IPV4, IPV6 = "0100007F", "00000000000000000000000001000000"
"""The addresses of loopback."""


@pytest.mark.parametrize(("address", "listens"), [("127.0.0.1", IPV4), ("localhost", IPV4), ("::1", IPV6)])
def test_torch_uses_the_store_that_listens_on_loopback(place, monkeypatch, address, listens):
    if address == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    monkeypatch.setenv("MASTER_ADDR", address)
    hosted = rendezvous._host_on_loopback()
    its = dist.TCPStore(address, place, 1, True, timedelta(seconds=20), multi_tenant=True)
    del hosted
    its.set("key", "value")

    other = dist.TCPStore(address, place, is_master=False, wait_for_workers=False)
    assert other.get("key") == b"value"
    assert listens_at(place) == {listens}


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_where_torch_cannot_make_the_store_nothing_listens(place, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no store")

    monkeypatch.setattr(dist, "TCPStore", fail)

    with pytest.raises(RuntimeError, match="no store"):
        rendezvous._host_on_loopback()
    assert listens_at(place) == set()


@pytest.mark.parametrize(("name", "value"), [("RANK", "1"), ("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "no port")])
def test_torch_hosts_its_store_itself_everywhere_else(place, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert rendezvous._host_on_loopback() is None


def test_a_port_that_is_taken_is_left_to_torch_which_says_so(place):
    with socket.create_server(("127.0.0.1", place)):
        assert rendezvous._host_on_loopback() is None


def test_the_store_of_a_rank_that_stands_in_for_rank_0_listens_on_loopback(place, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(rendezvous, "_hosted", [])
    rendezvous._stand_in(0, timedelta(seconds=20))
    assert listens_at(place) == {"0100007F"}


def test_ranks_of_several_nodes_are_told_at_once_that_they_have_no_place_to_meet(place, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    rendezvous._check_place()

    monkeypatch.setenv(CHOSEN_ALONE, f"127.0.0.1:{place}")
    with pytest.raises(ConfigError, match="no place to meet: set MASTER_ADDR and MASTER_PORT for all launchers"):
        rendezvous._check_place()

    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    rendezvous._check_place()
