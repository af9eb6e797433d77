"""One worker of the contract test over real MPI."""

import os
import signal

from holdfast.comm import connect
from holdfast.testing.contract import check_communicator


def die(victim):
    if victim in comm.local_ranks:
        os.kill(os.getpid(), signal.SIGKILL)


comm = connect("ulfm")
check_communicator(comm, die, (0, 2))
print(f"passed {comm.local_ranks[0]} of {comm.members}", flush=True)
os._exit(0)
