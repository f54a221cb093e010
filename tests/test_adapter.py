"""Independent evidence: transformers' generate over our network says what it says over its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity import SIZES, harsh_model, hf_twin
from transformers import DynamicCache, GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

from minigpt2 import GPT2, KVCache
from minigpt2.ops import next_token_loss

V = 199


class Adapter(GPT2LMHeadModel):
    """Hugging Face's model with our forward. Its cache only counts; ours holds keys and values."""

    ours: GPT2
    our_cache: KVCache

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        cache: DynamicCache | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        logits_to_keep: int = 0,
        **_unused: Any,
    ) -> CausalLMOutputWithCrossAttentions:
        mask = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
        if cache is not None:
            self._follow(cache, len(input_ids))
        logits = self.ours(
            input_ids,
            mask,
            position_ids,
            self.our_cache if cache is not None else None,
            logits_to_keep,
        )
        if cache is not None:
            self._mirror(cache, input_ids.shape[1])
        loss = next_token_loss(logits, labels) if labels is not None else None
        return CausalLMOutputWithCrossAttentions(loss=loss, logits=logits, cache=cache)

    def _follow(self, cache: DynamicCache, rows: int) -> None:
        """Start anew, or take over how generate has cropped or reordered its cache."""
        length = cache.get_seq_length()
        if length == 0:
            self.our_cache = KVCache(self.ours.config, rows, self.ours.config.n_positions)
            return
        for layer in range(self.ours.config.n_layer):
            keys, values = cache.layers[layer].keys, cache.layers[layer].values
            self.our_cache.keys[layer, :, :, :length] = keys
            self.our_cache.values[layer, :, :, :length] = values
        self.our_cache.length = length

    def _mirror(self, cache: DynamicCache, new: int) -> None:
        start, end = self.our_cache.length - new, self.our_cache.length
        for layer in range(self.ours.config.n_layer):
            keys, values = self.our_cache.keys[layer], self.our_cache.values[layer]
            cache.update(keys[:, :, start:end].clone(), values[:, :, start:end].clone(), layer)


@pytest.fixture(scope="module")
def pair() -> tuple[Adapter, GPT2LMHeadModel]:
    ours = harsh_model(SIZES["tiny"])
    with torch.no_grad():
        ours.wte.weight.mul_(0.4)
    theirs = hf_twin(ours)
    with torch.device("meta"):
        adapter = Adapter(theirs.config)
    adapter.load_state_dict(theirs.state_dict(), assign=True)
    adapter.tie_weights()
    adapter.ours = ours
    for model in (adapter, theirs):
        model.generation_config.top_k = None
    return adapter.eval(), theirs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
        {"do_sample": True, "top_p": 0.9, "num_return_sequences": 2},
        {"num_beams": 3, "num_return_sequences": 3},
        {"num_beams": 3, "do_sample": True, "length_penalty": 2.0, "early_stopping": True},
        {"use_cache": False, "num_beams": 2},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
        {"prompt_lookup_num_tokens": 4},
    ],
    ids=str,
)
def test_their_generate_says_the_same_over_our_network(
    options: dict[str, Any], pair: tuple[Adapter, GPT2LMHeadModel]
) -> None:
    ids = torch.tensor([[5, 6, 7, 5, 6], [90, 91, 92, 93, 94]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    if "prompt_lookup_num_tokens" in options:  # theirs takes one text
        ids, mask = ids[:1], mask[:1]
    texts = []
    for model in pair:
        torch.manual_seed(4)
        texts.append(
            model.generate(ids, attention_mask=mask, max_new_tokens=15, pad_token_id=0, **options)
        )
    assert texts[0].tolist() == texts[1].tolist()


def test_their_scores_and_loss_are_bit_equal(pair: tuple[Adapter, GPT2LMHeadModel]) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    scores = [
        model.generate(
            ids, max_new_tokens=8, output_scores=True, return_dict_in_generate=True, pad_token_id=0
        ).scores
        for model in pair
    ]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*scores, strict=True))
    with torch.no_grad():
        losses = [model(ids, labels=ids).loss for model in pair]
    assert torch.equal(*losses)
