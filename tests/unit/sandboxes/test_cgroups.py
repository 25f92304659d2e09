from pathlib import Path

import pytest

from turngym.sandboxes.inside.cgroups import _free_ancestors, _seen, oom_kills


@pytest.mark.parametrize(
    ("group", "root", "place"),
    [
        ("/", "/", "/sys/fs/cgroup"),
        ("/a/b", "/", "/sys/fs/cgroup/a/b"),
        ("/a/b", "/a", "/sys/fs/cgroup/b"),
        ("/a", "/a", "/sys/fs/cgroup"),
        ("/ab", "/a", ""),
        ("/../b", "/a", ""),
        ("", "/", ""),
    ],
)
def test_a_group_is_found_below_what_its_mount_shows(group: str, root: str, place: str) -> None:
    assert _seen(group, root, "/sys/fs/cgroup") == place


def test_groups_are_made_above_ones_own_only_where_that_escapes_no_limit(tmp_path: Path) -> None:
    inner = tmp_path / "limited" / "free" / "own"
    inner.mkdir(parents=True)
    for folder, memory in ((inner, "max"), (inner.parent, "max"), (inner.parents[1], "1024")):
        (folder / "memory.max").write_text(f"{memory}\n")
        (folder / "pids.max").write_text("max\n")
    found = _free_ancestors(str(inner), str(tmp_path))
    assert found == [str(inner), str(inner.parent), str(inner.parents[1])]


@pytest.mark.parametrize(
    "text", ["low 0\nmax 9\noom 3\noom_kill 2\n", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"]
)
def test_kills_are_counted_in_the_files_of_both_versions(tmp_path: Path, text: str) -> None:
    (tmp_path / "events").write_text(text)
    with (tmp_path / "events").open("rb") as file:
        assert [oom_kills(file.fileno()), oom_kills(file.fileno()), oom_kills(-1)] == [2, 2, 0]
