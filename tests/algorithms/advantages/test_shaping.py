"""The overlong penalty at every length of a small case, and where it makes no sense."""

import pytest
import torch

from verl_mg.algorithms.advantages import soft_overlong_penalty
from verl_mg.errors import UserError


def test_soft_overlong_penalty_of_every_length_equals_the_formula() -> None:
    for length in range(15):
        sloping = (10 - 4 - length) / 4
        expected = 0.0 if length <= 6 else sloping if length <= 10 else -1.0
        assert soft_overlong_penalty(torch.tensor([length]), 10, 4).item() == expected


@pytest.mark.parametrize("buffer", [0, 11, -1])
def test_buffers_that_make_no_sense(buffer: int) -> None:
    with pytest.raises(UserError, match=f"overlong buffer is {buffer} tokens of 10. Write 1 to 10"):
        soft_overlong_penalty(torch.tensor([3]), 10, buffer)
