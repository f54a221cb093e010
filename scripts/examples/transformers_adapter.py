"""minigpt2's network as a transformers model.

    from transformers import AutoTokenizer, pipeline
    from transformers_adapter import MiniGPT2LMHeadModel

    model = MiniGPT2LMHeadModel.from_pretrained("gpt2")
    tokenizer = AutoTokenizer.from_pretrained("openai-community/gpt2")
    print(pipeline("text-generation", model, tokenizer=tokenizer)("Once upon a time"))

Whatever takes a PreTrainedModel, such as generate with its strategies and its growing cache (not
the static one), then runs on our forward pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

from minigpt2 import GPT2, KVCache
from minigpt2.ops import next_token_loss


class MiniGPT2Config(transformers.GPT2Config):
    """GPT-2's config under a name of its own, by which pipelines know the model below."""

    model_type = "minigpt2"


class TheirCache(KVCache):
    """transformers' cache behind our cache's methods, since generate crops and reorders its own."""

    def __init__(self, theirs: Cache) -> None:
        self.theirs, self.length = theirs, theirs.get_seq_length()

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.theirs.update(k, v, layer)


class MiniGPT2LMHeadModel(PreTrainedModel, GenerationMixin):
    """A PreTrainedModel that holds a GPT2 and nothing else."""

    config_class = MiniGPT2Config

    def __init__(self, network: GPT2) -> None:
        super().__init__(MiniGPT2Config.from_dict(network.config.to_dict()))
        self.network = network

    @classmethod
    def from_pretrained(cls, name_or_folder: str | Path, **options: Any) -> MiniGPT2LMHeadModel:
        """Load a checkpoint; names and options are those of GPT2.from_pretrained."""
        return cls(GPT2.from_pretrained(name_or_folder, **options))

    def save_pretrained(self, folder: str | Path, **_options: Any) -> None:
        """Write config.json and model.safetensors, which GPT2LMHeadModel opens too."""
        self.network.save_pretrained(folder)

    def forward(
        self,
        input_ids: Tensor,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        use_cache: bool | None = None,
        return_dict: bool | None = None,  # noqa: ARG002 (never a tuple)
    ) -> CausalLMOutputWithCrossAttentions:
        """The logits, and the loss where there are labels; a cache is made where use_cache asks."""
        if cache is None and use_cache:
            cache = DynamicCache()
        ours = None if cache is None else TheirCache(cache)
        logits = self.network(input_ids, attention_mask, position_ids, ours, logits_to_keep)
        loss = None if labels is None else next_token_loss(logits, labels, self.network.ops)
        return CausalLMOutputWithCrossAttentions(loss=loss, logits=logits, cache=cache)


AutoModelForCausalLM.register(MiniGPT2Config, MiniGPT2LMHeadModel)
