"""Sizes of the small Gemma-4 and of its assistant, and their config.json."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

SLIDING, FULL = "sliding_attention", "full_attention"
ROPE_PARAMETERS = {
    FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"},
    SLIDING: {"rope_theta": 10_000.0, "rope_type": "default"},
}


@dataclass(frozen=True)
class Gemma4TextConfig:
    """A text model, by the names in text_config. The first layers own keys and values, the last
    `num_kv_shared_layers` read those of the last owner of their kind."""

    hidden_size: int = 128
    intermediate_size: int = 256
    layer_types: list[str] = field(default_factory=lambda: 2 * [SLIDING, SLIDING, SLIDING, FULL])
    num_kv_shared_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 1
    head_dim: int = 32
    global_head_dim: int = 64
    hidden_size_per_layer_input: int = 32
    use_double_wide_mlp: bool = True  # in the layers that share
    sliding_window: int = 64
    final_logit_softcapping: float | None = 30.0
    rms_norm_eps: float = 1e-6
    vocab_size: int = 2048

    @classmethod
    def load(cls, directory: Path) -> "Gemma4TextConfig":
        text = json.loads((directory / "config.json").read_text())["text_config"]
        return cls(**{name: text[name] for name in cls.__dataclass_fields__})

    def owns_keys(self, layer: int) -> bool:
        return layer < len(self.layer_types) - self.num_kv_shared_layers

    def to_json(self, ids: dict[str, int]) -> dict[str, object]:
        return (
            asdict(self)
            | ids
            | {
                "model_type": "gemma4_text",
                "attention_bias": False,
                "attention_dropout": 0.0,
                "attention_k_eq_v": False,
                "dtype": "bfloat16",
                "enable_moe_block": False,
                "hidden_activation": "gelu_pytorch_tanh",
                "initializer_range": 0.02,
                "max_position_embeddings": 4096,
                "moe_intermediate_size": None,
                "num_experts": None,
                "num_global_key_value_heads": None,
                "num_hidden_layers": len(self.layer_types),
                "rope_parameters": ROPE_PARAMETERS,
                "tie_word_embeddings": True,
                "top_k_experts": None,
                "use_bidirectional_attention": None,
                "use_cache": True,
                "vocab_size_per_layer_input": self.vocab_size
                if self.hidden_size_per_layer_input
                else 0,
            }
        )


ASSISTANT = Gemma4TextConfig(
    hidden_size=64,
    layer_types=[SLIDING, SLIDING, SLIDING, FULL],
    hidden_size_per_layer_input=0,
    use_double_wide_mlp=False,
    final_logit_softcapping=None,
)
CLUSTERS, TOP_K = 64, 8  # of the assistant's output
