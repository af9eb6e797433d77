"""The documentation site builds without a warning, has every public name, and its search needs no server."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

ROOT = Path(__file__).parents[2]
LIMIT_S = 400
"""40 s of processor time: minutes where the other tests keep all cores busy."""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


pytestmark = pytest.mark.timeout(LIMIT_S + 20)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    words = ["-W", "--keep-going", "-q", "-b", "html", "-d", str(folder / "doctrees"), str(ROOT / "docs")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *words, str(folder / "html")],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_every_public_name_is_in_the_reference(site):
    page = (site / "reference" / "api.html").read_text()
    missing = [name for name in holdfast.__all__ if f'id="holdfast.{name}"' not in page and name != "__version__"]

    assert missing == []


def test_every_page_can_be_reached_from_the_first_one(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    contents = (site / "genindex.html").read_text()

    assert len(pages) > 50
    assert [page for page in pages if not (site / page).is_file()] == []
    assert [page for page in pages if f'href="{page}"' not in contents and page != Path("index.html")] == []


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: chromium)")
def test_the_search_needs_no_server(site):
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000", "--dump-dom"]
    found = subprocess.run(
        [CHROMIUM, *words, f"file://{site}/search.html?q=straggler"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout

    assert "Search finished, found" in found
    assert 'href="how-to/detect-failures.html"' in found.split('id="search-results"')[1]
