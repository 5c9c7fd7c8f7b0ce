"""Every loss: the same value and gradient under any split of the rows into ranks and micro-batches, and any order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl_mg.algorithms import losses
from verl_mg.algorithms.advantages import moments
from verl_mg.algorithms.aggregation import MODES, aggregate, normalizer
from verl_mg.algorithms.correction import drifted_sequences

Columns = dict[str, Tensor]
Parts = Sequence[Columns]
Units = Sequence[Sequence[int]]

ROWS, MAX_LENGTH = 12, 10
PAIRS = [[row, row + ROWS // 2] for row in range(ROWS // 2)]  # the chosen row and the rejected
SINGLES = tuple([row] for row in range(ROWS))
HELPERS = {*("covariances", "priorities", "share_count", "tokens_at_least", "tokens_between"), "explained_variance"}


def batch(dtype: torch.dtype, outside: float = torch.nan) -> list[Columns]:
    """The rows: 1 to 9 tokens each, masks with holes and a number outside them; row 3 has an empty mask."""
    generator = torch.Generator().manual_seed(7)

    def noise(length: int, scale: float) -> Tensor:
        return torch.randn(length, generator=generator, dtype=torch.float64) * scale

    rows = []
    for row in range(ROWS):
        length = 1 + (row * 5) % 9
        mask = torch.rand(length, generator=generator) < 0.7
        mask[-1] = True
        last = torch.zeros_like(mask)
        last[-1] = True
        old = -noise(length, 1.5).abs()
        reals = {
            "logprobs": old + noise(length, 0.3),
            "old": old,
            "ref": old + noise(length, 0.5),
            "advantages": noise(1, 1.0).expand(length).clone(),
            "token_advantages": noise(length, 1.0),
            "labels": torch.full((length,), float(row % 2), dtype=torch.float64),
            "weights": torch.rand(length, generator=generator, dtype=torch.float64),
            "old_values": noise(length, 1.0),
            "returns": noise(length, 1.0),
        }
        columns = {name: torch.where(mask, column, outside).to(dtype) for name, column in reals.items()}
        ids = {"sample_id": row + 100, "pair": 900 - row % (ROWS // 2)}
        columns |= {name: torch.full((length,), number) for name, number in ids.items()}
        columns |= {"mask": mask, "masked_but_3": mask & (row != 3), "last": last, "position": torch.arange(length)}
        rows.append(columns | {"chosen": torch.full((length,), row < ROWS // 2)})
    return rows


def select_globally(parts: Parts, values: Sequence[Tensor], allowed: Sequence[Tensor], fraction: float) -> list[Tensor]:
    """Tokens of the highest values over all parts, as ranks do it: each gives its largest, all cut at the same one."""
    count = losses.share_count(sum(int(part["masked_but_3"].sum()) for part in parts), fraction)
    best = torch.cat([value[where] for value, where in zip(values, allowed, strict=True)])
    threshold = best.topk(min(count, len(best))).values[-1].item()
    return [losses.tokens_at_least(*pair, threshold) for pair in zip(values, allowed, strict=True)]


def add_choices(parts: Parts) -> None:
    """The columns of Clip-Cov and KL-Cov, by sums over the parts."""
    names = ("old", "token_advantages")
    totals = [sum(moments(part[name], part["masked_but_3"]) for part in parts) for name in names]
    found = [losses.covariances(*(part[name] for name in names), part["masked_but_3"], *totals) for part in parts]
    drawn = [losses.priorities(part["sample_id"], part["position"], 5) for part in parts]
    between = [
        losses.tokens_between(value, part["masked_but_3"], -0.5, 0.5) for value, part in zip(found, parts, strict=True)
    ]
    penalized = select_globally(parts, found, [part["masked_but_3"] for part in parts], 0.15)
    cut = select_globally(parts, drawn, between, 0.15)
    for part, *columns in zip(parts, penalized, cut, strict=True):
        part["penalized"], part["cut"] = columns


@dataclass(frozen=True)
class Case:
    """A loss as a function of columns, the leaf in `logprobs`; which mask it is given; what must stay together."""

    call: Callable[[Columns], tuple[Tensor, losses.Metrics]]
    mask: str = "masked_but_3"
    units: Units = SINGLES


def of(name: str, columns: str, *options: float | str, mask: str = "masked_but_3", units: Units = SINGLES) -> Case:
    """A loss by name, of columns and options."""

    def call(c: Columns) -> tuple[Tensor, losses.Metrics]:
        return getattr(losses, name)(*(c[column] for column in columns.split()), *options)

    return Case(call, mask, units)


POLICY = "logprobs old token_advantages masked_but_3"
PREFERENCE = "logprobs ref mask pair chosen"


def masked_loss(c: Columns) -> tuple[Tensor, losses.Metrics]:
    given = c["token_advantages"], c["masked_but_3"]
    loss, metrics = losses.clipped_policy_loss(c["logprobs"], c["old"], *given, 0.2, 0.28)
    drifted = drifted_sequences(c["logprobs"], c["old"], *given, c["sequence_ids"], 0.05)
    return torch.where(drifted, 0.0, loss), metrics | {"opsm_masked": drifted.to(loss.dtype)}


LOSSES: dict[str, Case] = {
    "clipped_policy_loss": of("clipped_policy_loss", POLICY, 0.2, 0.28, 3.0),
    "cispo_loss": of("cispo_loss", POLICY, 0.2, 0.28),
    "sapo_loss": of("sapo_loss", POLICY),
    "gpg_loss": of("gpg_loss", "logprobs token_advantages masked_but_3"),
    "gspo_loss": of("gspo_loss", f"{POLICY} sequence_ids", 0.05, 0.06, 1.1),
    "gmpo_loss": of("gmpo_loss", "logprobs old advantages masked_but_3 sequence_ids", 0.1, 0.1, 1.2),
    "dppo_loss, tv": of("dppo_loss", POLICY, "tv", 0.05, 0.05),
    "dppo_loss, kl": of("dppo_loss", POLICY, "kl", 0.05, 0.05),
    "clipped_policy_loss, off-policy sequence masking": Case(masked_loss),
    "clip_cov_loss": of("clip_cov_loss", f"{POLICY} cut", 0.2, 0.28, 3.0),
    "kl_cov_loss": of("kl_cov_loss", f"{POLICY} penalized", 1.0),
    "value_loss": of("value_loss", "logprobs old_values returns masked_but_3", 0.5),
    "sft_loss": of("sft_loss", "logprobs masked_but_3"),
    "imitation_loss": of("imitation_loss", "logprobs weights masked_but_3"),
    "dpo_loss": of("dpo_loss", PREFERENCE, 0.3, 0.1, "sigmoid", mask="mask", units=PAIRS),
    "dpo_loss, hinge": of("dpo_loss", PREFERENCE, 0.3, 0.0, "hinge", mask="mask", units=PAIRS),
    "dpo_loss, ipo": of("dpo_loss", PREFERENCE, 0.3, 0.0, "ipo", mask="mask", units=PAIRS),
    "bradley_terry_loss": of("bradley_terry_loss", "logprobs last pair chosen", mask="last", units=PAIRS),
    "prime_loss": of("prime_loss", "logprobs ref masked_but_3 sequence_ids labels", 0.4),
}


def test_the_table_is_complete():
    assert {name.split(",")[0] for name in LOSSES} == set(losses.__all__) - HELPERS - {"Metrics"}


def pack(rows: Sequence[Columns]) -> Columns:
    """Rows side by side, with sequence ids of this micro-batch."""
    together = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    lengths = torch.tensor([len(row["mask"]) for row in rows])
    return together | {"sequence_ids": torch.repeat_interleave(torch.arange(len(rows)), lengths)}


def run(
    case: Case, mode: str, split: Sequence[Sequence[int]], dtype: torch.dtype, outside: float = torch.nan
) -> tuple[float, list[Tensor]]:
    """The sum over micro-batches, and the gradient by the log-probs of each row; outside the mask both are silent."""
    rows = batch(dtype, outside)
    scored = [int(row[case.mask].sum()) for row in rows]
    divisor = normalizer(mode, sum(scored), sum(count > 0 for count in scored), MAX_LENGTH)
    parts = [pack([rows[row] for row in numbers]) for numbers in split]
    add_choices(parts)
    value, gradients = 0.0, [torch.empty(0)] * ROWS
    for part, numbers in zip(parts, split, strict=True):
        leaf = part["logprobs"] = part["logprobs"].requires_grad_()
        loss, metrics = case.call(part)
        total = aggregate(loss, part[case.mask], part["sequence_ids"], mode, divisor)
        total.backward()
        for column in (loss, leaf.grad, *metrics.values()):
            assert column.shape == leaf.shape and column.dtype == dtype
            assert column.isfinite().all() and not column[~part[case.mask]].any()
        assert not any(metric.requires_grad for metric in metrics.values())
        value += total.item()
        for row, gradient in zip(numbers, leaf.grad.split([len(rows[row]["mask"]) for row in numbers]), strict=True):
            gradients[row] = gradient
    return value, gradients


def splits(case: Case) -> list[list[list[int]]]:
    """Micro-batches: one a unit; two ranks of two; all in another order; uneven ones in another order."""
    shuffled = [case.units[i] for i in torch.randperm(len(case.units), generator=torch.Generator().manual_seed(2))]
    mixed = [row for unit in shuffled for row in reversed(unit)]
    at = [0, 1, len(shuffled) // 2, len(shuffled)]
    return [
        [list(unit) for unit in case.units],
        [[row for unit in case.units[rank::2][half::2] for row in unit] for rank in (0, 1) for half in (0, 1)],
        [mixed],
        [[row for unit in shuffled[start:stop] for row in unit] for start, stop in pairwise(at)],
    ]


TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-5}


def check(case: Case, mode: str, split: Sequence[Sequence[int]], dtype: torch.dtype) -> None:
    value, gradients = run(case, mode, [list(range(ROWS))], dtype)
    scale = max(float(gradient.abs().max()) for gradient in gradients)
    assert abs(value) > 1e-4 and sum(bool(gradient.any()) for gradient in gradients) >= 8
    found, by_row = run(case, mode, split, dtype)
    assert found == pytest.approx(value, rel=TOLERANCES[dtype])
    for gradient, expected in zip(by_row, gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * scale)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_no_split_or_order_changes_a_loss(name, mode, dtype):
    for split in splits(LOSSES[name]):
        check(LOSSES[name], mode, split, dtype)


@settings(max_examples=40)
@given(st.sampled_from(sorted(LOSSES)), st.permutations(range(6)), st.lists(st.integers(0, 6), max_size=3))
def test_losses_of_random_splits_add_up_to_the_whole(name, order, cuts):
    units = [PAIRS[i] for i in order]
    at = [0, *sorted({cut for cut in cuts if 0 < cut < 6}), 6]
    parts = [[row for unit in units[start:stop] for row in unit] for start, stop in pairwise(at)]
    check(LOSSES[name], "seq-mean-token-mean", parts, torch.float64)


@pytest.mark.parametrize("outside", [torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("name", LOSSES)
def test_garbage_outside_the_mask_reaches_no_loss(name, outside):
    arguments = (LOSSES[name], "token-mean", [list(range(ROWS))], torch.float64)
    value, gradients = run(*arguments)
    found, by_row = run(*arguments, outside)
    assert found == value and all(map(torch.equal, by_row, gradients))


@pytest.mark.parametrize("name", LOSSES)
def test_a_micro_batch_without_tokens(name):
    part = {column: values[:0] for column, values in pack(batch(torch.float32)).items()}
    part |= {"cut": part["mask"], "penalized": part["mask"], "logprobs": part["logprobs"].requires_grad_()}
    loss, _ = LOSSES[name].call(part)
    assert loss.shape == (0,)
    loss.sum().backward()
