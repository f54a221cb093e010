"""cases.md leaves no report out and names no test that is not there; dependencies are bounded."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROWS = re.findall(
    r"^\| A(\d+) \| .+? \| (.+) \|$", (TESTS / "cases.md").read_text(encoding="utf-8"), re.MULTILINE
)
THERE = {
    f"{path.name}::{node.name}"
    for path in TESTS.glob("test_*.py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef)
}


def test_every_report_has_its_line() -> None:
    assert [int(number) for number, _ in ROWS] == list(range(1, 39))


@pytest.mark.parametrize(("number", "cell"), ROWS, ids=[f"A{number}" for number, _ in ROWS])
def test_a_line_names_tests_that_are_there_and_all_of_its_number(number: str, cell: str) -> None:
    named = set(re.findall(r"`(.+?)`", cell))
    assert named or "cannot occur: " in cell
    assert named <= THERE
    assert {test for test in THERE if f"::test_a{number}_" in test} <= named


def test_every_dependency_has_a_lower_bound() -> None:
    pyproject = (TESTS.parent / "pyproject.toml").read_text(encoding="utf-8")
    part = pyproject[pyproject.index("dependencies = [") : pyproject.index("[project.scripts]")]
    requirements = re.findall(r'"(.+?)"', part)
    names = {re.split(r"[^\w.-]", requirement)[0] for requirement in requirements}
    assert {"torch", "numpy", "safetensors", "tiktoken", "pytest", "transformers"} <= names
    for requirement in requirements:
        assert re.match(r"minigpt2\[|[\w.-]+(>=|==)\d", requirement), requirement
