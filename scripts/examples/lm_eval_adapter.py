"""minigpt2 as a model of lm-evaluation-harness (pip install minigpt2[eval]).

    python scripts/examples/lm_eval_adapter.py --model minigpt2 --model_args pretrained=tales \\
        --tasks my_task --include_path folder/with/my_task.yaml

takes lm_eval's own options and prints its own table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain, islice

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from minigpt2 import GPT2, Tokenizer, stream
from minigpt2.evaluate import Score, score_batches
from minigpt2.hub import CheckpointError, find


@register_model("minigpt2")
class MiniGPT2(TemplateLM):
    """Log-likelihoods by minigpt2.evaluate, texts by minigpt2.stream."""

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str = 8,
        dtype: str = "float32",
        device: str | None = None,
        max_batch_size: int | None = None,  # noqa: ARG002 (of --batch_size auto)
    ) -> None:
        super().__init__()
        if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
            device = "cpu"  # the harness says cuda:0 unless told otherwise
        kind = torch.float32 if dtype == "auto" else getattr(torch, dtype)
        folder, options = find(pretrained), {"dtype": kind, "device": device}
        self.network = GPT2.from_pretrained(folder, **options)
        self.speller = Tokenizer.from_pretrained(folder)
        self.batch_size = 8 if str(batch_size).startswith("auto") else int(batch_size)

    @property
    def eot_token_id(self) -> int | None:
        return self.speller.end_of_text_id

    def tok_encode(self, string: str, *_args: object, **_options: object) -> list[int]:
        """GPT-2 puts nothing before a text, so their options change nothing."""
        return self.speller.encode(string)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[object, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_options: object,
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        scores: dict[int, Score] = {}
        with tqdm(total=len(pairs), disable=disable_tqdm) as bar:
            for batch in score_batches(self.network, pairs, self.batch_size):
                scores.update(batch)
                bar.update(len(batch))
        return [(scores[n].logprob, scores[n].greedy) for n in range(len(pairs))]

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Of whole texts, in windows that do not overlap, as HFLM has them."""
        window, end = self.network.config.n_positions, self.prefix_token_id
        texts = []
        for (text,) in (request.args for request in requests):
            overlapping = get_rolling_token_windows(self.tok_encode(text), end, window, 1)
            texts.append([(None, *make_disjoint_window(pair)) for pair in overlapping])
        scores = iter(self._loglikelihood_tokens(list(chain(*texts)), disable_tqdm))
        return [sum(logprob for logprob, _ in islice(scores, len(pairs))) for pairs in texts]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """What follows each context, up to a stop string, <|endoftext|> or max_gen_toks tokens."""
        window, texts = self.network.config.n_positions, []
        for context, asked in tqdm([request.args for request in requests], disable=disable_tqdm):
            options = dict(normalize_gen_kwargs(asked, min(256, window // 2)))
            count, stop = options.pop("max_gen_toks"), options.pop("until")
            prompt = self.tok_encode(context)[-max(1, window - count) :]
            steps = stream(
                self.network,
                self.speller,
                prompt,
                stop=stop,
                max_new_tokens=count,
                **options,
            )
            texts.append("".join(step.text for step in steps))
        return texts


if __name__ == "__main__":
    try:
        cli_evaluate()
    except CheckpointError as error:
        sys.exit(f"lm_eval_adapter.py: error: {error}")
