import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """What is measured in tests stays there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def model_dir(tmp_path):
    """A copy of a trained model with its head inside."""
    from models import checkpoint_path

    path = tmp_path / "Tiny-Model-4bit"
    shutil.copytree(checkpoint_path("qwen3-5-trained"), path)
    return path
