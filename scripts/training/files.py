"""Writing a pair's model directories."""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import Tokenizer

from .pair import Checkpoint, Pair
from .tokenizer import Vocabulary


def write_pair(pair: Pair, tokenizer: Tokenizer, out: Path) -> None:
    for suffix, checkpoint in pair.checkpoints(tokenizer).items():
        write_directory(checkpoint, tokenizer, pair.vocabulary, out.with_name(out.name + suffix))


def write_directory(
    checkpoint: Checkpoint, tokenizer: Tokenizer, vocabulary: Vocabulary, out: Path
) -> None:
    """Write the model directory beside `out` and move it into place."""
    new, old = out.with_name(out.name + ".new"), out.with_name(out.name + ".old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    save_file(checkpoint.tensors, new / "model.safetensors", {"format": "pt"})
    (new / "model.safetensors").chmod(0o644)
    tokenizer.save(str(new / "tokenizer.json"))
    named = {"eos_token": vocabulary.eos, "pad_token": vocabulary.pad}
    if vocabulary.bos:
        named["bos_token"] = vocabulary.bos
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    unnamed = set(vocabulary.special) - set(named.values())
    files = {
        "config.json": checkpoint.config,
        "generation_config.json": checkpoint.generation_config,
        "special_tokens_map.json": named,
        "tokenizer_config.json": named
        | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 4096,
            "clean_up_tokenization_spaces": False,
            "additional_special_tokens": sorted(unnamed),
            "chat_template": vocabulary.template,
            "added_tokens_decoder": {
                str(tokenizer.token_to_id(token)): {"content": token, "special": True} | flags
                for token in vocabulary.special
            },
        },
    }
    for name, content in files.items():
        (new / name).write_text(json.dumps(content, indent=2) + "\n")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)
