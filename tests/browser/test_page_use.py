"""The page in use: keyboard, actions, connection, token, colours, several runs."""

import looks
import page_states
import pytest
from page_server import PageServer

from holdfast.base import formatting

pytest.importorskip("playwright", reason="not installed: run make browser")


def reach(page, target, most=120):
    """Press Tab until `target` has the focus."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate(looks.FOCUSED) == target:
            return
    raise AssertionError(f"{target} is not reached by Tab")


@pytest.fixture
def server():
    with PageServer({"run-1": page_states.small()}) as server:
        yield server


@pytest.fixture
def page(visit, server):
    page = visit(f"{server.url}?token=secret")
    page.wait_for_selector("#tiles dt")
    page.wait_for_selector("#act-all:not([disabled])")  # the page knows which actions are possible
    return page


def test_every_control_is_reached_by_tab(page):
    wanted = page.evaluate("""() => [...document.querySelectorAll("a, button, input, select, summary, canvas[tabindex], [role=listbox], .scroll, pre")]
      .filter((e) => e.checkVisibility() && !e.disabled).length""")
    seen = []
    for _ in range(wanted + 5):
        page.keyboard.press("Tab")
        place = page.evaluate(
            """() => { const all = [...document.querySelectorAll("*")]; return all.indexOf(document.activeElement); }"""
        )
        if place in seen:
            break
        seen.append(place)
    assert len([place for place in seen if place > 0]) >= wanted > 30


def test_a_worker_is_killed_by_keyboard_alone(page, server):
    reach(page, "lanes")
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    page.wait_for_selector("#drawer[open]")
    assert page.text_content("#drawer-title") == "Worker 3"
    reach(page, "drawer-kill")
    page.keyboard.press("Enter")
    page.wait_for_selector("#confirm[open]")
    page.keyboard.press("Enter")  # the first choice is to cancel
    page.wait_for_selector("#confirm:not([open])", state="attached")
    assert server.actions == []
    page.keyboard.press("Enter")
    reach(page, "confirm-yes")
    page.keyboard.press("Enter")
    looks.wait_for_text(page, "drawer-said", "requested")
    assert server.actions == [{"action": "kill", "rank": 3}]
    page.keyboard.press("Escape")
    assert page.evaluate(looks.FOCUSED) == "lanes"


def test_each_lane_says_what_it_shows(page):
    lane = looks.plain(page.get_attribute("#lane-2", "aria-label"))
    assert lane == (
        "Worker 2, lost, killed by SIGKILL, step 98, node 0, fault at 4.1 s: kill, death detected at 4.1 s: killed by SIGKILL"
    )
    assert page.get_attribute("#lane-2", "aria-posinset") == "3"


def test_actions_send_what_they_say(page, server):
    page.fill("#act-scale input", "6")
    page.press("#act-scale input", "Enter")
    looks.wait_for_text(page, "act-said", "requested")
    page.fill("#act-set input", "0.01")
    page.click("#act-set button")
    page.select_option("#act-set select", "strategy")
    page.fill("#act-set input", "forward")
    page.click("#act-set button")
    page.click("#act-save button")
    page.click("#act-stop button")
    page.click("#confirm-yes")
    page.fill("#act-kill input", "2")
    page.click("#act-kill button")
    looks.wait_for_text(page, "act-said", f"Worker 2 is not alive; these are: workers 0{formatting.DASH}1, 3.")
    assert server.actions == [
        {"action": "scale", "workers": 6},
        {"action": "set", "lr": 0.01},
        {"action": "set", "strategy": "forward"},
        {"action": "save"},
        {"action": "stop"},
    ]


def test_a_refused_action_says_why(page, server):
    server.answer = (409, {"error": "lr must be a positive number, got -1"})
    page.fill("#act-set input", "-1")
    page.click("#act-set button")
    looks.wait_for_text(page, "act-said", "lr must be a positive number, got -1")
    assert page.get_attribute("#act-said", "data-kind") == "error"


def test_the_token_leaves_the_address_and_without_it_nothing_can_be_done(visit, server):
    page = visit(f"{server.url}?token=secret")
    page.wait_for_selector("#tiles dt")
    assert page.url == server.url
    page.wait_for_selector("#act-save button:enabled")
    other = visit(server.url)
    other.wait_for_selector("#tiles dt")
    looks.wait_for_text(other, "actions-note", "Actions need the token")
    assert other.is_disabled("#act-save button")
    other.fill("#act-token input", "wrong")
    other.click("#act-token button")
    other.click("#act-save button")
    looks.wait_for_text(other, "act-said", "Not allowed")
    other.fill("#act-token input", "secret")
    other.click("#act-token button")
    other.click("#act-save button")
    looks.wait_for_text(other, "act-said", "requested")
    assert server.actions == [{"action": "save"}]


def test_beyond_loopback_the_page_asks_for_the_token(visit):
    with PageServer({"run-1": page_states.small()}, "far") as server:
        page = visit(server.url)
        page.wait_for_selector("#token-view:not([hidden])")
        assert page.is_hidden("#run-view")
        page.fill("#token-input", "far")
        page.press("#token-input", "Enter")
        page.wait_for_selector("#tiles dt")


def test_a_lost_connection_is_said_and_old_data_stay(page, server):
    server.stop()
    page.wait_for_selector("#banner:not([hidden])")
    assert "Connection lost at" in page.text_content("#banner-text")
    assert page.evaluate("document.body.hasAttribute('data-old')")
    looks.wait_for_text(page, "announce", "Connection lost")
    assert page.text_content("#sentence") == "Training: step 320 of 400, 3 of 4 workers."
    page.wait_for_selector("#act-save button:disabled")
    server.runs["run-1"]["state"] = {"level": "good", "sentence": "Training: step 7 of 400, 4 workers."}
    server.runs["run-1"]["version"] = 0  # of another launcher
    server.start()
    looks.wait_for_text(page, "sentence", "step 7 of 400")
    page.wait_for_selector("#banner", state="hidden")
    looks.wait_for_text(page, "announce", "Connected again")
    assert not page.evaluate("document.body.hasAttribute('data-old')")
    page.wait_for_selector("#act-save button:enabled")


def test_a_server_with_too_many_readers_says_so(visit, server):
    server.is_full = True
    page = visit(server.url)
    looks.wait_for_text(
        page, "banner-text", "The server refuses: 16 pages follow runs already; close one; trying again"
    )
    server.is_full = False
    page.click("#retry")
    page.wait_for_selector("#tiles dt")


def test_a_launcher_that_comes_back_with_another_run_is_followed(page, server):
    server.stop()
    page.wait_for_selector("#banner:not([hidden])")
    again = PageServer({"run-2": page_states.small("run-2") | {"now_s": 1.0}})
    again.port = server.port
    with again:
        looks.wait_for_text(page, "run-facts", "run-2")
        page.wait_for_selector("#banner", state="hidden")


def test_the_end_of_the_launcher_after_the_end_of_the_run_is_no_alarm(page, server):
    ended = page_states.small(live=False)
    server.change("run-1", run=ended["run"], state=ended["state"])
    looks.wait_for_text(page, "sentence", "Done after 400 steps")
    server.stop()
    looks.wait_for_text(page, "banner-text", "The run has ended")
    assert page.text_content("#link") == "Ended"


def test_changes_reach_every_part_of_the_page(page, server):
    server.change("run-1", events=[{"id": 9, "t_s": 9.0, "kind": "lost", "rank": 1, "text": "worker 1 has died"}])
    looks.wait_for_text(page, "announce", "worker 1 has died")
    assert looks.plain(page.text_content("#events-list li:first-child")) == "9.0 slostworker 1 has died"
    row = page_states.small()["recoveries"][0] | {"id": 2, "t_s": 9.0, "lost": [{"rank": 1, "cause": "hang"}]}
    server.change("run-1", recoveries=[row | {"parts": {}, "duration_s": 0.2}])
    page.wait_for_selector(".recovery:nth-child(2)")
    page.click(".recovery:first-child summary")
    assert "known once training has resumed" in page.text_content(".recovery:first-child")
    server.change("run-1", recoveries=[row])
    page.wait_for_selector(".recovery:first-child tbody tr:nth-child(6)")
    assert page.is_visible(".recovery:first-child table")  # it stays open


def test_several_runs_stand_side_by_side(visit):
    runs = {name: page_states.small(name) for name in ("a", "b")} | {"c": page_states.small("c", live=False)}
    with PageServer(runs) as server:
        page = visit(server.url)
        page.wait_for_selector("#runs-cards article:nth-child(3)")
        assert page.text_content("#runs-title") == "3 runs, 2 live"
        assert page.locator("#compare thead th").all_text_contents() == [
            "",
            "train.py (a)",
            "train.py (b)",
            "train.py (c)",
        ]
        page.click("text=train.py (b)")
        page.wait_for_selector("#tiles dt")
        assert page.url.endswith("?run=b")
        page.click("#all-runs")
        page.wait_for_selector("#runs-cards article")


def test_the_scheme_can_be_chosen_and_stays(visit, server):
    page = visit(server.url, scheme="light")
    page.wait_for_selector("#tiles dt")
    paper = "getComputedStyle(document.querySelector('.card')).backgroundColor"
    light = page.evaluate(paper)
    page.select_option("#scheme", "dark")
    assert page.evaluate(paper) != light
    page.reload()
    page.wait_for_selector("#tiles dt")
    assert page.evaluate(paper) != light
    page.emulate_media(color_scheme="dark")
    page.select_option("#scheme", "light")
    assert page.evaluate(paper) == light


def test_a_chart_is_read_point_by_point(page):
    chart = page.locator(".chart canvas").first
    chart.focus()
    page.keyboard.press("Home")
    assert looks.plain(page.locator(".chart output").first.text_content()) == "2.604 at step 1, 0.8 s"
    page.keyboard.press("ArrowRight")
    assert "at step 2," in page.locator(".chart output").first.text_content()
    assert chart.get_attribute("aria-label").startswith("Loss: now ")


def test_the_goodput_bar_says_the_same_as_the_state(page, server):
    spent = server.runs["run-1"]["goodput"]
    wanted = {"useful": spent["useful_s"]} | {cause: value for cause, value in spent["badput_s"].items() if value}
    shares = page.evaluate("""() => Object.fromEntries([...document.querySelectorAll("#time-bar .segment")]
      .map((s) => [s.dataset.cause, Number(s.style.flexGrow)]))""")
    assert shares == pytest.approx({cause: wanted[cause] / spent["wall_s"] for cause in shares}, abs=1e-6)
    assert sum(shares.values()) > 0.998
    legend = page.evaluate("""() => Object.fromEntries([...document.querySelectorAll("#time-legend li")]
      .map((e) => [e.querySelector("i").dataset.cause, e.querySelector("b").textContent]))""")
    assert {cause: looks.plain(text) for cause, text in legend.items()} == {
        cause: formatting.seconds(value) for cause, value in wanted.items()
    }
