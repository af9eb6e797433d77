"""The simulator and the planner: what ``holdfast simulate`` and ``holdfast plan`` write, to the byte."""

import hashlib
import json

REPETITIONS = 20
PLANS = {
    "large": ("--workers", 1024, "--mtbf-node", "264d", "--seed", 3),
    "split": ("--workers", 64, "--mtbf", "6h", "--model", "split", "--state-bytes", "28GB", "--spares", 2, "--split", "even"),
}  # fmt: skip


def record(tree, work):
    """Return digests of results.json of all scenarios and of some plans, with the figures that say most."""
    folder = work / "simulated"
    folder.mkdir()
    scenarios = sorted((tree.path / "examples" / "scenarios").glob("*.toml"))
    words = {path.stem: ("simulate", path, "--repetitions", REPETITIONS) for path in scenarios}
    words |= {f"plan-{name}": ("plan", *given, "--repetitions", 4, "--no-map") for name, given in PLANS.items()}
    words["plan-map"] = ("plan", "--workers", 512, "--mtbf-node", "264d", "--repetitions", 2)
    done = tree.each([(*command, "--out", folder / name) for name, command in words.items()])
    return {name: _read(folder / name, one, tree) for name, one in zip(words, done, strict=True)}


def _read(folder, done, tree):
    if done.code:
        return {"exit": done.code, "said": done.err}
    # Its command has the paths of this folder and of the tree.
    written = (folder / "results.json").read_text().replace(str(folder), "OUT").replace(str(tree.path), "TREE")
    rows = json.loads(written)["rows"]
    return {
        "sha256": hashlib.sha256(written.encode()).hexdigest(),
        "goodput": {row["name"]: row["goodput"] for row in rows},
        "printed": hashlib.sha256(done.out.replace(str(folder), "OUT").encode()).hexdigest(),
        "page": (folder / "index.html").is_file(),
    }
