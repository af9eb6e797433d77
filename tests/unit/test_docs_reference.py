"""The reference pages name every record, field, setting and variable that there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from holdfast.base.options import fields_of, variable
from holdfast.config import Settings
from holdfast.records.encoding import RECORDS
from holdfast.records.types import STAMPS

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"


def first_cells(text: str) -> set[str]:
    """Return the words in backticks of the first cell of each row of a page's tables."""
    cells = re.findall(r"^\| ((?:`[^`|]+`(?:, )?)+) \|", text, flags=re.MULTILINE)
    return {word for cell in cells for word in re.findall(r"`([^`]+)`", cell)}


def section(page: str, heading: str) -> str:
    return page.split(f"\n### {heading}\n")[1].split("\n#")[0]


def test_the_page_of_records_has_a_section_for_each_record():
    page = (REFERENCE / "records.md").read_text()

    assert sorted(re.findall(r"^### (\w+)$", page, flags=re.MULTILINE)) == sorted(RECORDS)


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_the_section_of_a_record_has_a_row_for_each_field(name):
    text = section((REFERENCE / "records.md").read_text(), name)
    fields = {field.name for field in dataclasses.fields(RECORDS[name])} - set(STAMPS)

    assert fields <= first_cells(text)


def test_the_page_of_settings_has_a_row_for_each_setting():
    page = (REFERENCE / "configuration.md").read_text()
    names = {field.name for field in dataclasses.fields(Settings)}

    assert names <= first_cells(page)


def test_a_row_of_a_setting_names_its_option_and_its_variable():
    page = (REFERENCE / "configuration.md").read_text()
    rows = {match[1]: match[0] for match in re.finditer(r"^\| `(\w+)` \|.*$", page, flags=re.MULTILINE)}

    for each in fields_of(Settings):
        if each.option.help:
            assert f"`{each.flag}`" in rows[each.name]
        assert f"`{variable(each.name)}`" in rows[each.name]
