"""Break the package in one place at a time, and see whether a test notices.

    python scripts/mutate.py --modules sampling cache checkpoint model --count 40

A mutant is a copy of the repository in which one comparison, operator, constant, condition or
statement of a module is another. The module's tests run on it in a process that has imported torch
already. Prints every survivor: a line that no test depends on, or a change that makes no
difference. Exit status: 0 if none survived, 1 otherwise.
"""

from __future__ import annotations

import argparse
import ast
import copy
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = {
    "beam": ["decoding"],
    "cache": ["model", "decoding", "speculative"],
    "checkpoint": ["checkpoint"],
    "cli": ["generate", "options"],
    "config": ["config", "model"],
    "decoding": ["decoding", "speculative", "packed", "options"],
    "evaluate": ["evaluate"],
    "explain": ["explain"],
    "explain_html": ["explain", "explain_page"],
    "explain_text": ["explain"],
    "figures": ["explain", "explain_page"],
    "generate": ["generate", "options"],
    "hub": ["hub"],
    "model": ["model", "decoding"],
    "ops": ["ops", "model"],
    "options": ["sampling", "decoding", "options"],
    "packed": ["packed"],
    "sampling": ["sampling", "decoding", "packed"],
    "speculative": ["speculative", "options"],
    "streaming": ["streaming"],
    "texts": ["decoding", "speculative"],
    "tokenizer": ["tokenizer"],
    "trace": ["explain"],
}
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.And: ast.Or,
    ast.Or: ast.And, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.Pow: ast.Mult,
}  # fmt: skip


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What might stand in a node's place."""
    other = copy.deepcopy(node)
    if isinstance(other, ast.Compare) and type(other.ops[0]) in SWAPS:
        other.ops[0] = SWAPS[type(other.ops[0])]()
        yield other
    elif isinstance(other, ast.BinOp | ast.BoolOp) and type(other.op) in SWAPS:
        other.op = SWAPS[type(other.op)]()
        yield other
    elif isinstance(other, ast.Constant) and isinstance(other.value, bool):
        yield ast.Constant(not other.value)
    elif isinstance(other, ast.Constant) and isinstance(other.value, int | float):
        yield ast.Constant(other.value + 1)
        yield ast.Constant(-other.value or 2)
    elif isinstance(other, ast.UnaryOp):  # not x, -x, ~x
        yield other.operand
    elif isinstance(other, ast.IfExp):
        yield other.body
        yield other.orelse
    elif isinstance(other, ast.If):
        other.test = ast.UnaryOp(ast.Not(), other.test)
        yield other
    elif isinstance(other, ast.Call) and other.args and not other.keywords:
        yield other.args[0]
    elif isinstance(other, ast.Expr | ast.Raise | ast.Assign | ast.AugAssign) and not (
        isinstance(other, ast.Expr) and isinstance(other.value, ast.Constant)
    ):
        yield ast.Pass()


def mutants(source: str) -> list[tuple[int, str, str]]:
    """(line, what was done, new source) of every mutant of a module."""
    found = []
    tree = ast.parse(source)
    inert = {  # annotations, and what is only said
        id(part)
        for node in ast.walk(tree)
        for name in ("annotation", "returns", "exc")
        if (child := getattr(node, name, None)) is not None
        for part in ast.walk(child)
    }
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            for at, node in enumerate(value if isinstance(value, list) else [value]):
                if (
                    not isinstance(node, ast.AST)
                    or id(node) in inert
                    or not hasattr(node, "lineno")
                ):
                    continue
                for new in changes(node):
                    if isinstance(value, list):
                        value[at] = new
                    else:
                        setattr(parent, field, new)
                    text = ast.unparse(ast.fix_missing_locations(tree))
                    was, now = (ast.unparse(n).splitlines()[0][:70] for n in (node, new))
                    found.append((node.lineno, f"{was}  ->  {now}", text))
                    if isinstance(value, list):
                        value[at] = node
                    else:
                        setattr(parent, field, node)
    return found


def run_tests(folder: Path, names: Sequence[str]) -> None:
    """In a process of its own: the tests, against the package in `folder`; the exit status."""
    import pytest

    os.chdir(folder)
    sys.path.insert(0, str(folder))
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    files = [f"tests/test_{name}.py" for name in names]
    quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is imported already
    os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *quiet, *files]))


def survives(folder: Path, module: str, seconds: float) -> bool:
    """Whether the module's tests pass in time."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=run_tests, args=(folder, TESTS[module]))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode == 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--modules", nargs="+", choices=TESTS, default=["sampling", "cache", "checkpoint", "model"])
    add("--count", type=int, default=40, help="mutants per module, drawn at random; 0: all")
    add("--seed", type=int, default=0)
    add("--seconds", type=float, default=300, help="a mutant that takes longer is noticed")
    args = parser.parse_args(argv)
    for name in ("torch", "transformers"):  # once, for all mutants
        __import__(name)
    survivors = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "copy")
        ignored = shutil.ignore_patterns(".*", "__pycache__", "weights")
        shutil.copytree(ROOT, folder, ignore=ignored)
        (folder / "weights").symlink_to(ROOT / "weights")
        os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        for module in args.modules:
            path = folder / "minigpt2" / f"{module}.py"
            source = path.read_text(encoding="utf-8")
            everything = mutants(source)
            drawn = random.Random(args.seed).sample(
                everything, min(args.count or len(everything), len(everything))
            )
            if not survives(folder, module, args.seconds):
                print(f"{module}: its tests fail as it is")
                return 1
            alive = 0
            for line, what, text in sorted(drawn):
                path.write_text(text, encoding="utf-8")
                if survives(folder, module, args.seconds):
                    alive += 1
                    print(f"{module}.py:{line}: {what}", flush=True)
            path.write_text(source, encoding="utf-8")
            print(f"{module}: {alive} of {len(drawn)} mutants survived ({len(everything)} in all)")
            survivors += alive
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
