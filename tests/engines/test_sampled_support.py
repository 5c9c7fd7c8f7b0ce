"""Records of draws, joined and cut."""

import math

import torch

from verl_mg.engines.engine import Sample, Sampling
from verl_mg.engines.fed_tokens import SelectedKeys
from verl_mg.engines.sampled_support import SampledSupport
from verl_mg.engines.stop_strings import cut_at_stop


def support(*candidates: list[int]) -> SampledSupport:
    sizes, ids = [len(of_token) for of_token in candidates], [token for of_token in candidates for token in of_token]
    return SampledSupport(torch.tensor(sizes, dtype=torch.int32), torch.tensor(ids, dtype=torch.int32))


def keys(*counts: int, bits: int) -> SelectedKeys:
    return SelectedKeys(torch.tensor(counts, dtype=torch.int32), torch.full((sum(counts), 2), bits, dtype=torch.uint8))


FIRST = Sample(
    3, (5, 6), (-0.1, -0.2), (0, 0), "abort", support=support([5, 9], [6]), top=torch.tensor([[[-0.1], [5.0]]] * 2),
    selected_keys=keys(0, 1, bits=3),
)  # fmt: skip
MORE = Sample(
    3, (7, 8), (-0.3, 0.0), (1, 1), "stop", support=support([1, 2, 7], [8]), top=torch.tensor([[[-0.3], [7.0]]] * 2),
    selected_keys=keys(0, 1, 2, 2, bits=5),
)  # fmt: skip
"""Of a prompt of one token; the second one's report is of the whole context."""
OBSERVED = Sample(3, (4,), (0.0,), (-1,), "stop")


def test_sample_extended_by_another_has_the_records_of_both():
    whole = FIRST.extended_by(MORE)
    assert whole.support.sizes.tolist() == [2, 1, 3, 1] and whole.support.ids.tolist() == [5, 9, 6, 1, 2, 7, 8]
    assert whole.top[:, 1, 0].tolist() == [5, 5, 7, 7]
    assert whole.selected_keys.sizes.tolist() == [0, 1, 2, 2]
    assert whole.selected_keys.entries[:, 1].tolist() == [3, 5, 5, 5, 5]  # the earlier ones as reported then
    assert FIRST.extended_by(OBSERVED).selected_keys is FIRST.selected_keys


def test_tokens_without_records_have_no_candidates_and_no_likeliest_ones():
    whole = FIRST.extended_by(OBSERVED).extended_by(MORE)
    assert whole.support.sizes.tolist() == [2, 1, 0, 3, 1] and whole.support.sizes.dtype is torch.int32
    assert whole.top[2].tolist() == [[-math.inf], [0.0]] and len(whole.top) == 5
    assert OBSERVED.extended_by(OBSERVED).support is None and OBSERVED.extended_by(OBSERVED).top is None


def test_part_has_the_candidates_of_its_tokens():
    part = FIRST.extended_by(MORE).support.part(1, 3)
    assert part.sizes.tolist() == [1, 3] and part.ids.tolist() == [6, 1, 2, 7]


def test_sample_cut_at_a_stop_string_has_the_records_of_its_tokens():
    cut = cut_at_stop(
        FIRST.extended_by(MORE), Sampling(max_new_tokens=9, stop=("67",)), lambda tokens: "".join(map(str, tokens))
    )
    assert cut.tokens == (5, 6, 7) and cut.support.ids.tolist() == [5, 9, 6, 1, 2, 7] and len(cut.top) == 3
    assert cut.selected_keys.sizes.tolist() == [0, 1, 2] and len(cut.selected_keys.entries) == 3
