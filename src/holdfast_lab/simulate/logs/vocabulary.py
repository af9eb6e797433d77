"""The words by which logs name columns and events."""

from __future__ import annotations

import re
from collections.abc import Sequence

COLUMNS = {
    "lifetime": "lifetime life ttf tbf uptime time_to_failure time_to_preemption time_between_failures survival_time "
    "survival runtime run_time elapsed duration interarrival",
    "ended": "ended observed event failed failure preempted died dead is_failure state status outcome",
    "censored": "censored is_censored right_censored",
    "down_from": "prob_started failure_start fault_start outage_start down down_at failed_at timestart down_from",
    "down_to": "prob_fixed failure_end fault_end outage_end repaired repaired_at fixed up_at timeend down_to",
    "up_from": "launched launched_at launch_time created created_at creation_time granted granted_at acquired up_from",
    "up_to": "terminated terminated_at termination_time preempted_at revoked revoked_at deleted deleted_at up_to",
    "start": "start started start_time started_at begin begin_time from",
    "end": "end ended end_time ended_at finish finish_time finished to",
    "time": "time timestamp date datetime ts event_time at t when date_time lasttimestamp time_stamp",
    "node": "node node_id nodename node_name nodenumz nodenum host host_id hostname instance instance_id machine machine_id "
    "server unit vm name involvedobject.name worker",
    "group": "system system_id cluster cluster_name",
    "event": "event event_type action status state reason type what kind",
    "size": "size count nodes machines instances workers available capacity cluster_size num_nodes n",
}
"""Names of columns by role; a name is in lower case, without its unit, with ``_`` for spaces."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


UP = _words(
    "up add added start started running ready nodeready registerednode resume resumed resuming recover recovered repaired fixed "
    "fault_end restored idle join joined launch launched created create grant granted boot booted online returned "
    "responding allocated acquired available"
)
DOWN = _words(
    "down fail failed failure fault fault_start remove removed preempt preempted preemption revoke revoked reclaimed "
    "terminate terminated kill killed crash crashed evict evicted nodenotready notready not_ready lost dead died "
    "offline unreachable interrupted interruption error reboot rebooted rebooting"
)
LEFT = _words("released completed complete finished deleted drain drained draining stopped stop scaled_down cancelled")
"""Planned ends: the lifetime is right-censored."""

YES = _words("1 true yes t y failed failure fail preempted dead died evicted node_fail killed terminated")
NO = _words("0 false no f n censored running alive up completed complete cancelled")


def simple(name: str) -> str:
    """Return a column's name for comparison: lower case, without its unit, ``_`` between words."""
    name = re.sub(r"[(\[].*?[)\]]", "", name.strip().lower()).strip()
    name = re.sub(r"[\s\-]+", "_", name)
    return re.sub(r"_(us|ms|msec|s|sec|secs|seconds|min|mins|minutes|h|hr|hrs|hours|d|days)$", "", name)


def columns_named(header: Sequence[str], role: str) -> list[int]:
    """Return the places of columns whose names say that they hold a role, likeliest first."""
    names = COLUMNS[role].split()
    found = [(names.index(simple(name)), place) for place, name in enumerate(header) if simple(name) in names]
    return [place for _, place in sorted(found)]


def meaning(word: str, up: Sequence[str], down: Sequence[str]) -> str:
    """Return what an event means for its machine: ``"up"``, ``"down"``, ``"left"``, or "" if unknown."""
    word = word.strip().lower().replace(" ", "_").strip("*$~#!%@^-")  # Slurm appends marks to states
    for kind, words in (("up", up), ("down", down), ("up", UP), ("down", DOWN), ("left", LEFT)):
        if word in words:
            return kind
    return ""


_TIME = re.compile(r"\[?(\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)")
_NODE = re.compile(r"\b(?:node/|[Nn]odes? |node=|host[=/ ]|instance[=/ ]|machine[=/ ])([A-Za-z0-9][\w.\-\[\],]*)")
_DOWN_PHRASES = re.compile(
    r"not responding|setting DOWN|state set to (?:DOWN|FAIL)|NodeNotReady|went down", re.IGNORECASE
)
_UP_PHRASES = re.compile(
    r"returned to service|now responding|state set to (?:IDLE|RESUME|ALLOC|MIXED|UP)|NodeReady|is now up", re.IGNORECASE
)


def read_line(line: str, up: Sequence[str], down: Sequence[str]) -> tuple[str, tuple[str, ...], str] | None:
    """Return time, machines and meaning of a line of a system's log; None if it does not say all three."""
    at, node = _TIME.search(line), _NODE.search(line)
    if at is None or node is None:
        return None
    if _DOWN_PHRASES.search(line):
        kind = "down"
    elif _UP_PHRASES.search(line):
        kind = "up"
    else:
        rest = line[: node.start()] + line[node.end() :]
        kinds = [kind for word in re.findall(r"[A-Za-z_]+", rest) if (kind := meaning(word, up, down))]
        if not kinds:
            return None
        kind = kinds[0]
    return at[1], expand_hosts(node[1].rstrip(".,:")), kind


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of a list such as ``node[01-04,07],gpu3``."""
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
        if match is None:
            hosts.append(part)
            continue
        for span in match[2].split(","):
            first, _, last = span.partition("-")
            if first.isdigit() and (last or first).isdigit() and int(last or first) - int(first) < 100_000:
                numbers = range(int(first), int(last or first) + 1)
                hosts += [f"{match[1]}{number:0{len(first)}}{match[3]}" for number in numbers]
    return tuple(hosts)
