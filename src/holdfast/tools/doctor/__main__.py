"""A checking process: ``python -m holdfast.tools.doctor full|brief FOLDER DEVICE [SCRIPT [ARGS]...]``.

It writes its findings to ``FOLDER/full.json`` or ``FOLDER/brief.json``. The brief process computes everything once, for
digests that are compared with those of the full process. Without a script, common layers are checked on the device; a
script's model is on the device that the script chooses.
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
    how, folder, device, *words = sys.argv[1:]
    briefly = how == "brief"
    if words:
        findings = _look_at_script(Path(words[0]), words[1:], Path(folder, "shared.pt"), briefly=briefly)
    else:
        findings = _look_at_layers(device, briefly=briefly)
    if not briefly:
        from holdfast.tools.doctor.machine import machine_info

        findings["machine"] = machine_info(environment, findings.get("device", "cpu"))
    made = Path(folder, f"{how}.new")
    made.write_text(json.dumps(findings))
    made.rename(made.with_suffix(".json"))


def _look_at_layers(device: str, *, briefly: bool) -> dict[str, Any]:
    from holdfast.tools.doctor.checks import examine, thread_counts
    from holdfast.tools.doctor.layers import usual_subjects
    from holdfast.tools.doctor.machine import why_unusable

    if why := why_unusable(device):
        return {"refused": f"--device {device} cannot be used: {why}"}
    threads = thread_counts() if device == "cpu" else ()
    layers = [examine(subject, threads, briefly=briefly).as_json() for subject in usual_subjects(device)]
    return {"layers": layers, "device": device}


def _look_at_script(script: Path, args: list[str], shared: Path, *, briefly: bool) -> dict[str, Any]:
    from holdfast.engine.reinit_context import application
    from holdfast.tools.doctor.script import ScriptInspected, ScriptInspector

    application.looks = look = ScriptInspector(shared, briefly=briefly)
    sys.argv = [str(script), *args]
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except ScriptInspected:
        return {"seen": look.seen.as_json(), "device": str(look.device)}
    except SystemExit as end:
        return {"error": f"{script.name} ended with sys.exit({end.code!r}) before its first step"}
    except Exception as error:
        traceback.print_exc()
        wrong = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        return {"refused": str(error)} if isinstance(error, ConfigError) else wrong
    return {"error": f"{script.name} ended without training: it never ran session.steps(...)"}


if __name__ == "__main__":
    main()
