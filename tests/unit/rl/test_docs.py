import doctest
import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest

from turngym.config import dump, merge
from turngym.rl import axes, estimators, terms, trust_region
from turngym.rl.batch import Batch
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


def test_the_components_of_the_page_exist() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Components for any preset")[2]
    rows = [line for line in text.partition("## ")[0].splitlines() if line.startswith("| ")][1:]
    spans = [span for row in rows for span in re.findall(r"`([^`]+)`", row.split(" | ")[1])]
    names = vars(axes) | vars(estimators) | vars(terms) | vars(trust_region)
    columns = set(Batch.__dataclass_fields__)
    for span in spans:
        module, dot, name = span.partition(".")
        if span in columns:
            continue
        if dot and module.isidentifier():
            assert hasattr(importlib.import_module(f"turngym.rl.{module}"), name), span
        else:
            eval(span if "(" in span else f"{span}()", dict(names))
    assert len(spans) > 20


def test_no_axis_has_a_field_of_the_name_that_chooses_its_class() -> None:
    bases = (
        *(axes.Shaping, axes.KeepInGroup, estimators.Estimator, trust_region.TrustRegion),
        *(terms.TokenRule, terms.Regularizer),
    )
    kinds = [kind for base in bases for kind in base.__subclasses__()]
    assert not [kind for kind in kinds if "kind" in {f.name for f in fields(kind)}]
    algorithm = merge(
        PRESETS["grpo"],
        {"trust_region": {"kind": "DivergenceMask", "measure": "kl"}, "regularize": []},
    )
    assert merge(PRESETS["dppo"], {"trust_region": dump(algorithm.trust_region)}).trust_region == (
        trust_region.DivergenceMask(measure="kl")
    )


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
