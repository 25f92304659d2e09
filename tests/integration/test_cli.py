import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def turngym(*argv: str, stdin: str = "", cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "turngym.cli", *argv]
    return subprocess.run(
        command, env=env, input=stdin, capture_output=True, text=True, timeout=120, cwd=cwd
    )


def test_help_lists_every_command_without_importing_torch() -> None:
    from turngym.cli import COMMANDS

    found = turngym("--help")
    assert found.returncode == 0
    assert all(name in found.stdout for name in COMMANDS)
    code = (
        "import sys\n"
        "from turngym.cli import main\n"
        "for name in ('train', 'eval', 'rollout', 'play', 'envs', 'algorithms', 'bench'):\n"
        "    try: main([name, '--help'])\n"
        "    except SystemExit as stopped: assert not stopped.code, name\n"
        "heavy = {'torch', 'transformers', 'vllm', 'sympy', 'math_verify'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["trian"], "did you mean 'train'"),
        (["eval", "turngym/Calculater-v0", "--policy", "oracle"], "Calculator-v0"),
        (["eval", "Calculator-v0", "--policy", "nowhere/model"], "nowhere/model"),
        (["eval", "Calculator-v0"], "name a policy"),
        (["eval", "Calculator-v0", "--policy", "oracle", "--tasks", "0"], "--tasks must be"),
        (["eval", "Calculator-v0", "--policy", "oracle", "--samples", "0"], "--samples must be"),
        (["eval", "Calculator-v0", "--policy", "openai:foo"], "--policy openai:URL must start"),
        (["eval", "Calculator-v0", "--policy", "oracle", "--env.levle", "1"], "--env.level"),
        (["eval", "Calculator-v0", "--policy", "oracle", "--env.level", "9"], "level must be"),
        (["eval", "MathQA-v0", "--policy", "oracle", "--env.tasks", "no.jsonl"], "no.jsonl"),
        (["train", "--algorithm", "grop"], "did you mean 'grpo'"),
        (["train", "@nowhere.toml"], "nowhere.toml does not exist"),
        (["train", "--run", "/dev/null/x"], "/dev/null/x"),
    ],
)
def test_wrong_usage_ends_with_status_2_and_names_the_fix(argv: list[str], says: str) -> None:
    found = turngym(*argv)
    assert found.returncode in (1, 2), found.stdout
    assert says in found.stderr
    assert "Traceback" not in found.stderr


def test_a_typo_in_a_recipe_is_an_error_with_a_suggestion(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[rollout]\ngroup_sise = 4\n")
    found = turngym("train", f"@{recipe}", "--run", str(tmp_path / "run"))
    assert found.returncode == 2
    assert "unknown setting 'rollout.group_sise'; did you mean 'group_size'?" in found.stderr
    assert not (tmp_path / "run").exists()


def test_a_group_of_one_is_refused_where_members_are_compared(tmp_path: Path) -> None:
    found = turngym("train", "--rollout.group-size", "1", "--run", str(tmp_path / "run"))
    assert found.returncode == 2
    assert "group_size=1" in found.stderr
    assert not (tmp_path / "run").exists()


def test_eval_prints_json_and_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    out = str(tmp_path / "eval")
    argv = ["eval", "Lookup-v0", "--policy", "random", "--samples", "2", "--json"]
    part = turngym(*argv, "--tasks", "5", "--out", out)
    assert part.returncode == 0, part.stderr
    rest = turngym(*argv, "--tasks", "12", "--out", out, "--resume")
    whole = turngym(*argv, "--tasks", "12")
    assert rest.returncode == whole.returncode == 0, rest.stderr + whole.stderr
    assert json.loads(rest.stdout) == json.loads(whole.stdout)
    assert json.loads(whole.stdout)["episodes"] == 24


def test_eval_scores_the_expert_on_a_task_file_and_not_on_other_answers(tmp_path: Path) -> None:
    rows = [
        {"id": n, "question": f"How much is {n}+1?", "solution": f"#### {n + 1}", "answer": n + 1}
        for n in range(6)
    ]
    for name, shift, expected in (("right", 0, 1.0), ("wrong", 1, 0.0)):
        path = tmp_path / f"{name}.jsonl"
        shifted = [row | {"answer": str(int(str(row["answer"])) + shift)} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in shifted))
        found = turngym(
            "eval", "turngym/MathQA-v0", "--env.tasks", str(path), "--policy", "oracle", "--json"
        )
        assert found.returncode == 0, found.stderr
        assert json.loads(found.stdout)["pass_at"]["1"]["value"] == expected


def test_broken_task_files_are_named_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    good = [json.dumps({"id": n, "question": "q", "answer": "1"}) for n in range(6)]
    path.write_text("\n".join([*good, '{"id": 7, "question": ', good[0]]))
    found = turngym("eval", "MathQA-v0", "--env.tasks", str(path), "--policy", "oracle")
    assert found.returncode == 2
    assert f"{path}:7" in found.stderr
    path.write_text("\n".join([*good, good[0]]))
    found = turngym("eval", "MathQA-v0", "--env.tasks", str(path), "--policy", "oracle")
    assert f"{path}:7" in found.stderr
    path.write_text("")
    found = turngym("eval", "MathQA-v0", "--env.tasks", str(path), "--policy", "oracle")
    assert "no tasks" in found.stderr


def test_rollout_stores_episodes_and_refuses_a_used_folder(tmp_path: Path) -> None:
    out = tmp_path / "episodes"
    argv = ["rollout", "Calculator-v0", "--policy", "oracle", "--tasks", "2", "--out", str(out)]
    found = turngym(*argv, "--rollout.group-size", "3")
    assert found.returncode == 0, found.stderr
    rows = [json.loads(line) for line in (out / "index.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    assert all(row["rewards"]["success"] == 1.0 for row in rows)
    again = turngym(*argv)
    assert again.returncode == 2
    assert "choose another folder" in again.stderr


def test_play_takes_text_and_prints_the_score() -> None:
    found = turngym("play", "Calculator-v0", "--env.level", "1", "--seed", "0", stdin="<answer>1\n")
    assert found.returncode == 0, found.stderr
    assert "What is" in found.stdout
    assert "over: completed" in found.stdout


def test_envs_lists_and_shows() -> None:
    listed = turngym("envs")
    assert "turngym/MathQA-v0" in listed.stdout
    shown = turngym("envs", "Calculator-v0")
    assert "calc" in shown.stdout
    assert "correct" in shown.stdout
    assert turngym("envs", "Calculater-v0").returncode == 2


def test_plain_output_has_no_escape_codes() -> None:
    found = turngym("envs")
    assert "\x1b" not in found.stdout + found.stderr
