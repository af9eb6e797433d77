"""Tests of the dashboard's page in a real browser; ``make browser`` runs them in an environment that has playwright."""

import os
import shutil
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NAMES = ("chromium", "chromium-browser", "google-chrome")
LOST = "net::ERR_"
"""In the console's line about a request to a server that is away; these tests stop servers."""


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.browser)


def chromium():
    """Return the path of the browser, or None."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="session")
def browser():
    path = chromium()
    if path is None:
        pytest.fail(f"none of {', '.join(NAMES)} is installed; or set CHROMIUM to its path")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        found = play.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield found
        found.close()


@pytest.fixture
def visit(browser):
    """Return a function that opens a page; every error that a page writes fails the test."""
    contexts, errors = [], []

    def visit(url, width=1400, scheme="light", height=900):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: note(message))
        page.goto(url)
        return page

    def note(message):
        if message.type in ("error", "warning") and LOST not in message.text and "status of" not in message.text:
            errors.append(message.text)

    yield visit
    for context in contexts:
        context.close()
    assert errors == []
