"""A Qwen3.5 with its NextN head, in one directory."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from .delta_net import GatedRMSNorm
from .pair import Checkpoint, Pair, Reading
from .qwen35 import RMSNorm, Trunk, initialise
from .qwen35_config import Qwen35Config
from .qwen35_nextn import DraftChains, Head
from .tokenizer import Vocabulary

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = Vocabulary(
    special=(END_OF_TEXT, IM_START, IM_END),
    special_first=False,
    bos=None,
    separator=END_OF_TEXT,
    pad=END_OF_TEXT,
    eos=IM_END,
    begin_turn=IM_START,
    end_turn=IM_END,
    assistant="assistant",
    template=(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
)
README = """A Qwen3.5 of {millions:.2f} million parameters with a NextN (MTP) head, for tests and
demonstrations of speculative decoding. It writes text that looks like Python and knows nothing.

- Layout: Hugging Face `Qwen3_5ForConditionalGeneration`, text only: {layers} layers of which one
  is full attention, hidden size {hidden}, tied embeddings, one `mtp` layer; bfloat16.
- Tokenizer: byte-level BPE, {vocab} tokens, ChatML template."""


def file_name(name: str) -> str:
    """`trunk.x` -> `model.language_model.x` and `head.x` -> `mtp.x`."""
    part, rest = name.split(".", 1)
    return {"trunk": "model.language_model.", "head": "mtp."}[part] + rest


def stays_float32(name: str) -> bool:
    """Qwen3.5 keeps these two in float32, everything else in bfloat16."""
    return name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))


class Qwen35Pair(Pair):
    vocabulary = CHATML

    def __init__(self, config: Qwen35Config):
        super().__init__()
        self.config = config
        self.trunk = Trunk(config)
        self.head = Head(config)

    @classmethod
    def create(cls) -> "Qwen35Pair":
        pair = cls(Qwen35Config())
        initialise(pair)
        return pair

    @classmethod
    def load(cls, directory: Path) -> "Qwen35Pair":
        pair = cls(Qwen35Config.load(directory))
        tensors = load_file(directory / "model.safetensors")
        pair.load_state_dict({k: tensors[file_name(k)].float() for k in pair.state_dict()})
        return pair

    def checkpoints(self, tokenizer: Tokenizer) -> dict[str, Checkpoint]:
        eos, pad = tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)
        tensors = {
            file_name(name): tensor.clone() if stays_float32(name) else tensor.bfloat16()
            for name, tensor in self.state_dict().items()
        }
        readme = README.format(
            millions=sum(p.numel() for p in self.parameters()) / 1e6,
            layers=self.config.num_hidden_layers,
            hidden=self.config.hidden_size,
            vocab=self.config.vocab_size,
        )
        generation = {"eos_token_id": [eos, pad], "pad_token_id": pad}
        return {"": Checkpoint(tensors, self.config.to_json(eos, pad), generation, readme)}

    @torch.no_grad()
    def round_to_bfloat16(self, part: nn.Module) -> None:
        """mlx-lm adds the one to norm weights in bfloat16: the sum is rounded, which makes both
        exact."""
        for module in part.modules():
            offset = 1.0 if isinstance(module, RMSNorm) else 0.0
            for name, parameter in module.named_parameters(recurse=False):
                if name != "A_log" and not isinstance(module, GatedRMSNorm):
                    parameter.copy_((parameter + offset).bfloat16() - offset)

    def chains(self, reading: Reading) -> DraftChains:
        return DraftChains(self.head)

    def draft_logits(self, state: Tensor) -> Tensor:
        return self.trunk.logits(state)
