"""The trained encoder of a run, from its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from negchain import tasks
from negchain.train import checkpoint
from negchain.train.config import ConfigError
from negchain.train.run_folder import load_run_config


def load_trained(path: Path, which: str = "latest") -> tuple[Any, checkpoint.Loaded]:
    """The encoder of a run's checkpoint, on the CPU in eval mode, and the checkpoint.

    Args:
        path: the run folder.
        which: "latest", "best", or the step of one that was kept. Where "latest" had to step back
            from a damaged file, `Loaded.warnings` says so.
    """
    folder = path / "checkpoints"
    loaded = checkpoint.load_latest(folder) if which == "latest" else None
    if which != "latest":
        loaded = checkpoint.load_named(folder, which)
    if loaded is None:
        raise ConfigError(f"{path} has no checkpoint yet; let it train, or use --resume")
    return _encoder_of(loaded, folder, tasks.named(load_run_config(path).task)), loaded


def _encoder_of(loaded: checkpoint.Loaded, source: Path, kind: tasks.Kind) -> Any:
    """The encoder that a checkpoint holds."""
    described, weights = loaded.state.get("encoder_config"), loaded.state.get("encoder")
    try:
        if not isinstance(described, dict) or not isinstance(weights, dict):
            raise ValueError("it holds no encoder")
        kind.fits(described, loaded.num_bytes)
        encoder = kind.rebuild(described)
        encoder.load_state_dict(weights)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(
            f"the newest checkpoint in {source} does not fit the encoder it describes ({reason}); "
            "choose another one"
        ) from error
    return encoder.eval()
