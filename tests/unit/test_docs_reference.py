"""The reference pages name every record, field, setting and variable that there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from holdfast.config import Settings
from holdfast.records.encoding import RECORDS
from holdfast.records.types import STAMPS

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"


def first_cells(text: str) -> set[str]:
    """Return the words in backticks of the first cell of each row of a page's tables."""
    cells = re.findall(r"^\| ((?:`[^`|]+`(?:, )?)+) \|", text, flags=re.MULTILINE)
    return {word for cell in cells for word in re.findall(r"`([^`]+)`", cell)}


def test_the_page_of_records_has_a_section_for_each_record_with_a_row_for_each_field():
    page = (REFERENCE / "records.md").read_text()

    assert sorted(re.findall(r"^### (\w+)$", page, flags=re.MULTILINE)) == sorted(RECORDS)
    for name, kind in RECORDS.items():
        fields = {field.name for field in dataclasses.fields(kind)} - set(STAMPS)
        assert fields <= first_cells(page.split(f"\n### {name}\n")[1].split("\n#")[0]), name


def test_the_page_of_settings_has_a_row_for_each_setting():
    page = (REFERENCE / "configuration.md").read_text()
    names = {field.name for field in dataclasses.fields(Settings)}

    assert names <= first_cells(page)
