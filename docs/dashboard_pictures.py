"""Take the pictures of docs/pictures: every view of the dashboard, in both widths and both colour schemes: `make pictures`.

A real job is started, and a worker of it killed from the page; the job of 1,000 workers has failures of the simulator.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Locator, Page, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from large_job import LargeRun  # noqa: E402 - found through the line above
from watched_job import WatchedJob, free_port  # noqa: E402

from holdfast.observe.monitor.feed import Feed  # noqa: E402
from holdfast.observe.monitor.server import DashboardServer  # noqa: E402
from holdfast.observe.monitor.token import Token  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
WIDTHS = {"wide": 1400, "narrow": 400}
HEIGHTS = {"wide": 900, "narrow": 780}
SCHEMES = ("light", "dark")
MOST_BYTES = 150_000
SAVING = ("--checkpoint-dir", "ckpt", "--checkpoint-every", "25")


class Photographer:
    """Opens pages of one width and one scheme, and keeps their pictures."""

    def __init__(self, browser: Browser, width: str, scheme: str) -> None:
        self.width, self.scheme = width, scheme
        self._context = browser.new_context(
            viewport={"width": WIDTHS[width], "height": HEIGHTS[width]}, color_scheme=scheme, reduced_motion="reduce"
        )
        self._context.set_default_timeout(90_000)

    def visit(self, url: str) -> Page:
        """Open a page."""
        page = self._context.new_page()
        page.goto(url)
        return page

    def keep(self, name: str, what: Page | Locator, *, whole: bool = False) -> None:
        """Write a picture of a page, or of a part of it.

        Raises:
            ValueError: it is larger than a picture of the documentation may be.
        """
        taken = what.screenshot(full_page=whole) if isinstance(what, Page) else what.screenshot()
        path = PICTURES / f"dashboard-{name}-{self.width}-{self.scheme}.png"
        image = Image.open(io.BytesIO(taken)).convert("RGB")
        image = image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)  # rare colours stay
        image.save(path, optimize=True)
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"{path.name} has {path.stat().st_size} bytes; at most {MOST_BYTES} are wanted")
        sys.stdout.write(f"{path.relative_to(ROOT)} {path.stat().st_size}\n")

    def close(self) -> None:
        """Close its pages."""
        self._context.close()


def of_a_job(photographer: Photographer, page: Page) -> None:
    """Take the views of a run in which a worker has died."""
    page.wait_for_selector(".recovery tbody tr", state="attached")
    page.evaluate("scrollTo(0, 0)")
    photographer.keep("run", page, whole=True)
    page.click(".recovery:last-child summary")
    photographer.keep("recovery", page.locator("#recoveries"))
    page.click("#lane-1", position={"x": 20, "y": 10})
    page.locator("#drawer-log", has_text="step").wait_for()
    photographer.keep("worker", page)
    page.click("#drawer-kill")
    page.wait_for_selector("#confirm[open]")
    photographer.keep("confirm", page)
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")


def kill_a_worker(page: Page) -> None:
    """Kill worker 2 from the page, and have a new one started for it."""
    page.locator("#sentence", has_text=re.compile(r"step (3[0-9]|[4-9]\d|\d{3})")).wait_for()
    page.click("#lane-2")
    page.click("#drawer-kill")
    page.click("#confirm-yes")
    page.wait_for_selector("#lane-2[data-state=lost]")
    page.click("#drawer-close")
    page.fill("#act-scale input", "4")
    page.click("#act-scale button")
    page.wait_for_selector("#lane-4[data-state=training]")
    page.wait_for_timeout(4000)


@contextmanager
def serving(folder: Path, run: LargeRun) -> Iterator[DashboardServer]:
    """Serve one run to callers that have the token, as beyond loopback."""
    server = DashboardServer("127.0.0.1", 0, Token.in_folder(folder))
    server.feeds["large"] = Feed(run)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def serving_folders(folder: Path, *reports: str) -> Iterator[str]:
    """Run ``holdfast dashboard`` over finished runs; yield its URL."""
    command = [sys.executable, "-m", "holdfast", "dashboard", *reports, "--port", str(free_port())]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            found = next(filter(None, (re.search(r"dashboard at (\S+)", line) for line in process.stdout)))
            yield found[1]
        finally:
            process.terminate()


def main() -> None:
    """Take all pictures."""
    PICTURES.mkdir(exist_ok=True)
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with tempfile.TemporaryDirectory() as name, sync_playwright() as play:
        folder = Path(name)
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        photographers = [Photographer(browser, *how) for how in itertools.product(WIDTHS, SCHEMES)]
        with WatchedJob(folder, *SAVING, script=(2400, 0.1)) as job:
            pages = [photographer.visit(job.url()) for photographer in photographers]
            kill_a_worker(pages[0])
            for photographer, page in zip(photographers, pages, strict=True):
                of_a_job(photographer, page)
            job.process.kill()
        for photographer, page in zip(photographers, pages, strict=True):
            page.wait_for_selector("#banner:not([hidden])")
            page.evaluate("scrollTo(0, 0)")
            photographer.keep("lost", page)
        of_many_workers(folder, photographers)
        of_several_runs(folder, photographers)
        for photographer in photographers:
            photographer.close()
        browser.close()


def of_many_workers(folder: Path, photographers: list[Photographer]) -> None:
    """Take the view of a job of 1,000 workers, and of a page that has no token."""
    with serving(folder, LargeRun(1000, 100_000, before=99_000, failures=40)) as server:
        for photographer in photographers:
            page = photographer.visit(server.url)
            page.wait_for_selector(".recovery")
            page.locator("#workers").scroll_into_view_if_needed()
            page.evaluate("document.getElementById('workers').scrollIntoView()")
            photographer.keep("thousand", page)
        server.is_local = False
        for photographer in photographers:
            page = photographer.visit(server.address)
            page.wait_for_selector("#token-view:not([hidden])")
            photographer.keep("token", page)


def of_several_runs(folder: Path, photographers: list[Photographer]) -> None:
    """Take the view of three finished runs side by side."""
    faults = {
        "undisturbed": (),
        "one-kill": ("kill:rank=1,step=20",),
        "two-kills": ("kill:rank=1,step=20", "kill:rank=3,step=40"),
    }
    for name, kills in faults.items():
        inject = [word for kill in kills for word in ("--inject", kill)]
        command = [sys.executable, "-m", "holdfast", "run", "-n", "4", "--fabric", "gloo", "--report", name, *inject]
        subprocess.run([*command, "train.py", "80", "0.1"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    with serving_folders(folder, *faults) as url:
        for photographer in photographers:
            page = photographer.visit(url)
            page.wait_for_selector("#compare tbody tr")
            photographer.keep("runs", page, whole=True)


if __name__ == "__main__":
    main()
