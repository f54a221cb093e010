"""README's figures are those of the code, and the code keeps the size it promises."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import readme

ROOT = Path(readme.__file__).parents[1]


def test_line_counts_are_current() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.line_table() in text, "run scripts/readme.py"


def test_the_network_stays_small() -> None:
    names = ("config.py", "ops.py", "model.py", "cache.py")
    assert sum(readme.code_lines(ROOT / "minigpt2" / name) for name in names) < 350
    for name in names:
        for node in ast.walk(ast.parse((ROOT / "minigpt2" / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                prose = node.body[0] if ast.get_docstring(node) else None
                length = (node.end_lineno or 0) - node.lineno + 1
                length -= (prose.end_lineno or 0) - prose.lineno + 1 if prose else 0
                assert length <= 25, (name, node.name, length)


def test_the_python_block_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    exec(compile(code.replace('("gpt2")', '("tales")'), "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_the_parity_table_shows_zeros() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^(?:block|cached|logits|loss|batch|left).*?  +(\S+)  +\S+$", text, re.MULTILINE
    )
    assert len(rows) > 40
    assert set(rows) == {"0"}
    assert "fused is bit-equal, explicit within rounding" in text


def test_the_model_file_is_the_network_alone() -> None:
    source = (ROOT / "minigpt2" / "model.py").read_text(encoding="utf-8")
    for word in ("print(", "open(", "cuda", "multinomial", "optimizer", "requests"):
        assert word not in source
