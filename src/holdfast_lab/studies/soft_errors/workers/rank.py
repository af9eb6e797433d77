"""The main loop of a process in a warm group, which repeatedly resumes a training from its middle.

It answers each order with a dictionary. On an error it sends the error and ends.
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

from holdfast_lab.studies.campaign_plan import OWN_BUGS
from holdfast_lab.studies.soft_errors.setup import SESSION, SoftErrorSetup
from holdfast_lab.studies.soft_errors.workers.process import RankProcess
from holdfast_lab.studies.soft_errors.workers.session import SessionProcess


def serve(
    connection: Connection, setup: SoftErrorSetup, rank: int, folder: Path, store: Path, timeout_s: float
) -> None:
    """Serve orders until the parent process ends.

    Args:
        connection: The pipe of orders and answers; the first answer is sent unasked, once the process is warm.
        setup: The training.
        rank: The rank of this process.
        folder: The directory of the state files, one per process.
        store: The file of the ``FileStore`` for rendezvous.
        timeout_s: Timeout of a collective, in seconds.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a session would handle it and save a checkpoint that is not needed
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
        return  # the parent has ended
    except Exception as error:
        told = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        connection.send([told | {"is_ours": isinstance(error, OWN_BUGS)}])


def _loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _end_with_parent(folder: Path) -> None:
    """End when the parent ends for any reason: no other process would read the answer or remove the files."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
