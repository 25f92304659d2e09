import doctest
import importlib
from pathlib import Path

import pytest

from turngym.rl.describe import COLUMNS, describe, markdown, row
from turngym.rl.presets import PRESETS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "algorithms.md"


def test_the_page_holds_the_table_of_presets() -> None:
    text = PAGE.read_text(encoding="utf-8")
    _, _, rest = text.partition("<!-- presets: begin -->\n")
    table, _, _ = rest.partition("\n\n<!-- presets: end -->")
    assert table == markdown(), "docs/algorithms.md needs: python -m turngym.rl.describe"


def test_the_examples_of_the_page_run() -> None:
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert (failed, tried > 10) == (0, True)


def test_the_worked_example_is_short() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## A new algorithm")[2]
    example = text.partition("```python\n")[2].partition("```")[0]
    assert len(example.strip().splitlines()) < 20


@pytest.mark.parametrize("name", ["labels", "returns"])
def test_the_examples_of_a_module_run(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(f"turngym.rl.{name}"))
    assert (failed, tried > 0) == (0, True)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_names_its_paper_and_formula(name: str) -> None:
    algorithm = PRESETS[name]
    assert algorithm.name == name
    assert algorithm.paper.startswith(("arXiv:", "doi:"))
    assert len(algorithm.formula) < 130
    assert len(row(algorithm)) == len(COLUMNS)
    assert row(algorithm)[4] != "-"


def test_a_preset_is_described_in_reading_order() -> None:
    found = describe("gspo")
    assert found[0] == ("algorithm", "gspo")
    assert found[1] == ("paper", "arXiv:2507.18071")
    assert dict(found)["ratio"] == "sequence, old"
    assert dict(found)["trust region"] == "Clip(low=0.0003, high=0.0004)"
    assert dict(found)["advantage"] == "group_mean / group_std / none; unit=trajectory"
    assert [label for label, _ in found][-1] == "deviation"


def test_unused_axes_are_dashes() -> None:
    cells = dict(zip(COLUMNS, row(PRESETS["dpo"]), strict=True))
    assert cells["aggregate"] == cells["ratio"] == cells["trust region"] == "-"
    assert row(PRESETS["luffy"])[5] == "token, old, demos p/(p+0.1)"
