"""The model card of a drafter directory: README.md, ready for the Hugging Face hub."""

import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, metadata_load

from mlx_spec.convert.quantize import describe

CARD = "README.md"
EAGLE3 = "draft_vocab_size"  # a field that only such heads have
TAGS = ["mlx", "draft-model", "speculative-decoding"]
LICENCE = ("license", "license_name", "license_link")
# Where huggingface_hub keeps what it has downloaded.
SNAPSHOT = re.compile(r"/models--(?P<org>[^/]+)--(?P<name>[^/]+)/snapshots/[0-9a-f]{40}/?$")

TEXT = """
# {title}

A drafter for speculative decoding on Apple Silicon: it proposes the next tokens, and the model
that it belongs to checks them in one pass. The text stays that of the model. It is of no use
without {model}, which may be quantised in any way.

| | |
| --- | --- |
{rows}

## Use

With [mlx-lm](https://github.com/ml-explore/mlx-lm) and its plugin mlx-spec:

    mlx-spec generate --model MODEL --draft-model DRAFTER --prompt "..."

`mlx-spec inspect MODEL --draft-model DRAFTER` says whether they belong together,
`mlx-spec inspect --check DIRECTORY` whether the files are as they were written.
DRAFTER is this repository.
"""


def make_card(config: dict[str, Any], source_card: dict[str, Any]) -> str:
    """The same for the same arguments.

    Args:
        config: the drafter's config.json as written, with its `mlx_spec` block.
        source_card: front matter of the source's card, whose licence holds for the drafter, too.
    """
    record = config["mlx_spec"]
    base = _base_model(record, source_card)
    licence = {key: source_card[key] for key in LICENCE if source_card.get(key)}
    data = ModelCardData(
        base_model=base or record.get("target"),
        library_name="mlx",
        pipeline_tag="text-generation",
        tags=TAGS,
        **licence,
    )
    kind = "Assistant" if "assistant" in config["model_type"] else "NextN (MTP) head"
    if EAGLE3 in config:
        kind = "EAGLE-3 head"
    within = kind.startswith("NextN")  # and so from the model's own repository
    model = (base if within else None) or record.get("target")
    rows = "\n".join(f"| {name} | {value} |" for name, value in _facts(config))
    text = TEXT.format(
        title=f"{kind} of {model}" if model else kind, model=model or "that model", rows=rows
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n{text}"))


def read_front_matter(directory: Path) -> dict[str, Any]:
    """Of the card in a directory, empty if there is none."""
    try:
        return metadata_load(directory / CARD) or {}
    except Exception:  # YAML that cannot be read, above all; a card is not needed
        return {}


def _base_model(record: dict[str, Any], source_card: dict[str, Any]) -> str | None:
    """The repository that the head came from, if it is known."""
    if record.get("revision"):
        return record["source"]
    if match := SNAPSHOT.search(str(record["source"])):
        return f"{match['org']}/{match['name']}"
    if set(TAGS) <= set(source_card.get("tags") or ()):  # a drafter directory of ours
        return source_card.get("base_model")
    return None


def _facts(config: dict[str, Any]) -> list[tuple[str, str]]:
    record, text = config["mlx_spec"], config.get("text_config") or config
    quantization = config.get("quantization")
    bits = describe(quantization) if quantization else "not quantised"
    kind = "eagle3" if EAGLE3 in config else config["model_type"]
    proposed = f", of which {config[EAGLE3]} are proposed" if EAGLE3 in config else ""
    facts = [
        ("drafter", f"{kind}, {len(record['sha256'])} tensors, {bits}"),
        ("vocabulary", f"{text['vocab_size']} tokens{proposed}"),
    ]
    if record.get("revision"):
        facts.insert(0, ("converted from", f"{record['source']}, revision {record['revision']}"))
    if "fingerprint" in record:
        facts.append(("fingerprint of the model", f"`{record['fingerprint']['sha256'][:16]}`"))
    return facts
