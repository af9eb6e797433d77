"""Commands that run on a host of ``netns.py``: how they are written, and how a process that is there already joins a host."""

import ctypes
import os
import socket

_ENDS_WITH = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
_NEW_MOUNTS, _NEW_UTS, _NEW_NET = 0x00020000, 0x04000000, 0x40000000
_SLAVE_AND_BELOW, _DETACH = 0x84000, 2


def prefix(name):
    """The prefix of a command that runs it on the host ``name``, in the command's own process."""
    return ["ip", "netns", "exec", name, *_ENDS_WITH, name]


def split(words):
    """The host on which a command runs, "" if it is this machine, and the command itself."""
    name = words[3] if words[:3] == ["ip", "netns", "exec"] else ""
    length = len(prefix(name))
    return (name, words[length:]) if name and words[:length] == prefix(name) else ("", words)


def enter(name):
    """Do in this process what the prefix does."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function, *args):
        if function(*args):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)

    with open(f"/run/netns/{name}") as namespace:
        call(libc.setns, namespace.fileno(), _NEW_NET)
    call(libc.unshare, _NEW_MOUNTS | _NEW_UTS)
    call(libc.mount, b"", b"/", None, ctypes.c_ulong(_SLAVE_AND_BELOW), None)
    libc.umount2(b"/sys", _DETACH)  # it shows the network of before
    call(libc.mount, name.encode(), b"/sys", b"sysfs", ctypes.c_ulong(0), None)
    socket.sethostname(name)
