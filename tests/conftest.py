"""Tests import the project's flat modules from the repository root."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "tests"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(scope="module")
def one_process():
    """For modules that make a `trainer.Trainer` in this process: what it sets for the whole process is undone after them."""
    yield
    import torch
    from megatron.core import parallel_state

    torch.use_deterministic_algorithms(False)
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
