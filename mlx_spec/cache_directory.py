"""Where mlx-spec keeps what can be had again."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/mlx-spec`, by default `~/.cache/mlx-spec`.

    Raises RuntimeError where the home directory is not known.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    folder = Path(base) if base and os.path.isabs(base) else Path.home() / ".cache"
    return folder / "mlx-spec"
