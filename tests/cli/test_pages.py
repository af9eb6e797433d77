"""The pages in a browser, as wide as a phone and as a desk: nothing overlaps or sticks out, and figures can be saved."""

import html
import json
import re
import shutil
import subprocess

import pytest
from made_up_runs import KILLS, made_up_demo, made_up_report

from holdfast.report import render_demo, render_run
from holdfast.report.comparison import render_comparison
from holdfast.report.curves import NamedRun

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: chromium)")

WIDTHS = (400, 1400)
LEAST_PX = 8
"""Height of the smallest letters."""

LOOK = """
<script>
const found = { page: document.documentElement.scrollWidth, window: innerWidth, overlaps: [], small: [], outside: [], saved: {} };
const crosses = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1.5;
for (const figure of document.querySelectorAll("figure")) {
  const texts = [...figure.querySelectorAll("svg text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
  const scroll = figure.querySelector(".scroll"), box = scroll.getBoundingClientRect();
  texts.forEach(([a, one], place) => {
    if (one.height < LEAST) found.small.push([a, one.height]);
    if (one.left < box.left - 1 || one.right > box.left + scroll.scrollWidth + 1) found.outside.push(a);
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


def seen(page, folder):
    """Return what the browser finds on a page, at each of the widths; a window cannot be as narrow as a phone, a frame can."""
    (folder / "page.html").write_text(page.replace("</body>", LOOK.replace("LEAST", str(LEAST_PX)) + "</body>"))
    frames = "".join(
        f'<iframe src="page.html" width="{width}" height="900" style="border:0"></iframe>' for width in WIDTHS
    )
    (folder / "frames.html").write_text(FRAMES + frames)
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    shown = subprocess.run(
        [CHROMIUM, *words, f"file://{folder}/frames.html"], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    found = [json.loads(html.unescape(text)) for text in re.findall(r"<pre>(.*?)</pre>", shown)]
    assert sorted(one["window"] for one in found) == list(WIDTHS), shown[-500:]
    return found


def pages():
    report, records = made_up_report(kills=(*KILLS, (2, 80, "allreduce")))
    results, by_name = made_up_demo()
    runs = [NamedRun(name=row["name"], report=row, records=by_name[row["name"]]) for row in results["rows"]]
    return {
        "run": (render_run(report, records), 3),
        "demo": (render_demo(results, by_name), 8),
        "comparison": (render_comparison(runs), 2),
    }


@pytest.mark.parametrize("name", ["run", "demo", "comparison"])
def test_nothing_overlaps_or_sticks_out_and_every_figure_can_be_saved(name, tmp_path):
    page, figures = pages()[name]

    for found in seen(page, tmp_path):
        assert found["page"] <= found["window"], found
        assert (found["overlaps"], found["small"], found["outside"]) == ([], [], []), found["window"]
        kinds = [kind for kind, size in found["saved"].values() if size > 100 or kind == "text/csv"]
        names = len(found["saved"])
        assert names == len(kinds)
        assert {kinds.count(kind) for kind in ("image/svg+xml", "image/png", "text/csv")} == {names // 3}
        assert page.count("<figure>") == figures
        assert names // 3 >= min(figures, 2)


def test_the_browser_would_see_an_overlap(tmp_path):
    report, records = made_up_report()
    page = render_run(report, records)
    twice = re.sub(r"(<text[^>]*>worker 2</text>)", r"\1\1", page, count=1)
    assert twice != page
    found = seen(twice.replace("<main>", "<main><pre style='width:2000px'>wide</pre>"), tmp_path)

    assert all(["worker 2", "worker 2"] in one["overlaps"] for one in found)
    assert all(one["page"] > one["window"] or one["outside"] for one in found)
