"""Sizes of the small Qwen3.5, and its config.json."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

ROPE_THETA = 10_000_000


@dataclass(frozen=True)
class Qwen35Config:
    """Sizes of a dense text-only Qwen3.5, by their names in config.json."""

    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    full_attention_interval: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    vocab_size: int = 2048

    @property
    def layer_types(self) -> list[str]:
        return [
            "full_attention" if (i + 1) % self.full_attention_interval == 0 else "linear_attention"
            for i in range(self.num_hidden_layers)
        ]

    @property
    def rotary_dim(self) -> int:
        return self.head_dim // 4

    @classmethod
    def load(cls, directory: Path) -> "Qwen35Config":
        text = json.loads((directory / "config.json").read_text())["text_config"]
        return cls(**{name: text[name] for name in cls.__dataclass_fields__})

    def to_json(self, eos: int, pad: int) -> dict[str, object]:
        text = asdict(self) | {
            "model_type": "qwen3_5_text",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "eos_token_id": eos,
            "pad_token_id": pad,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "layer_types": self.layer_types,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 4096,
            "mlp_only_layers": [],
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "tie_word_embeddings": True,
            "use_cache": True,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [4, 2, 2],
                "partial_rotary_factor": 0.25,
                "rope_theta": ROPE_THETA,
                "rope_type": "default",
            },
        }
        return {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": text,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        }
