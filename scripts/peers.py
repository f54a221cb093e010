"""The programs that benchmark.py compares, one in each process: python scripts/peers.py NAME FOLDER

A process loads its program, says so, and then answers each line of JSON on standard input, a
prompt's shape, with a line that says how long greedy decoding took. FOLDER holds the same random
weights in every program's own format, as `prepare` writes them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minigpt2 import GPT2, Tokenizer

Ids = list[list[int]]  # (B, T)
Generate = Callable[..., Ids]  # prompts, how many tokens, guesses of prompt lookup -> the tokens


def ours(folder: Path, kind: str | None, whole_head: bool = False) -> Generate:
    model = GPT2.from_pretrained(folder / "transformers")
    if kind:
        model.pack(kind)
    rules: list[Any] = [lambda _ids, scores: scores] if whole_head else []  # might use any score

    def generate(prompts: Ids, n: int, guesses: int = 0) -> Ids:
        options: dict[str, Any] = {"max_new_tokens": n, "eos_token_id": ()}
        options |= {"prompt_lookup_num_tokens": guesses, "processors": rules}
        new: Ids = model.generate(torch.tensor(prompts), **options)[:, len(prompts[0]) :].tolist()
        return new

    return generate


def transformers(folder: Path, dtype: str) -> Generate:
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder / "transformers", dtype=dtype).eval()

    def generate(prompts: Ids, n: int) -> Ids:
        ids = torch.tensor(prompts)
        options: dict[str, Any] = {"max_new_tokens": n, "min_new_tokens": n, "pad_token_id": 0}
        options |= {"attention_mask": torch.ones_like(ids)}
        new: Ids = model.generate(ids, **options)[:, len(prompts[0]) :].tolist()
        return new

    return generate


def ctranslate2(folder: Path, compute_type: str) -> Generate:
    import ctranslate2

    model = ctranslate2.Generator(
        str(folder / "ctranslate2"), compute_type=compute_type, inter_threads=1, intra_threads=2
    )
    tokens = json.loads((folder / "transformers" / "vocab.json").read_text(encoding="utf-8"))
    names = {token_id: token for token, token_id in tokens.items()}

    def generate(prompts: Ids, n: int) -> Ids:
        results = model.generate_batch(
            [[names[token_id] for token_id in prompt] for prompt in prompts],
            max_batch_size=len(prompts),
            max_length=n,
            min_length=n,
            include_prompt_in_result=False,
        )
        return [result.sequences_ids[0] for result in results]

    return generate


def onnxruntime(folder: Path, kind: str) -> Generate:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    path = str(folder / "onnx" / f"{kind}.onnx")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    layers = [node.name for node in session.get_inputs() if node.name.startswith("past")]
    H, D = session.get_inputs()[2].shape[2], session.get_inputs()[2].shape[4]

    def generate(prompts: Ids, n: int) -> Ids:
        ids = np.array(prompts, dtype=np.int64)
        past = [np.zeros((2, len(ids), H, 0, D), np.float32)] * len(layers)
        new = []
        for _ in range(n):
            start = past[0].shape[3]
            positions = np.arange(start, start + ids.shape[1])[None].repeat(len(ids), axis=0)
            feed = {"ids": ids, "positions": positions, **dict(zip(layers, past, strict=True))}
            logits, *past = session.run(None, feed)
            ids = logits.argmax(axis=-1)
            new.append(ids[:, 0])
        return np.stack(new, axis=1).tolist()  # type: ignore[no-any-return]

    return generate


def llama_cpp(folder: Path, kind: str) -> Generate:
    import llama_cpp

    path = str(folder / f"{kind}.gguf")
    model = llama_cpp.Llama(path, n_ctx=1024, n_batch=1024, n_threads=2, verbose=False)

    def generate(prompts: Ids, n: int) -> Ids:
        if len(prompts) > 1:
            raise ValueError("one text at a time")
        model.reset()
        model.eval(prompts[0])
        new: list[int] = []
        while True:
            last = llama_cpp.llama_get_logits_ith(model.ctx, -1)
            new.append(int(np.ctypeslib.as_array(last, shape=(model.n_vocab(),)).argmax()))
            if len(new) == n:
                return [new]
            model.eval(new[-1:])

    return generate


PEERS: dict[str, Callable[[Path], Generate]] = {
    "minigpt2, bit-identical": lambda folder: ours(folder, None),
    "minigpt2, bit-identical, packed": lambda folder: ours(folder, "exact", whole_head=True),
    "minigpt2, bit-identical, screened head": lambda folder: ours(folder, "exact"),
    **{
        f"minigpt2, {kind}": lambda folder, kind=kind: ours(folder, kind)
        for kind in ("float32", "bfloat16", "float16", "int8", "int4")
    },
    "transformers, float32": lambda folder: transformers(folder, "float32"),
    "transformers, bfloat16": lambda folder: transformers(folder, "bfloat16"),
    "CTranslate2, float32": lambda folder: ctranslate2(folder, "float32"),
    "CTranslate2, int8": lambda folder: ctranslate2(folder, "int8"),
    "onnxruntime, float32": lambda folder: onnxruntime(folder, "float32"),
    "onnxruntime, int8": lambda folder: onnxruntime(folder, "int8"),
    **{
        f"llama.cpp, {kind}": lambda folder, kind=kind: llama_cpp(folder, kind)
        for kind in ("f32", "bf16", "f16", "q8_0", "q4_0")
    },
}


# --- The same weights in every format


def prepare(model: GPT2, folder: Path) -> dict[str, str]:
    """Write the formats that are not there yet; why a program cannot take part, by its name."""
    if not (folder / "transformers").exists():
        import export

        tokenizer = Tokenizer.from_pretrained("gpt2")
        export.write_folder(model, tokenizer, folder / "transformers")
    missing: dict[str, str] = {}
    for name, write in (
        ("CTranslate2", write_ctranslate2),
        ("onnxruntime", write_onnx),
        ("llama.cpp", write_gguf),
    ):
        try:
            write(model, folder)
        except ImportError as error:
            missing[name] = f"not here ({error.name} is not installed)"
    return missing


def write_ctranslate2(_: GPT2, folder: Path) -> None:
    from ctranslate2.converters import TransformersConverter

    if not (folder / "ctranslate2").exists():
        TransformersConverter(str(folder / "transformers")).convert(str(folder / "ctranslate2"))


def write_gguf(model: GPT2, folder: Path) -> None:
    import llama_cpp

    for kind, dtype in (("f32", "float32"), ("f16", "float16"), ("bf16", "bfloat16")):
        if not (folder / f"{kind}.gguf").exists():
            import export

            tokenizer = Tokenizer.from_pretrained("gpt2")
            export.write_gguf(model, tokenizer, folder / f"{kind}.gguf", dtype)
    for kind in ("q8_0", "q4_0"):
        if not (folder / f"{kind}.gguf").exists():
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
            params.pure = True
            paths = (str(folder / f"{name}.gguf").encode() for name in ("f32", kind))
            if llama_cpp.llama_model_quantize(*paths, params):
                raise ValueError(f"llama.cpp could not write {kind}.gguf")


def write_onnx(model: GPT2, folder: Path) -> None:
    """A graph of onnxruntime's own fused operators; its int8 form quantises all matrices."""
    import onnx
    from onnxruntime.quantization import quantize_dynamic

    path = folder / "onnx"
    if not (path / "float32.onnx").exists():
        path.mkdir(exist_ok=True)
        onnx.save(
            onnx_graph(model), path / "float32.onnx", save_as_external_data=True, location="float32"
        )
    if not (path / "int8.onnx").exists():
        quantize_dynamic(
            path / "float32.onnx",
            path / "int8.onnx",
            per_channel=True,
            op_types_to_quantize=["MatMul", "Attention"],
            use_external_data_format=True,
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
        )


def onnx_graph(model: GPT2) -> Any:
    from onnx import TensorProto, helper, numpy_helper

    c, FLOAT, INT64 = model.config, TensorProto.FLOAT, TensorProto.INT64
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    weights["head"] = np.ascontiguousarray(weights["wte.weight"].T)
    weights["last"] = np.array([-1], dtype=np.int64)
    nodes: list[Any] = []

    def add(op: str, inputs: list[str], out: str, n: int = 1, **attributes: Any) -> str:
        domain = "com.microsoft" if op in ("SkipLayerNormalization", "FastGelu") else ""
        # SkipLayerNormalization's fourth output is the sum.
        outputs = [out] if n == 1 else [out, "", "", f"{out}.sum"]
        nodes.append(helper.make_node(op, inputs, outputs, domain=domain, **attributes))
        return out

    def skip(x: str, y: str, norm: str, out: str) -> str:
        norms = [f"{norm}.weight", f"{norm}.bias"]
        return add("SkipLayerNormalization", [x, y, *norms], out, 4, epsilon=c.layer_norm_epsilon)

    tokens = add("Gather", ["wte.weight", "ids"], "tokens")
    places = add("Gather", ["wpe.weight", "positions"], "places")
    x = skip(tokens, places, "h.0.ln_1", "h.0.in")
    for n in range(c.n_layer):
        h = f"h.{n}"
        inputs = [x, f"{h}.attn.c_attn.weight", f"{h}.attn.c_attn.bias", "", f"past_{n}"]
        outputs = [f"{h}.heads", f"present_{n}"]
        attributes = {"num_heads": c.n_head, "unidirectional": 1, "domain": "com.microsoft"}
        nodes.append(helper.make_node("Attention", inputs, outputs, **attributes))
        y = add("MatMul", [outputs[0], f"{h}.attn.c_proj.weight"], f"{h}.merged")
        y = add("Add", [y, f"{h}.attn.c_proj.bias"], f"{h}.attended")
        x = skip(f"{x}.sum", y, f"{h}.ln_2", f"{h}.middle")
        y = add("MatMul", [x, f"{h}.mlp.c_fc.weight"], f"{h}.fc")
        y = add("FastGelu", [y, f"{h}.mlp.c_fc.bias"], f"{h}.gelu")
        y = add("MatMul", [y, f"{h}.mlp.c_proj.weight"], f"{h}.projected")
        y = add("Add", [y, f"{h}.mlp.c_proj.bias"], f"{h}.fed")
        after = f"h.{n + 1}.ln_1" if n + 1 < c.n_layer else "ln_f"
        x = skip(f"{x}.sum", y, after, f"{h}.out")
    x = add("Gather", [x, "last"], "final", axis=1)
    add("MatMul", [x, "head"], "logits")
    shape = [2, "B", c.n_head, "P", c.head_dim]
    inputs = [
        helper.make_tensor_value_info(name, INT64, ["B", "T"]) for name in ("ids", "positions")
    ]
    layers = range(c.n_layer)
    inputs += [helper.make_tensor_value_info(f"past_{n}", FLOAT, shape) for n in layers]
    outputs = [helper.make_tensor_value_info("logits", FLOAT, ["B", 1, c.vocab_size])]
    shape = [2, "B", c.n_head, "S", c.head_dim]
    outputs += [helper.make_tensor_value_info(f"present_{n}", FLOAT, shape) for n in layers]
    tensors = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "gpt2", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


# --- A process


def forget_peak() -> None:
    """Have the process's peak of memory begin from what it holds now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_mb() -> float:
    """The most memory held since then; a file mapped into it counts as far as it was read."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the programs print is not an answer
    torch.set_num_threads(2)
    started = time.perf_counter()
    generate = PEERS[name](folder)
    print(json.dumps({"load": time.perf_counter() - started}), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        forget_peak()
        started = time.perf_counter()
        ids = generate(task["prompts"], task["new"], *task["guesses"])
        seconds = time.perf_counter() - started
        answer = {"seconds": seconds, "ids": ids, "peak_mb": peak_mb()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
