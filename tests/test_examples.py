"""The examples' adapters: transformers and lm-evaluation-harness over our network say what they say
over Hugging Face's. That is independent evidence too."""

from __future__ import annotations

import json
import logging
from itertools import chain
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
        {"guidance_scale": 1.5},
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


# --- lm-evaluation-harness

# One file of documents for each way in which the harness asks a model.
TASKS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "multiple_choice": (
        [
            {
                "q": "The king had a daughter who was",
                "a": 1,
                "options": ["an of", "very beautiful"],
            },
            {"q": "", "a": 0, "options": ["Once upon a time", "zebra", "a"]},
            {"q": "The little ", "a": 1, "options": ["girl", "princess"]},
            {"q": "Long ago " * 200 + "there was", "a": 0, "options": ["a king", "king a"]},
        ],
        {
            "doc_to_text": "{{q}}",
            "doc_to_target": "{{a}}",
            "doc_to_choice": "{{options}}",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
    ),
    "loglikelihood_rolling": (
        [
            {"text": "Once upon a time there was a king. " * 60},  # more than two windows
            {"text": "é😀"},
            {"text": "The fox and the cat.<|endoftext|>The end"},
        ],
        {
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
        },
    ),
    "generate_until": (
        [{"q": "Once upon a time"}, {"q": "The king said"}, {"q": "It was " * 200}],
        {
            "doc_to_text": "{{q}}",
            "doc_to_target": "",
            "generation_kwargs": {"until": ["\n\n", " able"], "max_gen_toks": 24},
            "metric_list": [{"metric": "exact_match"}],
        },
    ),
}


def write_tasks(folder: Path) -> list[str]:
    """The tasks' files; their names."""
    for kind, (lines, settings) in TASKS.items():
        data, task = (str(folder / f"{kind}.{end}") for end in ("jsonl", "yaml"))
        where = {"data_files": {"test": data}, "cache_dir": str(folder)}
        names = {"task": f"local_{kind}", "output_type": kind, "test_split": "test"}
        names |= {"dataset_path": "json", "dataset_kwargs": where}
        Path(data).write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        Path(task).write_text(json.dumps(names | settings), encoding="utf-8")  # JSON is YAML
    return [f"local_{kind}" for kind in TASKS]


@pytest.mark.filterwarnings("ignore")
def test_the_harness_finds_the_same_figures(tales_folder: Path, tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: minigpt2[eval]")
    pytest.importorskip("accelerate", reason="lm-eval's own HFLM is not installed: lm-eval[hf]")
    from lm_eval.tasks import TaskManager
    from lm_eval_adapter import MiniGPT2

    anywhere = MiniGPT2("tales", "auto", "auto", "cuda:0")  # what the harness may say anywhere
    assert anywhere.network.wte.weight.is_cuda == torch.cuda.is_available()
    assert (anywhere.batch_size, anywhere.network.wte.weight.dtype) == (8, torch.float32)
    names = write_tasks(tmp_path)
    ours, theirs = (
        lm_eval.simple_evaluate(
            model=model,
            model_args=arguments | {"dtype": "float32"},
            tasks=names,
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            batch_size=3,
            device="cpu",
            bootstrap_iters=0,
        )
        for model, arguments in (
            ("minigpt2", {"pretrained": "tales"}),
            # Its log_softmax in float32 is off by 5e-6 for each token.
            ("hf", {"pretrained": str(tales_folder), "softmax_dtype": "float64"}),
        )
    )
    for name in names:
        figures = {key: value for key, value in theirs["results"][name].items() if key != "alias"}
        numbers = {key: value for key, value in figures.items() if isinstance(value, float)}
        assert len(numbers) == len(TASKS[name.removeprefix("local_")][1]["metric_list"])
        for key, number in numbers.items():
            assert ours["results"][name][key] == pytest.approx(number, rel=1e-6)
        mine, other = ([d["filtered_resps"] for d in r["samples"][name]] for r in (ours, theirs))
        if name == "local_generate_until":
            assert mine == other
            continue
        # Log-likelihoods, and whether greedy decoding would say it.
        rows = [
            torch.tensor(list(chain(*answers)), dtype=torch.float64) for answers in (mine, other)
        ]
        assert torch.allclose(*rows, rtol=1e-6, atol=0)
