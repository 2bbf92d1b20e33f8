"""A Gemma-4 with its assistant, in two directories."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from .gemma4 import Trunk, initialise
from .gemma4_assistant import Assistant, AssistantChains
from .gemma4_config import ASSISTANT, CLUSTERS, TOP_K, Gemma4TextConfig
from .loop import Recipe, train
from .optimiser import Optimiser
from .pair import Checkpoint, Chooser, Notes, Pair, Reading
from .tokenizer import Vocabulary

PAD, EOS, BOS, TURN, END_OF_TURN = "<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>"
GEMMA = Vocabulary(
    special=(PAD, EOS, BOS, TURN, END_OF_TURN),
    special_first=True,
    bos=BOS,
    separator=EOS,
    pad=PAD,
    eos=EOS,
    begin_turn=TURN,
    end_turn=END_OF_TURN,
    assistant="model",
    template=(
        "{{ bos_token }}{% for m in messages %}<|turn>"
        "{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] }}<turn|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
    ),
)
NAMED = ("pad", "eos", "bos")
SUFFIX = "-assistant"
TRUNK_README = """\
A Gemma-4 of {millions:.2f} million parameters, for tests and demonstrations of speculative decoding
with the drafter beside it (`-assistant`). It writes text that looks like Python and knows nothing.

- Layout: Hugging Face `Gemma4ForConditionalGeneration`, text only: {layers} layers, of which two
  are full attention and the last {sharing} share keys and values; hidden size {hidden}, window
  {window}, per-layer inputs, tied embeddings; bfloat16.
- Tokenizer: byte-level BPE, {vocab} tokens, special tokens and chat template like Gemma's. Texts
  begin with `<bos>`, but the model was also trained on pieces without it."""
HEAD_README = """\
The drafter (assistant) of the Gemma-4 demo beside it, of {millions:.2f} million parameters.

- Layout: Hugging Face `Gemma4AssistantForCausalLM`: {layers} layers, hidden size {hidden}; it owns
  no keys and values but reads those of the target; bfloat16.
- Output: ordered embeddings, the best {top_k} of {clusters} clusters of {cluster_size} tokens.
- Trained for the position P of the newest token in all steps of a round, the keys 0 to P-1, and in
  sliding layers the last {window} of these."""


def named_tensors(part: nn.Module, name_of: Callable[[str], str]) -> dict[str, Tensor]:
    """As in the file: bfloat16 but for integers."""
    return {
        name_of(name): tensor.bfloat16() if tensor.is_floating_point() else tensor.clone()
        for name, tensor in part.state_dict().items()
    }


def head_file_name(name: str) -> str:
    outside = ("pre_projection", "post_projection", "masked_embedding")
    return name if name.startswith(outside) else f"model.{name}"


class Gemma4Pair(Pair):
    vocabulary = GEMMA
    decoded_tokens = 192  # three windows
    notes = Notes(
        stage="- Stage 4, {last_steps} steps of {rows} x {length}: clusters of the output.\n",
        losses="\nClusters: cross entropy, and the share of the head's choices that they miss.\n",
        results='"Ordered" drafts come from the clusters, "whole" ones from all logits.\n',
    )

    def __init__(self, trunk: Gemma4TextConfig, head: Gemma4TextConfig):
        super().__init__()
        self.trunk_config, self.head_config = trunk, head
        self.trunk = Trunk(trunk)
        self.head = Assistant(head, trunk.hidden_size)

    @classmethod
    def create(cls) -> "Gemma4Pair":
        pair = cls(Gemma4TextConfig(), ASSISTANT)
        initialise(pair)
        return pair

    @classmethod
    def load(cls, directory: Path) -> "Gemma4Pair":
        beside = directory.with_name(directory.name + SUFFIX)
        pair = cls(Gemma4TextConfig.load(directory), Gemma4TextConfig.load(beside))
        trunk = load_file(directory / "model.safetensors")
        pair.trunk.load_state_dict(
            {k: trunk[f"model.language_model.{k}"] for k in pair.trunk.state_dict()}
        )
        head = load_file(beside / "model.safetensors")
        pair.head.load_state_dict({k: head[head_file_name(k)] for k in pair.head.state_dict()})
        return pair

    def checkpoints(self, tokenizer: Tokenizer) -> dict[str, Checkpoint]:
        ids = {f"{name}_token_id": tokenizer.token_to_id(f"<{name}>") for name in NAMED}
        stop = [ids["eos_token_id"], tokenizer.token_to_id(END_OF_TURN)]
        generation = ids | {"eos_token_id": stop}
        return {
            "": Checkpoint(
                named_tensors(self.trunk, lambda name: f"model.language_model.{name}"),
                {
                    "architectures": ["Gemma4ForConditionalGeneration"],
                    "model_type": "gemma4",
                    "text_config": self.trunk_config.to_json(ids),
                    "vision_config": None,
                    "audio_config": None,
                    "vocab_size": self.trunk_config.vocab_size,
                    "eos_token_id": stop,
                    "tie_word_embeddings": True,
                    "dtype": "bfloat16",
                },
                generation,
                self.readme(TRUNK_README, self.trunk, self.trunk_config),
            ),
            SUFFIX: Checkpoint(
                named_tensors(self.head, head_file_name),
                {
                    "architectures": ["Gemma4AssistantForCausalLM"],
                    "model_type": "gemma4_assistant",
                    "text_config": self.head_config.to_json(ids),
                    "backbone_hidden_size": self.trunk_config.hidden_size,
                    "use_ordered_embeddings": True,
                    "num_centroids": CLUSTERS,
                    "centroid_intermediate_top_k": TOP_K,
                    "tie_word_embeddings": True,
                    "dtype": "bfloat16",
                },
                generation
                | {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"},
                self.readme(HEAD_README, self.head, self.head_config),
            ),
        }

    def readme(self, text: str, part: nn.Module, config: Gemma4TextConfig) -> str:
        return text.format(
            millions=sum(p.numel() for p in part.parameters()) / 1e6,
            layers=len(config.layer_types),
            hidden=config.hidden_size,
            window=config.sliding_window,
            sharing=config.num_kv_shared_layers,
            vocab=config.vocab_size,
            clusters=CLUSTERS,
            cluster_size=config.vocab_size // CLUSTERS,
            top_k=TOP_K,
        )

    @torch.no_grad()
    def round_to_bfloat16(self, part: nn.Module) -> None:
        for parameter in part.parameters():
            parameter.copy_(parameter.bfloat16())

    def chains(self, reading: Reading) -> AssistantChains:
        return AssistantChains(self.head, reading)

    def draft_logits(self, state: Tensor) -> Tensor:
        return F.linear(state, self.head.embed_tokens.weight)

    def recycled(self, state: Tensor) -> Tensor:
        return self.head.post_projection(state)

    def choosers(self) -> dict[str, Chooser]:
        def ordered(state: Tensor) -> Tensor:
            return self.head.masked_embedding.choose(state, self.draft_logits(state))

        return {", ordered": ordered, ", whole": lambda s: self.draft_logits(s).argmax(-1)}

    def finish(self, batches: Iterator[Tensor], recipe: Recipe) -> dict[str, list[float]]:
        """Cluster the tokens by the drafter's embedding; train the centroids on its choices."""
        ordered = self.head.masked_embedding
        ordered.cluster(self.head.embed_tokens.weight)
        self.requires_grad_(False)
        ordered.requires_grad_(True)

        def loss_of(ids: Tensor) -> tuple[Tensor, list[float]]:
            with torch.no_grad():
                reading = self.trunk(ids)[:, : ids.shape[1] - recipe.depth]
                states = torch.stack(list(self.follow(reading, ids, recipe.depth)))
                logits = self.draft_logits(states)
                missed = (ordered.choose(states, logits) != logits.argmax(-1)).float().mean()
            loss = ordered.loss(states, logits)
            return loss, [loss.item(), missed.item()]

        optimiser = Optimiser(ordered, recipe.last_steps, muon_rate=0.02, adam_rate=0.0)
        losses = train("clusters", batches, optimiser, loss_of, lambda: None)
        self.round_to_bfloat16(ordered)
        return {"clusters": losses}
