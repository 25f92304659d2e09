from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from turngym.config import dump, load, merge
from turngym.errors import ConfigError


@dataclass(frozen=True)
class Region:
    """A choice."""


@dataclass(frozen=True)
class Clip(Region):
    low: float = 0.2
    high: float = 0.2


@dataclass(frozen=True)
class Soft(Region):
    tau: float = 1.0


@dataclass(frozen=True)
class Inner:
    size: int = 8
    rates: dict[str, float] = field(default_factory=dict)
    region: Region | None = field(default_factory=Clip)
    terms: tuple[Region, ...] = ()


@dataclass(frozen=True)
class Motor:
    kind: str = "petrol"
    doors: int = 4


@dataclass(frozen=True)
class Outer:
    name: str = "a"
    inner: Inner = field(default_factory=Inner)
    motor: Motor = field(default_factory=Motor)
    resume: bool = False


Recipe = Callable[[str], str]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    def write(text: str) -> str:
        path = tmp_path / "recipe.toml"
        path.write_text(text)
        return f"@{path}"

    return write


def test_flags_override_the_recipe_which_overrides_the_default(recipe: Recipe) -> None:
    argument = recipe('name = "b"\n[inner]\nsize = 4\nrates = {guess = 0.5}\n')
    config = load(Outer(), [argument, "--inner.size", "2", "--resume"], prog="x")
    assert config == Outer("b", Inner(2, {"guess": 0.5}), resume=True)


def test_numbers_by_name_are_pairs_whatever_the_default(recipe: Recipe) -> None:
    flags = ["--inner.rates", "skip", "1"]
    assert load(Outer(), flags, prog="x").inner.rates == {"skip": 1.0}
    argument = recipe("[inner]\nrates = {guess = 0.5}\n")
    assert load(Outer(), [argument, *flags], prog="x").inner.rates == {"skip": 1.0}
    assert load(Outer(), [argument], prog="x").inner.rates == {"guess": 0.5}
    with pytest.raises(SystemExit):
        load(Outer(), ["--inner.rates", "skip"], prog="x")


def test_an_unknown_key_is_refused_with_its_path_and_a_suggestion(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'inner.sise'; did you mean 'size'\?"):
        load(Outer(), [recipe("[inner]\nsise = 4\n")], prog="x")


def test_a_value_of_the_wrong_type_is_named(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"'inner.size'.*got 'many'"):
        load(Outer(), [recipe('[inner]\nsize = "many"\n')], prog="x")


def test_broken_toml_and_missing_files_are_named(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(Outer(), [recipe("name = ")], prog="x")
    with pytest.raises(ConfigError, match=r"nowhere\.toml does not exist"):
        load(Outer(), ["@nowhere.toml"], prog="x")


def test_an_unknown_flag_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        load(Outer(), ["--inner.sise", "3"], prog="x")
    assert stopped.value.code == 2
    assert "--inner.size" in capsys.readouterr().err


def test_kind_chooses_among_dataclasses() -> None:
    changed = merge(Outer(), {"inner": {"region": {"kind": "Soft", "tau": 2.0}}})
    assert changed.inner.region == Soft(2.0)
    kept = merge(Outer(), {"inner": {"region": {"low": 0.1}}})
    assert kept.inner.region == Clip(0.1, 0.2)
    assert merge(Outer(), {"inner": {"terms": [{"kind": "Clip"}]}}).inner.terms == (Clip(),)
    assert merge(Outer(), {"inner": {"terms": []}}).inner.terms == ()


def test_a_field_called_kind_is_a_setting_like_others(recipe: Recipe) -> None:
    argument = recipe('[motor]\nkind = "steam"\n')
    assert load(Outer(), [argument, "--motor.doors", "2"], prog="x").motor == Motor("steam", 2)
    assert load(Outer(), ["--motor.kind", "steam"], prog="x").motor == Motor("steam")
    assert dump(Motor("steam")) == {"kind": "steam", "doors": 4}


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown kind 'Sift'; did you mean 'Soft'"):
        merge(Outer(), {"inner": {"region": {"kind": "Sift"}}})


def test_dump_tells_which_dataclass_it_was() -> None:
    assert dump(Inner())["region"] == {"kind": "Clip", "low": 0.2, "high": 0.2}
