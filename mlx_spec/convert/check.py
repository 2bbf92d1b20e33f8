"""Is a drafter directory as it was written?"""

import hashlib

from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.errors import CheckpointError

CHUNK_BYTES = 1 << 24


def check_hashes(checkpoint: Checkpoint) -> int:
    """Compares each tensor's bytes with the hash that config.json records.

    Returns: how many tensors there are.

    Raises:
        CheckpointError: one differs, is missing or has no hash.
    """
    hashes = checkpoint.section("mlx_spec").get("sha256")
    if not isinstance(hashes, dict) or not hashes:
        raise CheckpointError(
            f"config.json of {checkpoint.path} records no hashes to check: "
            "they are in directories that mlx-spec convert has written"
        )
    for name in sorted(hashes.keys() | set(checkpoint.names)):
        if name not in checkpoint.names:
            raise CheckpointError(f"{checkpoint.path} lacks {name}; convert or download it again")
        if name not in hashes:
            raise CheckpointError(
                f"{checkpoint.path} holds {name}, of which config.json has no hash; "
                "convert or download it again"
            )
        if _sha256(checkpoint, name) != hashes[name]:
            raise CheckpointError(
                f"{name} in {checkpoint.path} is not what was written there, by its sha256; "
                "convert or download it again"
            )
    return len(hashes)


def _sha256(checkpoint: Checkpoint, name: str) -> str:
    tensor = checkpoint.tensor(name)
    digest = hashlib.sha256()
    for begin in range(tensor.begin, tensor.end, CHUNK_BYTES):
        end = min(begin + CHUNK_BYTES, tensor.end)
        digest.update(checkpoint.files.read(tensor.file, begin, end))
    return digest.hexdigest()
