"""Training in two loops, in which chosen workers freeze in a phase, once: ``train_frozen.py [--freeze RANK:PHASE:HOW]...``.

PHASE is a phase of the beacon, ``imports``, ``group``, ``evaluation`` or ``exit``. ``group`` is the first building of a group
after a failure: MPI's shrink, or where Gloo connects the members. HOW is ``stop``, by a signal, or ``sleep``.
Each worker counts only in the first start of a job, which ``--notes`` tells from later ones.
"""

import argparse
import atexit
import functools
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def freeze(how):
    """Stop this process, or sleep for longer than any limit."""
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)


def freezes_in(name, options):
    """How this process is to freeze there, "" if it is not, or has been before."""
    for frozen in options.freeze:
        rank, phase, how = frozen.split(":")
        note = options.notes / f"frozen-{rank}-{phase}"
        if (int(rank), phase) == (int(os.environ.get("RANK", "-1")), name) and not note.exists():
            note.touch()
            return how
    return ""


def freeze_in_phases(options):
    """Freeze after the beacon has shown a phase; in a step, in the third one."""
    from holdfast.records.beacon import Beacon

    mark = Beacon.mark

    def mark_and_freeze(self, phase, step, *more):
        mark(self, phase, step, *more)
        if phase == "recovery":
            freeze_in_group_building(options)
        is_due = step >= 2 or phase in ("connect", "start", "gate", "recovery", "script")
        if is_due and (how := freezes_in(phase, options)):
            freeze(how)

    Beacon.mark = mark_and_freeze


def freeze_in_group_building(options):
    """Freeze in the next building of a group; called once the fabric's module is loaded."""
    if ulfm := sys.modules.get("holdfast.comm.ulfm"):
        freeze_before(ulfm.UlfmCommunicator, "shrink", options)
    if c10d := sys.modules.get("holdfast.comm.c10d"):
        freeze_before(c10d, "make_gloo", options)


def freeze_before(holder, name, options):
    """Replace a function by one that may freeze first."""
    build = getattr(holder, name)

    @functools.wraps(build)
    def freeze_and_build(*words, **named):
        if how := freezes_in("group", options):
            freeze(how)
        return build(*words, **named)

    if not hasattr(build, "__wrapped__"):
        setattr(holder, name, freeze_and_build)


def train(between=lambda: None, **session_arguments):
    """Train in two loops with an evaluation between them; return the hash of the state."""
    import reference
    import torch
    import torch.nn.functional as F
    from torch.utils.data import TensorDataset

    import holdfast

    torch.set_num_threads(1)
    model = reference.make_model("mlp")
    optimizer = reference.make_optimizer("sgd", model)
    session = holdfast.Session(
        model, optimizer, **({"seed": reference.SEED, "slices": reference.SLICES} | session_arguments)
    )
    for loop in range(2):
        for step in session.steps(TensorDataset(*reference.data()), reference.BATCH, 1):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
        if loop == 0:
            between()
    return reference.state_hash(model, optimizer)


def main():
    """Train, and freeze where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--freeze", action="append", default=[], metavar="RANK:PHASE:HOW")
    parser.add_argument("--notes", type=Path, default=Path(), help="folder in which each freeze is noted")
    parser.add_argument("--messages", action="store_true", help="exchange gradients by messages, not in shared memory")
    options = parser.parse_args()
    if how := freezes_in("imports", options):
        freeze(how)
    freeze_in_phases(options)

    def evaluate():
        if how := freezes_in("evaluation", options):
            freeze(how)

    train(evaluate, **({"shared_bytes": 0} if options.messages else {}))
    if how := freezes_in("exit", options):
        atexit.register(freeze, how)


if __name__ == "__main__":
    main()
