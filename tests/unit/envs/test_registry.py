import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import turngym
from turngym.envs import registry
from turngym.envs.core import TurnEnv
from turngym.envs.tasks import TaskSet
from turngym.errors import ConfigError, EnvNotFoundError
from turngym.types import Task


class Echo(TurnEnv):
    """Say anything."""

    def __init__(self, *, word: str = "hi", split: str = "train", max_turns: int = 8) -> None:
        super().__init__(split=split, max_turns=max_turns)
        self.word = word

    def tasks(self, split: str) -> TaskSet:
        return TaskSet([Task(id=split, prompt=self.word)])


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    before = dict(registry._registered)
    yield
    for env_id in set(registry._registered) - set(before):
        del registry._registered[env_id]
        del gymnasium.registry[env_id]
    registry.load_plugins.cache_clear()


def test_a_registered_class_is_made_by_gymnasium_with_its_defaults() -> None:
    turngym.register("test/Echo-v0", Echo, max_turns=3, kwargs={"word": "ho"})
    env = gymnasium.make("test/Echo-v0")
    assert env.unwrapped.max_turns == 3  # type: ignore[attr-defined]
    assert env.reset()[0][0]["content"] == "ho"
    assert env.spec is not None
    assert env.spec.kwargs == {"word": "ho", "max_turns": 3}
    other = gymnasium.make("test/Echo-v0", word="hey", split="eval")
    assert other.reset()[1]["task_id"] == "eval"


def test_specs_of_built_in_environments_are_plain_text() -> None:
    for env_id in turngym.envs.env_ids():
        if env_id.startswith("turngym/"):
            spec = gymnasium.make(env_id, max_turns=3).spec
            assert spec is not None
            again = gymnasium.envs.registration.EnvSpec.from_json(spec.to_json())
            assert again.make().unwrapped.max_turns == 3  # type: ignore[attr-defined]


def test_a_class_that_cannot_be_imported_by_name_is_registered_itself() -> None:
    local = type("Local", (Echo,), {"__module__": "nowhere"})
    turngym.register("test/Local-v0", local)
    env = turngym.make("test/Local-v0")
    assert isinstance(env.unwrapped, local)


def test_registering_again_is_quiet_when_nothing_changed() -> None:
    turngym.register("test/Echo-v0", Echo)
    turngym.register("test/Echo-v0", Echo)
    with pytest.warns(UserWarning, match="Overriding"):
        turngym.register("test/Echo-v0", Echo, max_turns=2)


def test_unknown_and_live_arguments_are_refused_when_registering() -> None:
    with pytest.raises(ConfigError, match="did you mean 'word'"):
        turngym.register("test/Echo-v0", Echo, kwargs={"wrd": "x"})
    with pytest.raises(ConfigError, match="JSON values"):
        turngym.register("test/Echo-v0", Echo, kwargs={"word": object()})


def test_unknown_arguments_are_refused_when_making() -> None:
    for make in (turngym.make, gymnasium.make):
        with pytest.raises(ConfigError, match="'levle'; did you mean 'level'"):
            make("turngym/Calculator-v0", levle=1)


def test_an_unknown_id_is_answered_with_the_closest() -> None:
    with pytest.raises(EnvNotFoundError, match="did you mean 'turngym/Lookup-v0'"):
        turngym.make("turngym/Lokup-v0")


def test_the_built_in_environments_are_listed() -> None:
    assert {
        "turngym/Calculator-v0",
        "turngym/Lookup-v0",
        "turngym/MathQA-v0",
        "turngym/PythonTool-v0",
    } <= set(turngym.envs.env_ids())


def test_plugins_are_found_and_a_broken_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "turngym_good_plugin.py").write_text(
        "import turngym\n"
        "turngym.register('plug/Good-v0', 'turngym.envs.calculator:Calculator', max_turns=2)\n"
    )
    (tmp_path / "turngym_bad_plugin.py").write_text("raise RuntimeError('bad plugin')\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def found(*, group: str) -> list[Any]:
        assert group == "turngym.envs"
        return [
            importlib.metadata.EntryPoint("bad", "turngym_bad_plugin", group),
            importlib.metadata.EntryPoint("good", "turngym_good_plugin", group),
        ]

    monkeypatch.setattr(registry, "entry_points", found)
    registry.load_plugins.cache_clear()
    assert turngym.make("plug/Good-v0").unwrapped.max_turns == 2  # type: ignore[attr-defined]
    assert "bad plugin" in caplog.text
    with pytest.raises(EnvNotFoundError, match="plugin 'bad' failed: RuntimeError: bad plugin"):
        turngym.make("plug/Missing-v0")


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import gymnasium, turngym; e = gymnasium.make('turngym/Calculator-v0')",
        "import gymnasium; e = gymnasium.make('turngym:turngym/Calculator-v0')",
    ],
)
def test_a_fresh_interpreter_makes_environments_either_way(code: str) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code + "; print(e.reset(seed=0)[1]['task_id'])"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.startswith("train/")


def test_public_names_can_all_be_imported() -> None:
    for module in (turngym, turngym.envs):
        for name in module.__all__:
            assert getattr(module, name) is not None
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            module.nothing  # noqa: B018
    assert turngym.envs.Task is Task
