import pytest

from turngym.cli import console


def test_progress_of_a_slow_command_stays_out_of_its_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "PLAIN_EVERY_S", 0.0)
    with console.progress("episodes", 6) as show:
        show(1)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("episodes: 1/6, ")
