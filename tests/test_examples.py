"""The examples' adapters: transformers and lm-evaluation-harness over our network say what they say
over Hugging Face's. That is independent evidence too."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import SIZES, harsh_model, hf_twin
from transformers import AutoTokenizer, GPT2LMHeadModel, pipeline
from transformers_adapter import MiniGPT2LMHeadModel

from minigpt2 import GPT2


@pytest.fixture(scope="module")
def pair() -> tuple[MiniGPT2LMHeadModel, GPT2LMHeadModel]:
    ours = harsh_model(SIZES["tiny"])
    with torch.no_grad():
        ours.wte.weight.mul_(0.4)
    models = MiniGPT2LMHeadModel(ours), hf_twin(ours)
    for model in models:
        model.generation_config.update(top_k=None, eos_token_id=None, bos_token_id=None)
    return models


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
        {"assistant_model": True},
    ],
    ids=str,
)
def test_their_generate_says_the_same_over_our_network(
    options: dict[str, Any], pair: tuple[MiniGPT2LMHeadModel, GPT2LMHeadModel]
) -> None:
    ids = torch.tensor([[5, 6, 7, 5, 6], [90, 91, 92, 93, 94]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    if options.keys() & {"prompt_lookup_num_tokens", "assistant_model"}:  # theirs take one text
        ids, mask = ids[:1], mask[:1]
    texts = []
    for model in pair:
        if "assistant_model" in options:
            options = {"assistant_model": model}
        torch.manual_seed(4)
        texts.append(
            model.generate(ids, attention_mask=mask, max_new_tokens=15, pad_token_id=0, **options)
        )
    assert texts[0].tolist() == texts[1].tolist()


def test_their_scores_and_loss_are_bit_equal(
    pair: tuple[MiniGPT2LMHeadModel, GPT2LMHeadModel],
) -> None:
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


def test_a_pipeline_writes_the_same(
    tales_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    kinds = MiniGPT2LMHeadModel, GPT2LMHeadModel
    models = [kind.from_pretrained(tales_folder) for kind in kinds]
    tokenizer = AutoTokenizer.from_pretrained(tales_folder)
    writers = [pipeline("text-generation", model, tokenizer=tokenizer) for model in models]
    assert not caplog.records  # an unregistered model is complained of
    for options in ({}, {"do_sample": True}, {"num_beams": 2}):
        texts = []
        for writer in writers:
            torch.manual_seed(1)
            texts.append(writer("Once upon a time", max_new_tokens=8, **options))
        assert texts[0] == texts[1]


def test_a_saved_adapter_is_a_checkpoint(tmp_path: Path, tiny: GPT2) -> None:
    MiniGPT2LMHeadModel(tiny).save_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        for kind in (GPT2LMHeadModel, MiniGPT2LMHeadModel):
            assert torch.equal(kind.from_pretrained(tmp_path).eval()(ids).logits, tiny(ids))


def test_inputs_of_other_models_are_refused(tiny: GPT2) -> None:
    with pytest.raises(TypeError, match="token_type_ids"):
        MiniGPT2LMHeadModel(tiny)(torch.tensor([[5]]), token_type_ids=torch.tensor([[0]]))
