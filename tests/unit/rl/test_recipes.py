import re
from pathlib import Path
from typing import Any

import pytest

from turngym.cli.train import parse
from turngym.rl.config import TrainConfig
from turngym.rl.memory import SHAPES, Memory, Shape, estimate

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted((ROOT / "recipes").glob("qwen*.toml"))
ROW = re.compile(r"^\| `(qwen[^`]*)\.toml` \|(.*)\|$", re.MULTILINE)


def load(path: Path) -> tuple[TrainConfig, Memory]:
    config, _ = parse([f"@{path}"])
    assert config.rollout.max_context is not None
    assert config.model.dtype in ("float32", "bfloat16")
    return config, estimate(
        SHAPES[config.model.path],
        dtype=config.model.dtype,
        lora_rank=config.model.lora_rank,
        micro_tokens=config.optim.micro_tokens,
        concurrency=config.rollout.concurrency,
        context=config.rollout.max_context,
    )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_read_and_fits_the_gpus_it_names(path: Path) -> None:
    config, memory = load(path)
    assert (config.engine.kind, config.staleness) == ("vllm", 1)
    assert config.engine.dtype == "bfloat16" or config.model.dtype == "bfloat16"
    found = re.search(r"on (one GPU|two GPUs) of (\d+) GB", path.read_text())
    assert found is not None
    room = int(found[2]) * 0.98  # cards are sold in GB and report about as many GiB
    if found[1] == "one GPU":
        assert config.engine.isolated
        assert memory.sampler <= config.engine.gpu_memory * room
        assert memory.trainer + config.engine.gpu_memory * room <= room
    else:
        assert config.engine.urls
        assert max(memory.trainer, memory.sampler) <= 0.9 * room


def test_there_is_a_recipe_with_adapters_and_one_without_for_every_size() -> None:
    kinds = {(load(path)[0].model.path, bool(load(path)[0].model.lora_rank)) for path in RECIPES}
    assert {name for name, _ in kinds} == set(SHAPES)
    assert {lora for _, lora in kinds} == {True, False}


def test_the_table_of_the_docs_is_computed() -> None:
    table = dict(ROW.findall((ROOT / "docs" / "vllm-servers.md").read_text()))
    assert set(table) == {path.stem for path in RECIPES}
    for path in RECIPES:
        _, memory = load(path)
        parts = [memory.weights, memory.optimizer, memory.activations, memory.trainer]
        parts += [memory.engine, memory.cache, memory.sampler]
        assert table[path.stem].split(" | ")[-7:] == [f"{part:.1f}" for part in parts[:-1]] + [
            f"{parts[-1]:.1f} "
        ]


def test_shapes_give_the_published_sizes() -> None:
    billions = {"Qwen/Qwen3-0.6B": 0.6, "Qwen/Qwen2.5-1.5B-Instruct": 1.54, "Qwen/Qwen3-8B": 8.19}
    for name, size in billions.items():
        assert SHAPES[name].parameters / 1e9 == pytest.approx(size, rel=0.01)


def test_a_shape_is_read_from_a_configuration() -> None:
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 100,
        "tie_word_embeddings": True,
    }
    shape = Shape.of(config)
    assert (shape.query, shape.key) == (64, 32)
    assert shape.parameters == 2 * (2 * 64 * 96 + 3 * 64 * 128) + 6400
    assert shape.adapter_parameters(4) == 2 * 4 * (2 * (128 + 96) + 3 * 192)


def test_what_trains_decides_the_memory() -> None:
    settings: dict[str, Any] = {"micro_tokens": 1024, "concurrency": 8, "context": 1024}
    shape = SHAPES["Qwen/Qwen3-0.6B"]
    full = estimate(shape, dtype="float32", **settings)
    lora = estimate(shape, dtype="float32", lora_rank=8, **settings)
    kept = estimate(shape, dtype="float32", reference=True, **settings)
    assert full.weights == pytest.approx(4 * shape.parameters / 2**30)
    assert full.optimizer == pytest.approx(3 * full.weights)
    assert lora.optimizer < 0.05 * full.optimizer
    assert kept.weights == pytest.approx(2 * full.weights)
    # 8 trajectories of 1024 tokens, keys and values of 28 layers and 8 heads of 128, 2 bytes each
    assert full.cache == pytest.approx(8 * 1024 * 2 * 28 * 1024 * 2 / 2**30)
