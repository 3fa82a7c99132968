"""What the page of settings says is what the code reads."""

from __future__ import annotations

import pytest
from pydantic_settings import BaseSettings

from tests.settings_page import PAGE, ROOMS, updated


def test_the_page_has_the_tables_that_the_code_makes() -> None:
    page = PAGE.read_text("utf-8")
    assert updated(page) == page, "run `python -m tests.settings_page`"


@pytest.mark.parametrize("settings", [settings for _, settings in ROOMS])
def test_every_setting_says_what_it_is(settings: type[BaseSettings]) -> None:
    silent = [
        name
        for name, field in settings.model_fields.items()
        if not field.description and field.validation_alias is None
    ]
    assert silent == []
