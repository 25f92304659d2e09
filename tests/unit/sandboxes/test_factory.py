import asyncio
import importlib.util

import pytest

from turngym.errors import ConfigError, MissingDependencyError
from turngym.sandboxes import create
from turngym.sandboxes.factory import BACKENDS


def test_an_unknown_backend_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="no sandbox backend 'dokcer'; did you mean 'docker'"):
        asyncio.run(create("dokcer"))


def test_an_unknown_option_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="no option 'isolatoin'; did you mean 'isolation'"):
        asyncio.run(create("local", isolatoin="strict"))


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert importlib.util.find_spec("turngym_absent_package") is None
    monkeypatch.setitem(BACKENDS, "docker", "turngym_absent_package:DockerSandbox")
    with pytest.raises(MissingDependencyError, match=r"pip install 'turngym\[docker\]'"):
        asyncio.run(create("docker"))
