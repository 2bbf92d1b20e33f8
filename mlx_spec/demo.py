"""The demo model that comes with the package."""

from pathlib import Path

from mlx_spec.errors import CheckpointError

NAME = "tiny-qwen3.5-nextn"


def demo_model() -> Path:
    """Its directory: inside an installed package, or in a checkout of the repository.

    Raises CheckpointError where neither is there.
    """
    package = Path(__file__).parent
    for path in (package / "demo_model", package.parent / "models" / NAME):
        if (path / "config.json").is_file():
            return path
    raise CheckpointError("The demo model is not installed; give a model with --model.")
