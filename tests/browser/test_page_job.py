"""A real job and the page of its launcher: a worker killed from the page, and the launcher itself that dies and comes back."""

import os
import signal
import time

import looks
import pytest
from jobs import assert_landed
from watched_job import WatchedJob

from holdfast.base import formatting
from holdfast.summary.goodput import RECOVERY_PARTS

pytest.importorskip("playwright", reason="not installed: run make browser")

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

SHOWN_S = 1.0
"""From the click until the page shows the death."""


def legend(page):
    """The words of the goodput bar's legend, by cause."""
    found = page.evaluate("""() => Object.fromEntries([...document.querySelectorAll("#time-legend li")]
      .map((e) => [e.querySelector("i").dataset.cause, e.querySelector("b").textContent]))""")
    return {cause: looks.plain(text) for cause, text in found.items()}


def parts(page):
    """The parts of the first recovery that the page shows, by cause."""
    found = page.evaluate("""() => Object.fromEntries([...document.querySelectorAll(".recovery:first-child tbody tr")]
      .map((row) => [row.cells[0].dataset.cause, row.cells[1].textContent]))""")
    return {cause: looks.plain(text) for cause, text in found.items()}


def test_a_worker_is_killed_from_the_page_and_its_numbers_are_those_of_the_report(visit, tmp_path, record_property):
    with WatchedJob(tmp_path, script=(160, 0.1)) as job:
        page = visit(job.url())
        page.set_default_timeout(60_000)
        page.wait_for_selector("#lane-2[data-state=training]")
        looks.wait_for_text(page, "sentence", "Training: step")
        page.click("#lane-2")
        page.click("#drawer-kill")
        began_s = time.monotonic()
        page.click("#confirm-yes")
        page.wait_for_selector("#lane-2[data-state=lost]")
        shown_s = time.monotonic() - began_s
        record_property("death shown after s", round(shown_s, 3))
        print(f"the page shows the death after {shown_s:.2f} s")
        looks.wait_for_text(page, "drawer-said", "worker 2 is killed")
        page.click("#drawer-close")
        page.wait_for_selector(".recovery")
        page.click(".recovery summary")
        page.wait_for_selector(".recovery tbody tr")
        page.click("#lane-0")
        looks.wait_for_text(page, "drawer-log", "step 5")
        page.click("#drawer-close")
        assert job.process.wait(120) == 0, job.printed()
        looks.wait_for_text(page, "link", "Ended")
        report = job.report()
        assert_landed(report, 2)
        assert shown_s < SHOWN_S
        spent = report["goodput"]
        wanted = {"useful": spent["useful_s"]} | {cause: s for cause, s in spent["badput_s"].items() if s}
        assert legend(page) == {cause: formatting.seconds(s) for cause, s in wanted.items()}
        assert formatting.percent(spent["ratio"]) in looks.plain(page.text_content("#time-sentence"))
        assert [failure["rank"] for failure in report["failures"]] == [2]
        lost = {cause: spent["badput_s"][cause] for cause in RECOVERY_PARTS if spent["badput_s"][cause]}
        shown = {cause: formatting.seconds(s) for cause, s in lost.items()}
        assert parts(page) == shown | {"whole": formatting.seconds(sum(lost.values()))}
        assert page.text_content("#tiles dt") == str(report["steps"])


def test_the_page_outlives_its_launcher(visit, tmp_path):
    saving = ("--checkpoint-dir", "ckpt", "--checkpoint-every", "5")
    with WatchedJob(tmp_path, *saving, script=(400, 0.1)) as job:
        page = visit(job.url())
        page.set_default_timeout(60_000)
        page.wait_for_selector("#checkpoints-table tbody tr")
        os.kill(job.process.pid, signal.SIGKILL)
        page.wait_for_selector("#banner:not([hidden])")
        before = page.text_content("#sentence")
        assert before.startswith("Training: step")
        job.process.wait(30)
        time.sleep(2)
        assert page.text_content("#sentence") == before
        command = page.text_content("#resume-command")
    assert "--resume" in command
    with WatchedJob(tmp_path, *saving, "--resume", script=(400, 0.02), port=job.port) as again:
        again.url()
        page.wait_for_selector("#banner", state="hidden")
        looks.wait_for_text(page, "sentence", "Training: step")
        page.wait_for_selector("#act-stop button:enabled")  # with the token that the page has
        page.click("#act-stop button")
        page.click("#confirm-yes")
        assert again.process.wait(60) == 4, again.printed()
        looks.wait_for_text(page, "link", "Ended")
        looks.wait_for_text(page, "sentence", "Stopped on request")
