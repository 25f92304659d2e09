import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from turngym.agents.model import attach_lora, load_model
from turngym.errors import CheckpointError
from turngym.rl.checkpoint import latest, load_weights, save, saving


class Tokenizer:
    """Saves nothing, or fails as a full disk does."""

    def __init__(self, *, full: bool = False) -> None:
        self.full = full

    def save_pretrained(self, folder: Path) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")


def write(run: Path, model: Any, step: int, *, full: bool = False, **more: Any) -> Path:
    return save(
        run,
        step=step,
        model=model,
        tokenizer=Tokenizer(full=full),
        learner={"version": step},
        state={"collector": {"position": 10 * step}},
        **more,
    )


def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_rest(model: Any, tmp_path: Path) -> None:
    write(tmp_path, model, 1)
    with pytest.raises(CheckpointError, match=r"step-000002.*No space left.*untouched"):
        write(tmp_path, model, 2, full=True)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    found = latest(tmp_path)
    assert found is not None
    assert (found.step, found.learner["version"], found.state["collector"]) == (
        1,
        1,
        {"position": 10},
    )


def test_an_incomplete_folder_is_no_checkpoint(model: Any, tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    write(tmp_path, model, 1)
    torn = tmp_path / "checkpoints" / "step-000005"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    found = latest(tmp_path)
    assert found is not None
    assert found.step == 1


def test_a_broken_checkpoint_is_named_with_the_way_out(model: Any, tmp_path: Path) -> None:
    folder = write(tmp_path, model, 3)
    (folder / "learner.pt").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"step-000003: \w+: .*remove it"):
        latest(tmp_path)


def test_another_format_is_refused(model: Any, tmp_path: Path) -> None:
    folder = write(tmp_path, model, 3)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"format": 99}))
    with pytest.raises(CheckpointError, match="has format 99, this version reads 2"):
        latest(tmp_path)


def test_older_checkpoints_go_and_a_repeated_step_replaces_its_own(
    model: Any, tmp_path: Path
) -> None:
    for step in (1, 2, 3, 3):
        write(tmp_path, model, step, keep=2)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000002", "step-000003"]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_weights_come_back_to_the_bit(lora: bool, tiny: Path, tmp_path: Path, kit: Any) -> None:
    def fresh() -> Any:
        model = load_model(tiny, device="cpu")[0]
        return attach_lora(model, 2) if lora else model

    model = fresh()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    folder = write(tmp_path, model, 1)
    again = fresh()
    load_weights(again, folder)
    assert torch.equal(kit.weights(model), kit.weights(again))


def test_weights_of_another_shape_are_refused(model: Any, tmp_path: Path) -> None:
    folder = write(tmp_path, model, 1)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        load_weights(torch.nn.Linear(2, 2), folder)


def test_replayed_trajectories_travel_with_the_checkpoint(
    world: Any, model: Any, tmp_path: Path
) -> None:
    (group,) = world.engine(3).run([0])
    write(tmp_path, model, 1, replay=group.trajectories)
    found = latest(tmp_path)
    assert found is not None
    again = list(found.replay)
    assert [one.ids.tolist() for one in again] == [one.ids.tolist() for one in group.trajectories]
    assert [one.rewards for one in again] == [one.rewards for one in group.trajectories]


def test_what_goes_wrong_while_saving_names_the_folder(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"cannot write .*model: boom"),
        saving(tmp_path / "model"),
    ):
        raise RuntimeError("boom")
