"""Write into README.md what a script can know better: line counts, and the parity table.

python scripts/readme.py           # the line counts
python scripts/readme.py parity    # the parity table of --size gpt2 as well (minutes, 3 GB)
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
ORDER = {
    "config.py": "the numbers that fix a model's shape, from config.json",
    "ops.py": "the arithmetic, twice: formulas and kernels",
    "model.py": "the network, from ids to scores",
    "cache.py": "keys and values of the tokens seen",
    "hub.py": "a name -> a folder, downloaded where need be",
    "checkpoint.py": "a folder -> a model, and back",
    "tokenizer.py": "text -> ids, and back",
    "options.py": "what a caller may ask of generation",
    "sampling.py": "scores -> a token",
    "texts.py": "texts under way: ids, mask and cache that move together",
    "packed.py": "matrices repacked for the CPU, and a screened head",
    "decoding.py": "the loop: prefill and decode",
    "beam.py": "beam search",
    "speculative.py": "tokens guessed ahead and verified at once",
    "streaming.py": "text as it grows, stop strings",
    "cli.py": "what the command lines have in common",
    "generate.py": "the command line",
    "trace.py": "one forward pass, recorded: stages, attention, logit lens",
    "figures.py": "what the views of a trace show",
    "explain.py": "the command line of explain",
    "explain_text.py": "a trace in the terminal",
    "explain_html.py": "a trace as a page",
    "evaluate.py": "log-likelihood, perplexity, multiple choice",
}


def code_lines(path: Path) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    source = path.read_text(encoding="utf-8")
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            prose |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in prose
        for number, line in enumerate(source.splitlines(), start=1)
    )


def line_table() -> str:
    rows = ["| file | lines of code | what it is |", "|---|---|---|"]
    for name, meaning in ORDER.items():
        path = ROOT / "minigpt2" / name
        rows.append(f"| `minigpt2/{name}` | {code_lines(path)} | {meaning} |")
    return "\n".join(rows)


def parity_table() -> str:
    command = [sys.executable, "scripts/parity.py", "--size", "gpt2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return f"```\n{done.stdout.rstrip()}\n```"


def insert(text: str, mark: str, content: str) -> str:
    """Put content behind <!-- mark -->, in place of what a former run put there."""
    pattern = rf"<!-- {mark} -->\n(.*?<!-- end {mark} -->\n)?"
    block = f"<!-- {mark} -->\n{content}\n<!-- end {mark} -->\n"
    return re.sub(pattern, lambda _: block, text, count=1, flags=re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    readme = ROOT / "README.md"
    text = insert(readme.read_text(encoding="utf-8"), "lines", line_table())
    if "parity" in arguments:
        text = insert(text, "parity", parity_table())
    readme.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
