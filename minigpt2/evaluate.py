"""Measure a model: python -m minigpt2.evaluate perplexity FILE...

Everything is one primitive, `loglikelihood`: how probable is this continuation after that context?
Perplexity asks it of a text in overlapping windows, LAMBADA of a last word, multiple choice of
every answer.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gzip
import itertools
import json
import lzma
import math
import os
import re
import signal
import statistics
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minigpt2 import cli
from minigpt2.cli import (
    Parser,
    add_fast,
    check_fast,
    commit_of,
    find_model,
    importing,
    load_model,
    new_parser,
    pick_device,
)

if TYPE_CHECKING:
    from minigpt2.config import GPT2Config
    from minigpt2.model import GPT2

PROG = "minigpt2.evaluate"
EPILOG = """\
perplexity   Files of text (also .xz, .gz; - is standard input), each one stream of tokens. Every
             token but a file's first is scored once, in windows of --context tokens that advance
             by --stride. Words and bytes are those of the whole text.
lambada      Lines {"text": "..."}. last_word: all tokens of the last word, as lm-evaluation-harness
             scores it. last_token: only its last token, given those before, as the paper's authors.
hellaswag    The data set's own lines: ctx, endings, label. --style harness prepares them as
             lm-evaluation-harness does.
choice       Lines {"context": "...", "choices": ["...", ...], "label": 0}; a space joins them.

acc takes the answer of the highest probability, acc_norm that of the highest per character,
acc_token per token. Under torchrun the work is shared among the processes; the figures are the
same. Ctrl-C prints what is known so far.

Exit status: 0 fine, 1 failure, 2 wrong usage, 130 interrupted."""

Ids = Sequence[int] | NDArray[np.int64]  # token ids
Request = tuple[Ids, Ids]  # context and continuation
Line = dict[str, Any]  # of a .jsonl file
Encode = Callable[[str], list[int]]
STANDARD_INPUT = Path("-")
OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}


@dataclasses.dataclass(frozen=True)
class Score:
    """What a model gives a continuation, token by token."""

    logprobs: tuple[float, ...]  # natural logarithms
    best: tuple[bool, ...]  # whether it was the most probable token

    @property
    def logprob(self) -> float:
        """Of the whole continuation."""
        return math.fsum(self.logprobs)

    @property
    def greedy(self) -> bool:
        """Whether greedy decoding would have written it."""
        return all(self.best)

    @property
    def count(self) -> int:
        """Tokens scored."""
        return len(self.logprobs)


# --- The primitive


def loglikelihood(
    model: GPT2,
    context_ids: Sequence[Ids],
    continuation_ids: Sequence[Ids],
    batch_size: int = 8,
) -> list[Score]:
    """How probable each continuation is after its context; lists of token ids, one Score for each.

    What the rows of a batch have in common in front is computed once: the question of several
    answers, or the examples in front of all questions. A text longer than the model's window loses
    its oldest tokens, as in lm-evaluation-harness.

    Raises:
        ValueError: an empty context or continuation, or a continuation longer than the window.
    """
    requests = list(zip(context_ids, continuation_ids, strict=True))
    scores = dict(score for batch in score_batches(model, requests, batch_size) for score in batch)
    return [scores[index] for index in range(len(requests))]


def score_batches(
    model: GPT2, requests: Sequence[Request], batch_size: int = 8, share: slice = slice(None)
) -> Iterator[list[tuple[int, Score]]]:
    """Score the requests batch by batch, each with its index; `share` picks some of the batches."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    import torch

    from minigpt2.texts import evaluating

    rows = [_fit(*request, model.config) for request in requests]
    batches = list(_batches(rows, batch_size))
    for batch in batches[share]:
        with torch.inference_mode(), evaluating(model):
            scores = _score([rows[index] for index in batch], model)
        yield list(zip(batch, scores, strict=True))


def _fit(context: Ids, continuation: Ids, config: GPT2Config) -> Request:
    """The request without what the window cannot hold; the last token is only predicted."""
    window, last = config.n_positions, config.vocab_size - 1
    if not len(context) or not len(continuation):
        raise ValueError(
            f"a context of {len(context)} tokens and a continuation of {len(continuation)}: both "
            "need one at least (a text without context starts from <|endoftext|>)"
        )
    if len(continuation) > window:
        raise ValueError(
            f"a continuation of {len(continuation)} tokens exceeds n_positions {window}"
        )
    for token_id in (f(ids) for ids in (context, continuation) for f in (np.min, np.max)):
        if not 0 <= token_id <= last:
            raise ValueError(f"token id {token_id} is outside the vocabulary 0..{last}")
    spare = len(context) + len(continuation) - window - 1
    return context[max(0, spare) :], continuation


def _batches(rows: Sequence[Request], batch_size: int) -> Iterator[list[int]]:
    """Indices of what is scored together: rows of one context, and, by length, all the others."""
    by_context: dict[int, list[int]] = defaultdict(list)
    for index, (context, _) in enumerate(rows):  # a hash that two share would do no harm
        by_context[hash(np.asarray(context, dtype=np.int64).tobytes())].append(index)
    alone = [group[0] for group in by_context.values() if len(group) == 1]
    alone.sort(key=lambda index: sum(map(len, rows[index])), reverse=True)
    for group in (*(group for group in by_context.values() if len(group) > 1), alone):
        for start in range(0, len(group), batch_size):
            yield group[start : start + batch_size]


def _score(rows: Sequence[Request], model: GPT2) -> list[Score]:
    """One batch: what all rows begin with once, then the rest of each, padded on the right, where
    causal attention does not look."""
    import torch

    from minigpt2.sampling import NOT_NUMBERS

    fed = [[*map(int, context), *map(int, continuation[:-1])] for context, continuation in rows]
    longest = max(map(len, fed))
    first = min(len(context) for context, _ in rows) - 1  # position that predicts a scored token
    alike = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*fed, strict=False))
    shared = min(len(list(alike)), first)
    weight, cache = model.wte.weight, None
    if len(rows) == 1 or 2 * shared < longest:
        shared = 0  # not worth a pass of its own
    else:
        cache = model.new_cache(1, longest)
        model(torch.tensor([fed[0][:shared]], device=weight.device), cache=cache, logits_to_keep=1)
        cache.select(torch.zeros(len(rows), dtype=torch.long, device=weight.device))
    padded = [ids[shared:] + [0] * (longest - len(ids)) for ids in fed]
    ids = torch.tensor(padded, device=weight.device)
    logits = model(ids, cache=cache, logits_to_keep=longest - first)  # (B, longest - first, V)
    if not logits.isfinite().all():
        raise ValueError(NOT_NUMBERS)
    scores = []
    for row, (context, continuation) in zip(logits, rows, strict=True):
        start = len(context) - 1 - first
        scored = row[start : start + len(continuation)]
        scored = scored.to(torch.promote_types(scored.dtype, torch.float32))
        targets = torch.tensor(np.asarray(continuation), device=weight.device)
        # Not log_softmax, whose float32 result is off by 5e-6 over a vocabulary of this size.
        picked = scored.gather(-1, targets[:, None]).squeeze(-1) - scored.logsumexp(dim=-1)
        best = scored.argmax(dim=-1) == targets
        scores.append(Score(tuple(picked.tolist()), tuple(best.tolist())))
    return scores


# --- Tasks: what is asked, and what the scores say


class Task(NamedTuple):
    """The requests, and what to make of the scores that are known: figures by name."""

    requests: list[Request]
    summarise: Callable[[dict[int, Score]], dict[str, Any]]


def windows(n: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, first, end): tokens first .. end - 1 of n are scored after begin .. first - 1.

    The windows of Hugging Face's guide to the perplexity of models of fixed length, except that a
    window always holds a token before the first scored one, so that stride == context leaves none
    out.
    """
    done = 1  # nothing precedes the first token
    for begin in range(0, n, stride):
        end = min(begin + context, n)
        if done < end:
            yield min(begin, done - 1), done, end
        done = end
        if end == n:
            return


def perplexity(texts: Sequence[str], encode: Encode, args: argparse.Namespace) -> Task:
    """The strided perplexity of files, every token but each file's first scored once."""
    requests: list[Request] = []
    for path, text in zip(args.files, texts, strict=True):
        ids = np.array(encode(text), dtype=np.int64)  # whose windows are views
        if len(ids) < 2:
            raise ValueError(f"{path}: {len(ids)} tokens; a first one and one to score are needed")
        for begin, first, end in windows(len(ids), args.context, args.stride):
            requests.append((ids[begin:first], ids[first:end]))
    size = {
        "words": sum(len(text.split()) for text in texts),
        "bytes": sum(len(text.encode("utf-8", "surrogateescape")) for text in texts),
    }

    def summarise(scores: dict[int, Score]) -> dict[str, Any]:
        tokens = sum(score.count for score in scores.values())
        nats = -math.fsum(logprob for score in scores.values() for logprob in score.logprobs)
        result = {"tokens_scored": tokens, "loss": nats / tokens, "perplexity": exp(nats / tokens)}
        if len(scores) == len(requests):  # words and bytes are those of the whole text
            result |= size
            result |= {"word_perplexity": exp(nats / max(1, size["words"]))}
            result |= {"bits_per_byte": nats / math.log(2) / size["bytes"]}
        return result

    return Task(requests, summarise)


def lambada(lines: Sequence[Line], encode: Encode, args: argparse.Namespace) -> Task:
    """The last word of each text, and its last token, after everything before."""
    requests = []
    for line in lines:
        before, space, word = line["text"].rstrip().rpartition(" ")
        if not before.strip():
            raise ValueError(f'{line["from"]}: "text" needs a last word, and a text before it')
        requests.append(split(line, before, space + word, encode, args.n_positions))

    def summarise(scores: dict[int, Score]) -> dict[str, Any]:
        words = [(score.logprob, score.greedy) for score in scores.values()]
        tokens = [(score.logprobs[-1], score.best[-1]) for score in scores.values()]
        result: dict[str, Any] = {"examples": len(scores)}
        for name, values in (("last_word", words), ("last_token", tokens)):
            result |= rate(f"{name}_acc", [right for _, right in values])
            result[f"{name}_perplexity"] = exp(-statistics.fmean(value for value, _ in values))
        return result

    return Task(requests, summarise)


def choice(lines: Sequence[Line], encode: Encode, args: argparse.Namespace) -> Task:
    """Whether the right one of several continuations is the most probable."""
    requests: list[Request] = []
    groups = []
    for line in lines:
        choices, label = line["choices"], line["label"]
        texts = all(isinstance(text, str) and text for text in choices)
        if not texts or len(choices) < 2 or not 0 <= label < len(choices):
            raise ValueError(f"{line['from']}: two answers or more are needed, and label's number")
        if not line["context"].strip():
            raise ValueError(f"{line['from']}: an empty context; write <|endoftext|> for none")
        groups.append(range(len(requests), len(requests) + len(choices)))
        context, window = line["context"], args.n_positions
        requests += [split(line, context, " " + text, encode, window) for text in choices]

    def summarise(scores: dict[int, Score]) -> dict[str, Any]:
        right: dict[str, list[bool]] = {"acc": [], "acc_norm": [], "acc_token": []}
        for line, group in zip(lines, groups, strict=True):
            if scores.keys() >= set(group):
                sums = [scores[index].logprob for index in group]
                characters = [
                    value / len(t) for value, t in zip(sums, line["choices"], strict=True)
                ]
                tokens = [scores[index].logprob / scores[index].count for index in group]
                for name, values in zip(right, (sums, characters, tokens), strict=True):
                    right[name].append(values.index(max(values)) == line["label"])
        result: dict[str, Any] = {"examples": len(right["acc"])}
        for name, hits in right.items():
            result |= rate(name, hits) if hits else {}
        return result

    return Task(requests, summarise)


def hellaswag(lines: Sequence[Line], encode: Encode, args: argparse.Namespace) -> Task:
    """HellaSwag as multiple choice: the endings after their context, or, in the harness' style,
    after title and context, cleaned of WikiHow's marks."""
    questions = []
    for line in lines:
        context, endings = line["ctx"], line["endings"]
        if not all(isinstance(ending, str) for ending in endings):
            raise ValueError(f"{line['from']}: an ending is no text")
        if args.style == "harness":
            context = f"{line['activity_label']}: {line['ctx_a']} {line['ctx_b'].capitalize()}"
            context, *endings = map(clean, (context, *endings))
        label = int(line["label"]) if str(line["label"]).isdecimal() else -1
        question = {"context": context, "choices": endings, "label": label}
        questions.append(question | {"from": line["from"]})
    return choice(questions, encode, args)


def clean(text: str) -> str:
    """Without the [title], [step] and [header] of WikiHow, as lm-evaluation-harness' hellaswag."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def split(line: Line, context: str, continuation: str, encode: Encode, window: int) -> Request:
    """Context and continuation as ids, cut as lm-evaluation-harness does: they are encoded
    together, and spaces at the context's end belong to the word behind them.

    Raises:
        ValueError: the continuation is longer than the model's window.
    """
    context_ids = encode(context.rstrip())
    continuation_ids = encode(context + continuation)[len(context_ids) :]
    if (count := len(continuation_ids)) > window:
        raise ValueError(f"{line['from']}: {count} tokens to score exceed n_positions {window}")
    return context_ids, continuation_ids


def rate(name: str, hits: Sequence[bool]) -> dict[str, float]:
    """The share of hits, and the standard error of that share."""
    share = statistics.fmean(hits)
    return {name: share, f"{name}_stderr": math.sqrt(share * (1 - share) / max(1, len(hits) - 1))}


def exp(x: float) -> float | None:
    """None for what no float can hold."""
    return math.exp(x) if x < math.log(sys.float_info.max) else None


TASKS: dict[str, Callable[[Sequence[Any], Encode, argparse.Namespace], Task]] = {
    "perplexity": perplexity,
    "lambada": lambada,
    "hellaswag": hellaswag,
    "choice": choice,
}
FIELDS: dict[str, dict[str, Any]] = {
    "lambada": {"text": str},
    "hellaswag": {"ctx": str, "endings": list, "label": (int, str)},
    "choice": {"context": str, "choices": list, "label": int},
}
HARNESS_FIELDS = {"activity_label": str, "ctx_a": str, "ctx_b": str}


# --- The command


def read_text(path: Path) -> str:
    """The text of a file or of standard input (-), unpacked if it is .xz or .gz, without a byte
    order mark.

    Raises:
        ValueError: it is not UTF-8, or not what its suffix says.
    """
    try:
        if path == STANDARD_INPUT:
            content: bytes = sys.stdin.buffer.read()
        else:
            with OPENERS.get(path.suffix, open)(path, "rb") as file:
                content = file.read()
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 (byte {error.start}): convert it first") from None
    except (lzma.LZMAError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: damaged, or not {path.suffix} at all: {error}") from None


def read_lines(path: Path, fields: dict[str, Any]) -> list[Line]:
    """The JSON objects of a file, each with "from", the place it came from.

    Raises:
        ValueError: a line is no object with these fields, or there is none.
    """
    lines = []
    # Not splitlines: JSON may hold U+2028 and U+0085 as they are.
    for number, text in enumerate(read_text(path).split("\n"), start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: line {number} is not JSON: {error}") from None
        for name, kind in fields.items():
            if not isinstance(line, dict) or not isinstance(line.get(name), kind):
                raise ValueError(f'{path}: line {number} has no "{name}" of the right type')
        lines.append(line | {"from": f"{path}: line {number}"})
    if not lines:
        raise ValueError(f"{path}: empty")
    return lines


def read_files(args: argparse.Namespace) -> list[Any]:
    """The texts of perplexity's files, or all lines of another task's."""
    if args.task == "perplexity":
        return [read_text(path) for path in args.files]
    fields = FIELDS[args.task] | (HARNESS_FIELDS if args.style == "harness" else {})
    return [line for path in args.files for line in read_lines(path, fields)]


def build_parser() -> Parser:
    parser = new_parser(PROG, "Measure a GPT-2.", EPILOG)
    add_fast(parser)
    add = parser.add_argument
    add("task", choices=TASKS)
    add("files", nargs="+", type=Path, metavar="FILE")
    add("--context", type=int, help="perplexity: tokens in a window; default: the model's")
    add("--stride", type=int, help="perplexity: tokens between windows; default: half of that")
    add("--style", choices=("completion", "harness"), help="hellaswag: default completion")
    add("-b", "--batch-size", type=int, default=8, help="texts in one pass; default 8")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def check_usage(args: argparse.Namespace) -> None:
    """What argparse cannot see.

    Raises:
        ValueError: a number is out of range, or an option that the task does not have.
    """
    check_fast(args)
    for name, task in (("context", "perplexity"), ("stride", "perplexity"), ("style", "hellaswag")):
        if getattr(args, name) is not None and args.task != task:
            raise ValueError(f"--{name} is an option of {task} alone")
    for name in ("context", "stride", "batch_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


def set_windows(args: argparse.Namespace) -> None:
    """The defaults of --context and --stride, which depend on the model.

    Raises:
        ValueError: the windows are too long for it, or would leave tokens out.
    """
    n_positions = args.n_positions
    args.context = args.context or n_positions
    args.stride = args.stride or max(1, args.context // 2)
    if args.context > n_positions:
        raise ValueError(f"--context {args.context} exceeds the model's n_positions {n_positions}")
    if args.stride > args.context:
        raise ValueError(
            f"--stride {args.stride} exceeds --context {args.context}: tokens would be left out"
        )


@contextlib.contextmanager
def processes(args: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """This process's number and how many there are, where torchrun started several."""
    rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if count == 1:
        yield 0, 1
        return
    import torch
    import torch.distributed as dist

    if pick_device(args) == "cuda":
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(args.device)
    dist.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
    try:
        yield rank, count
    finally:
        dist.destroy_process_group()


def score_task(
    model: GPT2, task: Task, args: argparse.Namespace, rank: int, count: int
) -> dict[int, Score]:
    """The scores by request: all of them, or after Ctrl-C those that are known."""
    from tqdm import tqdm

    known: dict[int, Score] = {}
    hidden = True if rank or args.quiet else None  # None: hidden unless a terminal looks on
    with tqdm(total=len(task.requests), unit="request", disable=hidden) as bar:
        try:
            share = slice(rank, None, count)
            for batch in score_batches(model, task.requests, args.batch_size, share):
                known.update(batch)
                bar.update(len(batch) * count)
        except KeyboardInterrupt:
            pass
        # From here to the end there is nothing to break off. torchrun passes Ctrl-C on, so that a
        # process gets it twice, or while it waits for the others.
        cli.at_ctrl_c(signal.SIG_IGN)
    if count > 1:
        import torch.distributed as dist

        parts: list[dict[int, Score]] = [{}] * count
        dist.all_gather_object(parts, known)
        known = {index: score for part in parts for index, score in part.items()}
    return dict(sorted(known.items()))  # one order of summing, however they were shared


def report(result: dict[str, Any], as_json: bool) -> str:
    """One JSON object, or a line for each figure."""
    if as_json:
        return json.dumps(result, ensure_ascii=True)
    shown = {k: f"{v:.6g}" if isinstance(v, float) else str(v) for k, v in result.items()}
    width = max(map(len, shown))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in shown.items())


def work(args: argparse.Namespace) -> int:
    """Read, score, print; the exit status."""
    content = read_files(args)
    name, folder = find_model(args, PROG)  # before torch, to refuse at once
    with importing():
        from minigpt2.tokenizer import Tokenizer

    with processes(args) as (rank, count):
        model = load_model(args, folder)
        encode = functools.partial(
            Tokenizer.from_pretrained(folder).encode, special=not args.plain_special
        )
        recipe: dict[str, Any] = {"task": args.task, "files": [str(path) for path in args.files]}
        recipe |= {"model": name, "revision": commit_of(folder), "dtype": args.dtype}
        recipe |= {"fast": args.fast, "batch_size": args.batch_size}
        recipe |= {"plain_special": args.plain_special}
        args.n_positions = model.config.n_positions
        if args.task == "perplexity":
            set_windows(args)
            recipe |= {"context": args.context, "stride": args.stride}
        elif args.task == "hellaswag":
            recipe["style"] = args.style or "completion"
        task = TASKS[args.task](content, encode, args)
        known = score_task(model, task, args, rank, count)
        complete = len(known) == len(task.requests)
        if rank == 0 and not complete:
            amount = f"{len(known)} of {len(task.requests)} requests"
            cli.complain(PROG, f"interrupted; what follows is of {amount}")
        if rank == 0 and known:
            result = recipe | {"complete": complete} | task.summarise(known)
            print(report(result, args.json), flush=True)
    return 0 if complete else 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    cli.open_streams()
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        check_usage(args)
    except ValueError as error:
        parser.error(str(error))
    was = signal.getsignal(signal.SIGINT)
    try:
        return cli.run(args, PROG, lambda: work(args))
    finally:
        cli.at_ctrl_c(was)  # score_task has turned it off


if __name__ == "__main__":
    sys.exit(main())
