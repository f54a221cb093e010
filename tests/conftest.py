"""Small models in which faults show, shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import export
import pytest
import torch
from hypothesis import settings
from parity import SIZES, harsh_model, hf_twin
from transformers import GPT2LMHeadModel
from transformers import logging as transformers_logging

from minigpt2 import GPT2

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may ask the network
transformers_logging.set_verbosity_error()

# A green run is green again; --hypothesis-profile=default draws other examples every time.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")

# Models this small gain nothing from a second thread; test_parity.py takes two.
torch.set_num_threads(1)

Pair = tuple[GPT2, GPT2LMHeadModel]


@pytest.fixture(scope="session")
def tiny() -> GPT2:
    """Three layers, width 48, 64 positions, 199 tokens; harsh random weights. Not to be changed."""
    return harsh_model(SIZES["tiny"])


@pytest.fixture(scope="session")
def tiny_pair(tiny: GPT2) -> Pair:
    """Ours and Hugging Face's over the same tensors."""
    return tiny, hf_twin(tiny)


@pytest.fixture
def saved(tiny: GPT2, tmp_path: Path) -> Path:
    """A folder with the tiny model's config.json and model.safetensors."""
    tiny.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def random_ids() -> Callable[..., torch.Tensor]:
    """random_ids(B, T, V=199, seed=0) -> (B, T) ids."""

    def draw(B: int, T: int, V: int = 199, seed: int = 0) -> torch.Tensor:
        return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))

    return draw


@pytest.fixture(scope="session")
def tales_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tales as scripts/export.py writes it for transformers."""
    folder = tmp_path_factory.mktemp("exported") / "tales"
    assert export.main(["tales", str(folder)]) == 0
    return folder
