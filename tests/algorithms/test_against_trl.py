"""Off-policy sequence masking as TRL 1.16 has it. Skipped without TRL, which tools/install/peers.sh installs."""

import ast
from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch

from tests.algorithms.verl_peer import PEERS
from verl_mg.algorithms.correction import drifted_sequences

FILE = PEERS / "trl" / "trainer" / "grpo_trainer.py"


def their_mask(*arguments: torch.Tensor, delta: float) -> torch.Tensor:
    """GRPOTrainer.get_off_policy_mask, compiled from its source: to import TRL takes seconds."""
    if not FILE.exists():
        pytest.skip("TRL is not installed; run tools/install/peers.sh to compare with it")
    source = FILE.read_text(encoding="utf-8")
    (function,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "get_off_policy_mask"
    ]
    namespace = {"torch": torch}
    exec(dedent(ast.get_source_segment(source, function) or ""), namespace)
    return SimpleNamespace(**namespace).get_off_policy_mask(*arguments, delta)


def test_off_policy_sequence_masking_of_random_rows_equals_trl() -> None:
    generator = torch.Generator().manual_seed(2)
    new, noise = torch.randn(2, 40, 9, generator=generator, dtype=torch.float64)
    rollout, advantages = new + 0.5 * noise, torch.randn(40, 1, generator=generator).expand(40, 9)
    mask = torch.rand(40, 9, generator=generator) < 0.7
    kept = their_mask(advantages[:, :1], new, rollout, mask.double(), delta=0.1).bool().expand(40, 9)
    ids = torch.arange(40).repeat_interleave(9)
    flat = (column.flatten() for column in (new, rollout, advantages, mask))
    found = drifted_sequences(*flat, ids, 0.1).view(40, 9)
    assert torch.equal(found, ~kept & mask) and 3 < found.any(1).sum() < 37
