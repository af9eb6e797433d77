"""The surface: ``--help`` of all commands, public names, what is said of bad input, variables, and the schema of the files that runs write."""

from runs import load

COMMANDS = (
    "run", "rehearse", "doctor", "scale", "set", "report", "diff-runs", "verify", "demo", "study", "simulate", "plan", "inject", "ckpt",
    "ckpt ls", "ckpt show", "ckpt verify", "ckpt diff", "ckpt convert", "ckpt prune",
)  # fmt: skip
SCRIPT = "SCRIPT"
BAD = {
    "no command": (),
    "unknown command": ("dance",),
    "unknown option": ("run", "--hope", SCRIPT),
    "no script": ("run", "nothing-there.py"),
    "unknown strategy": ("run", "--strategy", "hope", SCRIPT),
    "unknown fabric": ("run", "--fabric", "smoke", SCRIPT),
    "no workers": ("run", "-n", 0, SCRIPT),
    "not a number": ("run", "-n", "two", SCRIPT),
    "a unit": ("run", "--hang-timeout", "5s", SCRIPT),
    "unknown fault": ("run", "--inject", "tickle:rank=0,step=1", SCRIPT),
    "unknown rank": ("run", "-n", 2, "--inject", "kill:rank=5,step=1", SCRIPT),
    "flip of nothing": ("run", "--inject", "flip:rank=0,step=1", SCRIPT),
    "restart without checkpoints": ("run", "--strategy", "restart", SCRIPT),
    "respawn over ulfm": ("run", "--respawn", SCRIPT),
    "guard": ("run", "--guard", "cure", SCRIPT),
    "mirrors": ("run", "--mirror-every", 4, SCRIPT),
    "nodes": ("run", "--fabric", "gloo", "--nnodes", 2, SCRIPT),
    "one checkpoint": ("run", "--checkpoint-dir", "c", "--keep-last", 1, SCRIPT),
    "report of nothing": ("report", "nothing-there"),
    "verify nothing": ("verify", "nothing-there"),
    "diff nothing": ("diff-runs", "nothing-there", "nothing-here"),
    "show nothing": ("ckpt", "show", "nothing-there"),
    "convert to nothing": ("ckpt", "convert", "nothing-there", "b", "--to", "pickle"),
    "inject nothing": ("inject", "nothing-there"),
    "simulate nothing": ("simulate", "nothing-there.toml"),
    "plan of nothing": ("plan", "--workers", 0),
    "plan of words": ("plan", "--workers", 4, "--mtbf", "soon"),
    "scale nothing": ("scale", 2, "--job", 1),
}  # fmt: skip
FREE = ("metrics", "tensors", "orders", "times_s", "platform")
"""Fields whose keys are names of the script's, or whatever came up."""


def record(tree, work):
    """Return all of the surface; the schemas are of the runs that lie in ``work``."""
    place = work / "surface"
    place.mkdir()
    (place / SCRIPT).write_text("open('it_ran', 'w')\n")
    helps = [(*command.split(), "--help") for command in COMMANDS]
    done = tree.each([("--help",), ("--version",), *helps, *BAD.values()], cwd=place)
    assert not (place / "it_ran").exists(), "a bad option was taken"
    made = {
        "help": dict(zip(("", "--version", *COMMANDS), (one.out.splitlines() for one in done), strict=False)),
        "bad": {name: [one.code, one.err.splitlines()] for name, one in zip(BAD, done[-len(BAD) :], strict=True)},
        "names": tree.script("names.py"),
    }
    if (work / "runs").is_dir():
        made["schema"] = schemas(sorted((work / "runs").glob("*/report")))
    return made


def schemas(folders):
    """Return the fields of each kind of record, and of the report, with the kinds of JSON value that they had."""
    records, reports = {}, {}
    for folder in folders:
        report, events = load(folder)
        _note(reports, report, "")
        for event in events:
            _note(records.setdefault(event["event"], {}), event, "")
    sort = lambda found: {name: sorted(found[name]) for name in sorted(found)}  # noqa: E731
    return {"report.json": sort(reports), "events.jsonl": {name: sort(records[name]) for name in sorted(records)}}


def _note(found, value, path):
    """Note the kinds of all values within one, by path."""
    kinds = {
        dict: "object",
        list: "list",
        str: "text",
        bool: "bool",
        int: "number",
        float: "number",
        type(None): "null",
    }
    if path:
        found.setdefault(path, set()).add(kinds[type(value)])
    if isinstance(value, dict):
        free = path.rpartition("/")[2] in FREE
        for name, each in value.items():
            _note(found, each, f"{path}/*" if free else f"{path}/{name}".lstrip("/"))
    elif isinstance(value, list):
        for each in value:
            _note(found, each, f"{path}[]")
