"""Uploading a drafter directory to the Hugging Face hub, by mlx-lm's own uploader."""

from pathlib import Path

from huggingface_hub import ModelCard
from huggingface_hub.errors import HTTPError
from mlx_lm.utils import upload_to_hub

from mlx_spec.convert.card import CARD
from mlx_spec.errors import SpecError, one_line
from mlx_spec.generate import bound


def upload(directory: Path, repository: str) -> None:
    """Makes the repository if it is not there, and uploads all files.

    mlx-lm puts a text of its own into the card, which tells how to load a model; a drafter is
    loaded otherwise, so that its card keeps its text.

    Raises:
        SpecError: the hub does not take it.
    """
    text = ModelCard.load(directory / CARD).text
    try:
        bound(upload_to_hub, dedent=lambda _: text)(str(directory), repository)
    except (OSError, HTTPError) as error:
        raise SpecError(
            f"{directory} was written, but could not be uploaded to {repository} "
            f"({one_line(error)}): log in with `hf auth login`, or try again later"
        ) from error
