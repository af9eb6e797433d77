"""A process of a group that trains again and again from where it was in the middle of a training: its loop.

It answers one order after another, each with a dictionary. An error ends it, after it was told.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast.errors import InternalError
from holdfast_lab.studies.soft_errors.setup import SESSION, Setup
from holdfast_lab.studies.soft_errors.workers.process import RankProcess
from holdfast_lab.studies.soft_errors.workers.session import SessionProcess


def serve(connection: Connection, setup: Setup, rank: int, folder: Path, store: Path, timeout_s: float) -> None:
    """Be a process of a group until its parent ends.

    Args:
        connection: Where orders come and answers go: the first answer comes unasked, when it is warm.
        setup: What is trained.
        rank: Of this process.
        folder: Of the files of the state, one a process.
        store: The file by which the processes find each other.
        timeout_s: How long one waits for the others in a sum.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a session would answer it, and save what nobody wants
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    try:
        torch.set_num_threads(1)
        torch.set_deterministic_debug_mode("error")
        os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
        meeting = dist.FileStore(str(store), setup.real)  # type: ignore[attr-defined]  # torch has no stubs for it
        dist.init_process_group(
            "gloo", store=meeting, rank=rank, world_size=setup.real, timeout=timedelta(seconds=timeout_s)
        )
        process = (SessionProcess if setup.platform == SESSION else RankProcess)(
            setup, rank, folder / f"rank-{rank}.h5"
        )
        connection.send(process.begin())
        while True:
            connection.send(process.go_on(connection.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # nobody asks any more
    except Exception as error:
        told = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        connection.send([told | {"is_ours": isinstance(error, InternalError)}])


def _loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _end_with_parent(folder: Path) -> None:
    """End when the parent does, however it does: nobody would take the answer, or remove the files."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
