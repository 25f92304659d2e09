"""`turngym rollout ID --policy P --out FOLDER`: collect episodes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from turngym.agents.config import RolloutConfig
from turngym.cli.console import out, progress, setup_logging, show_table
from turngym.cli.episodes import FLAGS, EpisodesConfig, open_engine, parse, task_count
from turngym.errors import ConfigError

__all__ = ["FLAGS", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCommand(EpisodesConfig):
    """Collect groups of episodes into a folder: `index.jsonl` and the token columns beside it."""

    split: str = "train"
    out: Path = Path("runs/rollout")
    """Folder; must not hold episodes yet."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)


def run(argv: Sequence[str]) -> None:
    """Run the command."""
    setup_logging()
    config, env_kwargs = parse(RolloutCommand(), argv, prog="turngym rollout")
    from turngym.agents.store import TrajectoryStore

    if (config.out / "index.jsonl").exists():
        raise ConfigError(f"{config.out} already holds episodes; choose another folder with --out")
    store = TrajectoryStore(config.out)
    with (
        progress("episodes") as show,
        open_engine(config, env_kwargs, lambda done, asked: show(done, total=asked)) as opened,
    ):
        engine, available = opened
        count = min(task_count(config, available), config.tasks or 16)
        groups = engine.run(range(count))
        for group in groups:
            store.append(group.trajectories, {"group": group.id})
        stats = engine.stats.metrics()
    show_table(("", "value"), [(name, f"{value:.4g}") for name, value in stats.items()])
    out.print(f"{sum(len(g.trajectories) for g in groups)} episodes: {config.out}", markup=False)
