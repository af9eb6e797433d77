"""A worker of a job in which one is stopped while it adds, is considered dead, and wakes up during a later step.

``late_writer.py FOLDER [--reuse]``, started by mpirun. mpirun starts a wrapper, which forks the worker: once
the wrapper is killed MPI reports a failure, while the stopped worker is still alive. With ``--reuse`` the survivors
keep using memory that the stopped worker knows, which is forbidden.
"""

import os
import signal
import sys
import time
from pathlib import Path

FOLDER = Path(sys.argv[1])
VICTIM, STOPPED_IN, WOKEN_IN = 2, 3, 6
"""The stopped worker, its step, and the step in which it is woken, three later."""

BUCKET = 1
"""The bucket in whose all-reduce it is stopped: large enough that every worker has a share."""

PATIENCE_S = 90


def main():
    pid = os.fork()  # before MPI and torch are loaded: neither survives a fork
    if pid == 0:
        os.setsid()  # otherwise the kernel wakes the stopped process when the wrapper, its group leader, dies
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)  # an end that all workers detect
    _, status = os.waitpid(pid, 0)
    os._exit(0) if status == 0 else os.kill(os.getpid(), signal.SIGKILL)


def work():
    rank = os.environ["OMPI_COMM_WORLD_RANK"]
    log = os.open(FOLDER / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)  # Open MPI waits until a dead worker's own pipes are closed
    signal.alarm(4 * PATIENCE_S)

    from train_reference import train

    if "--reuse" in sys.argv:
        reuse_memory()
    if int(rank) == VICTIM:
        stop_while_adding()
    else:
        wait_before_reading()
    session, state = train("cnn", "sgd")
    write(f"state-{rank}", state)
    write(f"members-{rank}", ",".join(map(str, session._job.comm.members)))
    sys.stdout.flush()
    os._exit(0)


def write(name, text):
    """Write a file atomically."""
    part = FOLDER / f".{name}"
    part.write_text(text)
    part.rename(FOLDER / name)


def wait_for(name):
    end = time.monotonic() + PATIENCE_S
    while not (FOLDER / name).exists():
        if time.monotonic() > end:
            sys.exit(f"{name} never came")
        time.sleep(0.002)


def stop_while_adding():
    """Stop between barrier A and the worker's own addition; once woken, add, report it, and do nothing more."""
    from holdfast.comm.allreduce.shm import SharedMemoryReduce
    from holdfast.engine.injection import FaultPoints

    meet, was_stopped = SharedMemoryReduce._barrier, []

    def reach(points, step, position):
        if (step, position) == (STOPPED_IN, BUCKET):
            write("stopped", f"{os.getpid()} {os.getppid()}")
            was_stopped.append(step)
            os.kill(os.getpid(), signal.SIGSTOP)

    def meet_no_more(add):
        if was_stopped:
            write("written", "")
            time.sleep(PATIENCE_S)
        meet(add)

    FaultPoints.reach_in_sum = reach
    SharedMemoryReduce._barrier = meet_no_more


def wait_before_reading():
    """After the all-reduces of the step, before any worker reads the results, let the stopped worker write."""
    from holdfast.engine.loop import TrainingLoop

    apply = TrainingLoop._apply

    def apply_late(run, step):
        if step == WOKEN_IN:
            assert VICTIM not in run._job.comm.members
            pid = int((FOLDER / "stopped").read_text().split()[0])
            if run._job.comm.local_ranks[0] == run._job.comm.members[0]:
                assert not (FOLDER / "written").exists()
                assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "it was stopped"
                os.kill(pid, signal.SIGCONT)
            wait_for("written")
        apply(run, step)

    TrainingLoop._apply = apply_late


def reuse_memory():
    """Use the first result for all generations; it shrinks by the dead worker's line and looks new."""
    from holdfast.comm.allreduce import shm as shared

    class Kept:
        first = None

        def __new__(cls, size_bytes):
            if cls.first is None:
                cls.first = make(size_bytes)
            os.ftruncate(cls.first.fd, size_bytes)
            cls.first.bytes[:size_bytes].zero_()
            return cls.first

    make = shared.SharedSegment
    shared.SharedSegment = Kept


if __name__ == "__main__":
    main()
