import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from turngym.agents.model import attach_lora
from turngym.agents.tiny import build_tiny_agent
from turngym.agents.vllm_weights import (
    check_adapter,
    check_weights,
    trainer_shapes,
    write_adapter,
    write_weights,
)
from turngym.errors import ConfigError, WeightSyncError

SHAPES = {"embed": (4, 2), "norm": (2,)}


def test_a_weights_file_is_what_safetensors_reads(tmp_path: Path) -> None:
    named = [
        ("embed", torch.arange(8.0).view(2, 4).T),
        ("half", torch.tensor([1.5, -2.0], dtype=torch.bfloat16)),
        ("scale", torch.tensor(3.0, dtype=torch.float16)),
        ("nothing", torch.zeros(0, 3)),
    ]
    write_weights(tmp_path / "weights.safetensors", named)
    read = load_file(tmp_path / "weights.safetensors")
    assert set(read) == {name for name, _ in named}
    for name, tensor in named:
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"'steps' of torch\.int64"):
        write_weights(tmp_path / "file", [("steps", torch.zeros(2, dtype=torch.int64))])


def test_a_disk_that_is_full_is_said_so() -> None:
    with pytest.raises(WeightSyncError, match=r"0\.0 MiB .* No space left"):
        write_weights("/dev/full", [("norm", torch.zeros(2))])


def test_the_trainers_names_are_read_from_the_folder_tied_ones_once(tmp_path: Path) -> None:
    shapes = trainer_shapes(build_tiny_agent(tmp_path / "model"))
    assert shapes["model.embed_tokens.weight"][1] == 96
    assert "lm_head.weight" not in shapes
    with pytest.raises(ConfigError, match="absent"):
        trainer_shapes(tmp_path / "absent")


def test_weights_must_be_all_there_and_fit() -> None:
    good = [("embed", torch.zeros(4, 2)), ("norm", torch.zeros(2))]
    check_weights(good, SHAPES)
    with pytest.raises(WeightSyncError, match=r"1 of 2 .* 'norm'"):
        check_weights(good[:1], SHAPES)
    with pytest.raises(WeightSyncError, match=r"\(2, 4\).*\(4, 2\)"):
        check_weights([("embed", torch.zeros(2, 4)), good[1]], SHAPES)
    with pytest.raises(WeightSyncError, match="does not have"):
        check_weights([*good, ("haed", torch.zeros(2))], SHAPES)
    with pytest.raises(WeightSyncError, match="opened for full weights"):
        check_weights([("q.lora_A.default.weight", torch.zeros(2))], SHAPES)


def test_adapters_must_be_adapters_of_the_rank() -> None:
    a, b = "base_model.model.q.lora_A.default.weight", "base_model.model.q.lora_B.default.weight"
    check_adapter([(a, torch.zeros(4, 8)), (b, torch.zeros(8, 4))], 4)
    with pytest.raises(WeightSyncError, match=r"rank 8, .* lora_rank=4"):
        check_adapter([(b, torch.zeros(4, 8))], 4)
    with pytest.raises(WeightSyncError, match="lora_rank=0"):
        check_adapter([("model.norm.weight", torch.zeros(8))], 4)


def test_an_adapter_is_written_as_peft_writes_it(model: nn.Module, tmp_path: Path) -> None:
    peft = attach_lora(model, 4, alpha=12)
    named = [(name, p) for name, p in peft.named_parameters() if p.requires_grad]
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    write_adapter(ours, named, rank=4, alpha=12)
    peft.save_pretrained(theirs)  # type: ignore[operator]
    mine = load_file(ours / "adapter_model.safetensors")
    wanted = load_file(theirs / "adapter_model.safetensors")
    assert set(mine) == set(wanted)
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)
    settings = json.loads((ours / "adapter_config.json").read_text())
    reference = json.loads((theirs / "adapter_config.json").read_text())
    for name in ("r", "lora_alpha", "peft_type", "bias", "use_rslora", "use_dora"):
        assert settings[name] == reference[name]
    wanted_modules = {name.split(".")[-1] for name in reference["target_modules"]}
    assert set(settings["target_modules"]) == wanted_modules
