import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser):
    parser.addoption("--smollm2", help="The directory that scripts/fetch_smollm2.py has made.")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """What is measured in tests stays there."""
    path = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(path))
        yield path


@pytest.fixture(autouse=True)
def nothing_measured_yet(own_cache):
    """A program that a test starts begins with a few drafts, not with what another test found."""
    shutil.rmtree(own_cache, ignore_errors=True)


@pytest.fixture
def model_dir(tmp_path):
    """A copy of a trained model with its head inside."""
    from models import checkpoint_path

    path = tmp_path / "Tiny-Model-4bit"
    shutil.copytree(checkpoint_path("qwen3-5-trained"), path)
    return path
