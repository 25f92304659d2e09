import pytest

from turngym.errors import ConfigError
from turngym.sandboxes.isolation import guarantees_of, levels_to_try


def test_auto_never_falls_down_to_nothing_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TURNGYM_ALLOW_UNSAFE", raising=False)
    assert levels_to_try("auto") == ("namespaces", "landlock")
    assert levels_to_try("strict") == ("namespaces",)
    assert levels_to_try("none") == ("none",)
    monkeypatch.setenv("TURNGYM_ALLOW_UNSAFE", "1")
    assert levels_to_try("auto") == ("namespaces", "landlock", "none")
    assert levels_to_try("strict") == ("namespaces",)


def test_a_wrong_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="'auto', 'strict' or 'none', got 'stirct'"):
        levels_to_try("stirct")  # type: ignore[arg-type]


def test_guarantees_name_what_a_level_loses() -> None:
    best, weak = guarantees_of("namespaces", ()), guarantees_of("landlock", ("x: absent",))
    assert (best.fork, best.disk, weak.fork, weak.disk) == (True, "hard", False, "soft")
    assert any("x: absent" in note for note in weak.notes)
    assert any("starting processes" in note for note in weak.notes)
    assert guarantees_of("none", ()).filesystem == "none"
