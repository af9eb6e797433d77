"""A checking process: ``python -m holdfast.doctor full|brief FOLDER [SCRIPT [ARGS]...]``.

It writes its findings to ``FOLDER/full.json`` or ``FOLDER/brief.json``. The brief process computes everything once, for
digests that are compared with those of the full process. Without a script, common layers are checked.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError


def main() -> None:
    """Run the checks, and write the findings."""
    environment = dict(os.environ)
    how, folder, *words = sys.argv[1:]
    briefly = how == "brief"
    if words:
        said = _look_at_script(Path(words[0]), words[1:], Path(folder, "shared.pt"), briefly=briefly)
    else:
        said = {"layers": _look_at_layers(briefly=briefly)}
    if not briefly:
        from holdfast.doctor.machine import machine_info

        said["machine"] = machine_info(environment)
    made = Path(folder, f"{how}.new")
    made.write_text(json.dumps(said))
    made.rename(made.with_suffix(".json"))


def _look_at_layers(*, briefly: bool) -> list[dict[str, Any]]:
    from holdfast.doctor.checks import examine, thread_counts
    from holdfast.doctor.layers import usual_subjects

    threads = thread_counts()
    return [examine(subject, threads, briefly=briefly).as_json() for subject in usual_subjects()]


def _look_at_script(script: Path, args: list[str], shared: Path, *, briefly: bool) -> dict[str, Any]:
    from holdfast.doctor.script import ScriptInspected, ScriptInspector
    from holdfast.session.reinit_context import application

    application.looks = look = ScriptInspector(shared, briefly=briefly)
    sys.argv = [str(script), *args]
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except ScriptInspected:
        return {"seen": look.seen.as_json()}
    except SystemExit as end:
        return {"error": f"{script.name} ended with sys.exit({end.code!r}) before its first step"}
    except Exception as error:
        traceback.print_exc()
        wrong = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        return {"refused": str(error)} if isinstance(error, ConfigError) else wrong
    return {"error": f"{script.name} ended without training: it never ran session.steps(...)"}


if __name__ == "__main__":
    main()
