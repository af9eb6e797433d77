"""The words by which logs name columns and events."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast_lab.simulate.logs.options import LogOptions

COLUMNS = {
    "lifetime": "lifetime life ttf tbf uptime time_to_failure time_to_preemption time_between_failures survival_time "
    "survival runtime run_time elapsed duration interarrival walltime wall_time resources_used.walltime",
    "ended": "ended observed event failed failure preempted died dead is_failure state status outcome result job_state "
    "jobstate job_status jobstatus final_state end_state stat out",
    "exit": "exit_status exitstatus exit_code exitcode returncode return_code rc",
    "censored": "censored is_censored right_censored",
    "down_from": "prob_started failure_start fault_start outage_start down down_at failed_at timestart down_from",
    "down_to": "prob_fixed failure_end fault_end outage_end repaired repaired_at fixed up_at timeend down_to",
    "up_from": "launched launched_at launch_time created created_at creation_time granted granted_at acquired up_from",
    "up_to": "terminated terminated_at termination_time preempted_at revoked revoked_at deleted deleted_at up_to",
    "start": "start started start_time started_at begin begin_time from",
    "end": "end ended end_time ended_at finish finish_time finished to",
    "time": "time timestamp date datetime ts event_time at t when date_time lasttimestamp time_stamp",
    "node": "node node_id nodename node_name nodenumz nodenum host host_id hostname instance instance_id machine machine_id "
    "server unit vm name involvedobject.name regarding.name worker serial_number serialnumber serial sn drive drive_id disk "
    "disk_id device device_id gpu gpu_id",
    "state": "state status node_state nodestate",
    "job": "jobid job_id jobidraw job_id_raw job",
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
    "responding allocated alloc mixed mix comp acquired available"
)
DOWN = _words(
    "down fail failed failure fault fault_start remove removed preempt preempted preemption revoke revoked reclaimed "
    "terminate terminated kill killed crash crashed evict evicted nodenotready notready not_ready lost dead died "
    "offline unreachable interrupted interruption error reboot rebooted rebooting"
)
LEFT = _words(
    "released completed complete finished deleted drain drained draining drng stopped stop scaled_down cancelled"
)
"""Planned ends: the lifetime is right-censored."""
PLANNED = _words("maint maintenance planned reserved powered_down powering_down power_down")
"""States of a machine that is down by plan, besides these."""

OTHER = _words(
    "starting nodehassufficientmemory nodehasnodiskpressure nodehassufficientpid nodeallocatableenforced "
    "nodenotschedulable nodeschedulable invaliddiskcapacity"
)
"""Events of a machine after which it is as before."""

TRUE = _words("1 true yes t y")
FALSE = _words("0 false no f n")
FAILED = _words(
    "failed failure fail preempted dead died evicted node_fail boot_fail killed terminated revoked interrupted crashed lost "
    "out_of_memory oom oom_killed oomkilled exit error errored"
)
"""States of a lifetime that ended in a failure."""
CENSORED = _words(
    "censored running run alive up active completed complete completing done finished succeeded success successful pass "
    "passed ok cancelled canceled timeout deadline pending pend queued configuring suspended psusp ususp ssusp requeued "
    "requeue_hold requeue_fed resizing signaling stage_out stopped stopping wait waiting held"
)
"""States of a lifetime that has not ended, or that ended by plan."""
OPEN = _words("unknown none null nil nan n/a na - open ongoing now")
"""What stands in place of an end that has not come yet, besides nothing."""


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


def plain(word: str) -> str:
    """Return a word for comparison: lower case, ``_`` between words, without the marks that Slurm appends."""
    return re.sub(r"\s+", "_", word.strip().lower()).strip("*$~#!%@^-")


def chosen(word: str, options: LogOptions) -> str:
    """Return what the options say that a plain word means: ``"up"``, ``"down"``, ``"censored"``, ``"ignored"``, or "".

    A word of the options also stands for texts that begin with it, as ``cancelled`` for ``CANCELLED by 1001``; the
    longest fits best.
    """
    fits = [
        (len(one), kind)
        for kind, words in _lists(options)
        for one in map(plain, words)
        if one and (word == one or word.startswith(one + "_"))
    ]
    return max(fits)[1] if fits else ""


def of_any_other(options: LogOptions) -> str:
    """Return what the options say that any word means whose meaning is not known, by a ``*``; or ""."""
    return next((kind for kind, words in _lists(options) if "*" in words), "")


def _lists(options: LogOptions) -> tuple[tuple[str, Sequence[str]], ...]:
    return ("up", options.up), ("down", options.down), ("censored", options.censored), ("ignored", options.ignored)


def known_as(word: str, kinds: Sequence[tuple[str, frozenset[str]]]) -> str:
    """Return the kind of a plain word, or "": also of ``cancelled_by_1001``, and of ``cancell+``, which was cut short."""
    cut = word[:-1] if word.endswith("+") and len(word) > 5 else ""
    word = word.partition("_by_")[0]
    for kind, words in kinds:
        if word in words or (cut and any(known.startswith(cut) for known in words)):
            return kind
    return ""


def meaning(word: str, options: LogOptions) -> str:
    """Return what an event means for its machine: ``"up"``, ``"down"``, ``"left"``, ``"ignored"``, or "" if unknown."""
    word = plain(word)
    known = (("up", UP), ("down", DOWN), ("left", LEFT), ("ignored", OTHER))
    kind = chosen(word, options) or known_as(word, known) or (of_any_other(options) if word else "")
    return "left" if kind == "censored" else kind


def state_meaning(text: str, options: LogOptions) -> str:
    """Return what a state of a machine, such as ``DOWN*`` or ``IDLE+DRAIN``, means, as :func:`meaning` does."""
    kinds = {"left" if plain(part) in PLANNED else meaning(part, options) for part in text.split("+")}
    if "" in kinds:
        return meaning(text, options)
    return next(kind for kind in ("ignored", "down", "left", "up") if kind in kinds)


_TIME = re.compile(r"\[?(\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)")
_NODE = re.compile(r"\b(?:node/|[Nn]odes? |node=|host[=/ ]|instance[=/ ]|machine[=/ ])([A-Za-z0-9][\w.\-\[\],]*)")
_JOURNAL = re.compile(
    r"\[?\d{4}-\d{2}-\d{2}[T ][\d:.,]+(?:Z|[+-]\d{2}:?\d{2})?\]? ([\w.\-]+) [\w./\-@()]+(?:\[\d+\])?: "
)
_DOWN_PHRASES = re.compile(
    r"setting DOWN|state set to (?:DOWN|FAIL)|NodeNotReady|went down|on failed node|failure of node"
    r"|(?:not|no longer) (?:ready|available|reachable|up|running)\b",
    re.IGNORECASE,
)
_MISSED_PHRASES = re.compile(r"(?:not|no longer) responding", re.IGNORECASE)
_UP_PHRASES = re.compile(
    r"returned to service|now responding|state set to (?:IDLE|RESUME|ALLOC|MIXED|UP)|NodeReady|is now up", re.IGNORECASE
)
_OF_OTHERS = re.compile(r"\b(?:job|jobid|step|task|pod|container|process)\b", re.IGNORECASE)
"""Words of lines that name a machine, but tell what happened to something on it."""


@dataclass(frozen=True, slots=True)
class ReadLine:
    """What a line of a system's log says.

    Args:
        time: Its time, as written.
        nodes: The machines.
        kind: ``"up"``, ``"down"``, ``"left"``, or ``"missed"`` if a machine did not answer, but is not given up.
        words: What says so, in lower case.
    """

    time: str
    nodes: tuple[str, ...]
    kind: str
    words: str


def is_journal(line: str) -> bool:
    """Return whether a line is one of a journal: time, host, program, text."""
    return _JOURNAL.match(line) is not None


def read_line(line: str, options: LogOptions) -> ReadLine | None:
    """Return what a line of a system's log says; None if it has no time, no machine or no known event.

    In a line of a journal (time, host, program, text) that names no other machine, only words of the options count:
    programs start and stop all the time.
    """
    at, node, host = _TIME.search(line), _NODE.search(line), _JOURNAL.match(line)
    if at is None or (node is None and host is None):
        return None
    if node is None and host is not None:
        told = [(kind, word) for word in _texts(line[host.end() :]) if (kind := chosen(word, options))]
        names: tuple[str, ...] = (host[1],)
    elif node is not None:
        told = _told(line, line[: node.start()] + line[node.end() :], options)
        names = expand_hosts(node[1].rstrip(".,:"))
    if not told or told[0][0] == "ignored":
        return None
    kind = "left" if told[0][0] == "censored" else told[0][0]
    return ReadLine(at[1], names, kind, told[0][1])


def _told(line: str, rest: str, options: LogOptions) -> list[tuple[str, str]]:
    """Return the kind and the words of what a line says of a machine, the first first."""
    told = [(kind, word) for word in _texts(rest) if (kind := chosen(word, options))]
    for kind, phrases in (("down", _DOWN_PHRASES), ("missed", _MISSED_PHRASES), ("up", _UP_PHRASES)):
        if not told and (match := phrases.search(line)):
            told = [(kind, match[0].lower())]
    if not told and not _OF_OTHERS.search(rest):
        told = [(kind, word) for word in _texts(rest) if (kind := meaning(word, options))]
    return told


def _texts(line: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Za-z_]+", line)]


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
