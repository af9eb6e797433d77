"""Whatever a run holds, at both widths and in both schemes: nothing overflows, overlaps, is pale, or lacks a name."""

import looks
import page_states
import pytest
from page_server import PageServer

pytest.importorskip("playwright", reason="not installed: run make browser")

RUNS = {
    "small": lambda: [page_states.small()],
    "large": lambda: [page_states.large()],
    "hostile": lambda: [page_states.hostile()],
    "several": lambda: [page_states.small("a"), page_states.hostile(), page_states.small("c", live=False)],
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("name", RUNS)
def test_nothing_overflows_overlaps_or_is_pale(visit, name, width, scheme):
    runs = {run["run"]["id"]: run for run in RUNS[name]()}
    with PageServer(runs) as server:
        page = visit(f"{server.url}?token=secret", width, scheme)
        page.wait_for_selector("#compare tbody" if name == "several" else ".recovery + .recovery, .recovery:only-child")
        page.wait_for_timeout(200)  # frames that draw the rest
        for summary in page.locator(".recovery:first-child summary, #time-meanings:not([hidden]) summary").all():
            if summary.is_visible():
                summary.click()
        page.evaluate("scrollTo(0, 0)")
        assert page.evaluate(looks.OVERFLOW) == 0
        assert page.evaluate(looks.OVERLAPS) == []
        assert page.evaluate(looks.CONTRASTS) == []
        assert looks.unnamed(page) == []


@pytest.mark.parametrize("width", [400, 1400])
def test_the_checks_find_what_is_wrong(visit, width):
    with PageServer({"run-1": page_states.small()}) as server:
        page = visit(server.url, width)
        page.wait_for_selector("#tiles dt")
        page.evaluate("""() => {
          document.getElementById("sentence").style.marginBottom = "-30px";
          document.getElementById("about").style.color = "#ccc";
          document.getElementById("chart-x").parentElement.replaceWith(document.getElementById("chart-x"));
          document.getElementById("time").style.width = "1500px";
        }""")
        assert page.evaluate(looks.OVERFLOW) > 0
        assert page.evaluate(looks.OVERLAPS) != []
        assert page.evaluate(looks.CONTRASTS) != []
        assert looks.unnamed(page) == ["combobox"]


def test_html_in_names_is_text(visit):
    with PageServer({"hostile": page_states.hostile()}) as server:
        server.logs[2] = [page_states.HOSTILE, "\x1b[31mred\x1b[0m"]
        server.answer = (409, {"error": page_states.HOSTILE})
        page = visit(f"{server.url}?token=secret")
        page.wait_for_selector("#tiles dt")
        page.click(".recovery summary")
        page.click("#lane-2")
        looks.wait_for_text(page, "drawer-log", "red")
        assert page.text_content("#drawer-log") == f"{page_states.HOSTILE}\nred"
        page.click("#drawer-close")
        page.click("#act-save button")
        looks.wait_for_text(page, "act-said", page_states.HOSTILE)
        assert page.text_content("#act-said") == page_states.HOSTILE
        assert page.text_content("#sentence") == page_states.HOSTILE
        assert page.evaluate("document.querySelectorAll('main img, dialog img').length") == 0
        assert page.evaluate("[...document.querySelectorAll('b')].every((b) => b.textContent !== 'bold')")
        assert page.title() == f"{page_states.HOSTILE} · Holdfast"
