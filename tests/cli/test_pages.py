"""The pages in a browser, as wide as a phone and as a desk: nothing overlaps or sticks out, and figures can be saved."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from made_up_runs import KILLS, made_up_demo, made_up_report, made_up_run

from holdfast.observe.page.comparison import render_comparison
from holdfast.observe.page.curves import NamedRun
from holdfast.observe.page.html import render_run
from holdfast.records.types import FaultFired, Left, Recovered, RunStarted, WorkerFenced
from holdfast.summary.build import build_report
from holdfast_lab.pages.demo import render_demo

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: chromium)")

WIDTHS = (400, 1400)
LEAST_PX = 8
"""Height of the smallest letters."""

LOOK = """
<script>
const found = { name: "NAME", page: document.documentElement.scrollWidth, window: innerWidth, overlaps: [], small: [], outside: [], saved: {} };
const crosses = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1.5;
for (const figure of document.querySelectorAll("figure")) {
  const texts = [...figure.querySelectorAll("svg text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
  const box = figure.querySelector("svg").getBoundingClientRect();
  texts.forEach(([a, one], place) => {
    if (one.height < LEAST) found.small.push([a, one.height]);
    if (one.left < box.left - 2 || one.right > box.right + 2) found.outside.push(a);
    for (const [b, other] of texts.slice(place + 1)) if (crosses(one, other)) found.overlaps.push([a, b]);
  });
}
const whole = new Set(["DIV", "TABLE", "P", "H1", "H2", "H3", "DL", "PRE", "UL", "FIGURE"]);
for (const part of document.querySelectorAll("main > *, section > *"))
  if (whole.has(part.tagName) && part.getBoundingClientRect().right > innerWidth) found.outside.push(part.outerHTML.slice(0, 60));
(async () => {
  let waiting = [];
  HTMLAnchorElement.prototype.click = function () {
    waiting.push(fetch(this.href).then((answer) => answer.blob()).then((blob) => { found.saved[this.download] = [blob.type, blob.size]; }));
  };
  for (const button of document.querySelectorAll(".save button")) await button.onclick();
  await Promise.all(waiting);
  parent.postMessage(JSON.stringify(found), "*");
})();
</script>
"""
FRAMES = """<!doctype html><body><script>
addEventListener("message", (said) => {
  const place = document.createElement("pre");
  place.textContent = said.data;
  document.body.append(place);
});
</script>
"""


def look_at(pages, folder):
    """Return what the browser finds on each page at each of the widths, by name and width.

    A window cannot be as narrow as a phone; a frame can.
    """
    frames = ""
    for name, page in pages.items():
        look = LOOK.replace("LEAST", str(LEAST_PX)).replace("NAME", name)
        (folder / f"{name}.html").write_text(page.replace("</body>", f"{look}</body>"))
        frames += "".join(
            f'<iframe src="{name}.html" width="{w}" height="900" style="border:0"></iframe>' for w in WIDTHS
        )
    (folder / "frames.html").write_text(FRAMES + frames)
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=30000", "--dump-dom"]
    shown = subprocess.run(
        [CHROMIUM, *words, f"file://{folder}/frames.html"], capture_output=True, text=True, check=True, timeout=150
    ).stdout
    found = [json.loads(html.unescape(text)) for text in re.findall(r"<pre>(.*?)</pre>", shown)]
    return {(one["name"], one["window"]): one for one in found}


def a_hang():
    """A run whose first failure is a hang, of which every mark of a timeline occurs."""
    records, wall_s = made_up_run(kills=KILLS[:1])
    fault = next(r for r in records if isinstance(r, FaultFired))
    start = next(r for r in records if isinstance(r, RunStarted))
    records += [
        WorkerFenced(t_s=fault.t_s + 0.02, rank=1, step=31, silent_s=0.02, reason="why", stack="File train.py"),
        replace(start, rank=4),  # a spare
        replace(start, t_s=wall_s * 0.6, rank=5, step=60),
        Recovered(t_s=wall_s * 0.6, rank=0, step=60, lost=(), survivors=(0, 2, 3, 4, 5), decision="grow", redone_steps=0,
                  generation=2, joined=(5,), held_s=0.04),
        Left(t_s=wall_s * 0.6 + 1, rank=2, step=80),
    ]  # fmt: skip
    return build_report(records, started=range(4), wall_s=wall_s, seed=0), records


@pytest.fixture(scope="module")
def pages():
    report, records = made_up_report(kills=(*KILLS, (2, 80, "allreduce")))
    results, by_name = made_up_demo()
    runs = [NamedRun(name=row["name"], report=row, records=by_name[row["name"]]) for row in results["rows"]]
    run = render_run(report, records)
    broken = re.sub(r"(<text[^>]*>worker 2</text>)", r"\1\1", run, count=1).replace(">loss<", f">{'loss ' * 60}<")
    return {
        "run": run,
        "hang": render_run(*a_hang()),
        "demo": render_demo(results, by_name),
        "comparison": render_comparison(runs),
        "broken": broken.replace("<main>", "<main><pre style='width:2000px'>wide</pre>"),
    }


@pytest.fixture(scope="module")
def seen(pages, tmp_path_factory):
    found = look_at(pages, tmp_path_factory.mktemp("pages"))
    assert found.keys() == {(name, width) for name in pages for width in WIDTHS}
    return found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["run", "hang", "demo", "comparison"])
def test_nothing_overlaps_or_sticks_out(name, width, seen):
    found = seen[name, width]

    assert found["page"] <= width
    assert (found["overlaps"], found["small"], found["outside"]) == ([], [], [])


@pytest.mark.parametrize(("name", "figures"), [("run", 3), ("hang", 3), ("demo", 8), ("comparison", 2)])
def test_every_figure_can_be_saved_with_its_values(name, figures, pages, seen):
    saved = seen[name, 1400]["saved"]
    kinds = {"svg": "image/svg+xml", "png": "image/png", "csv": "text/csv"}

    assert pages[name].count("<figure>") == figures
    assert len(saved) >= 6
    assert {file: kind for file, (kind, _) in saved.items()} == {file: kinds[file.rpartition(".")[2]] for file in saved}
    assert all(size > (20 if file.endswith("csv") else 1000) for file, (_, size) in saved.items())


def test_the_browser_would_see_what_is_wrong(seen):
    for width in WIDTHS:
        found = seen["broken", width]
        assert ["worker 2", "worker 2"] in found["overlaps"]
        assert any(text.startswith("loss loss") for text in found["outside"])
        assert found["page"] > width
