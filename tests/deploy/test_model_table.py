"""docs/models.md has the figures of the memory plan."""

from tests.scripts import loaded
from tests.test_house import ROOT


def test_the_tables_of_models_are_up_to_date() -> None:
    """`python deploy/tools/model_table.py` writes them."""
    with loaded(ROOT / "deploy/tools/model_table.py") as script:
        page = script.PAGE.read_text()
        assert page == script.with_tables(page)
