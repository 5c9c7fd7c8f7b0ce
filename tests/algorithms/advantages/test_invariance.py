"""Every advantage: the same under any order of the rows, any split that keeps groups whole, and any padding."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from verl_mg.algorithms import advantages as package
from verl_mg.algorithms.advantages import moments

ROWS, WIDTH = 12, 7
GROUPS = torch.tensor([3, 0, 3, 8, 0, 3, 8, 0, 0, 3, 8, 5])
Rows = dict[str, Tensor]


def rows() -> Rows:
    """Columns (n,) and tables (n, T) with NaN outside a mask with holes; the last row's mask is empty."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.arange(ROWS) % WIDTH + 1
    mask = (torch.rand(ROWS, WIDTH, generator=generator) < 0.7) & (torch.arange(WIDTH) < lengths[:, None])
    mask[:, 0] = True
    mask[-1] = False
    names = ("rewards", "values", "old", "teacher")
    tables = {name: torch.randn(ROWS, WIDTH, generator=generator) for name in names}
    return {
        "scores": torch.randn(ROWS, generator=generator),
        "greedy": torch.randn(ROWS, generator=generator),
        "groups": GROUPS,
        "samples": torch.arange(ROWS),
        "lengths": mask.sum(1),
        "mask": mask,
        **{name: torch.where(mask, table, math.nan) for name, table in tables.items()},
    }


def states(r: Rows) -> Tensor:
    """The second turns of a group have the same state as its first ones, later turns another one."""
    turns = package.Turns.of(r["mask"])
    return 2 * r["groups"][turns.line] + (turns.place > 1)


# The moments come from the parts, as they would from ranks.
ADVANTAGES: dict[str, Callable[[Rows, Tensor], Tensor]] = {
    "group_relative": lambda r, _: package.group_relative(r["scores"], r["groups"], r["samples"]),
    "group_relative, mean alone": lambda r, _: package.group_relative(r["scores"], r["groups"], r["samples"], False),
    "rloo": lambda r, _: package.rloo(r["scores"], r["groups"], r["samples"]),
    "opo": lambda r, _: package.opo(r["scores"], r["lengths"], r["groups"], r["samples"]),
    "pass_at_k": lambda r, _: package.pass_at_k((r["scores"] > 0).float(), r["groups"], r["samples"], 1),
    "optimal_token_baseline": lambda r, _: package.optimal_token_baseline(
        r["rewards"], r["mask"], r["groups"], -r["old"].abs(), r["teacher"].abs()
    ),
    "maxrl": lambda r, _: package.maxrl(r["scores"].abs(), r["groups"], r["samples"]),
    "gdpo": lambda r, _: package.gdpo([r["scores"], r["greedy"]], [1.0, -0.5], r["groups"], r["samples"]),
    "mt_grpo": lambda r, _: package.mt_grpo(
        r["scores"], torch.stack([r["greedy"], r["scores"]], 1), package.Turns.of(r["mask"]), r["groups"], 0.5
    ),
    "gigpo": lambda r, _: package.gigpo(
        r["scores"], r["greedy"][:, None], package.Turns.of(r["mask"]), r["groups"], states(r), 0.9, 0.5
    ),
    "remax": lambda r, _: package.remax(r["scores"], r["greedy"]),
    "group_means": lambda r, _: package.group_means(r["scores"], r["groups"], r["samples"]),
    "informative": lambda r, _: package.informative(r["scores"].round(), r["groups"], r["samples"]).float(),
    "soft_overlong_penalty": lambda r, _: package.soft_overlong_penalty(r["lengths"], 6, 4),
    "length_adaptive_lambda": lambda r, _: package.length_adaptive_lambda(r["lengths"], 0.5),
    "token_rewards": lambda r, _: package.token_rewards(r["scores"], r["mask"]),
    "gae": lambda r, _: torch.cat(package.gae(r["rewards"], r["values"], r["mask"], 0.9, 0.8), 1),
    "discounted_returns": lambda r, _: package.discounted_returns(r["rewards"], r["mask"], 0.9),
    "whiten": lambda r, whole: package.whiten(r["rewards"], r["mask"], whole),
    "distillation_advantages": lambda r, _: package.distillation_advantages(r["old"], r["teacher"], r["mask"]),
    "implicit_rewards": lambda r, _: package.implicit_rewards(r["teacher"], r["old"], r["mask"], 0.05),
    "process_sums": lambda r, _: package.process_sums(r["rewards"], r["mask"]),
    "prime_advantages": lambda r, _: package.prime_advantages(r["rewards"], r["scores"], r["mask"], r["groups"], 0.9),
}
ABOUT_ALL_ROWS = {"moments", "resampling_weights", "select"}  # a sum over rows, and draws from all of them
NO_ADVANTAGES = {"Turns", "differ"}


def test_the_table_is_complete():
    assert {name.split(",")[0] for name in ADVANTAGES} == set(package.__all__) - ABOUT_ALL_ROWS - NO_ADVANTAGES


def run(name: str, parts: Sequence[Tensor], extra: int = 0) -> Tensor:
    """The results of parts, each computed by itself, in the order of the rows; `extra` more columns of padding."""
    found = torch.empty(0)
    tables = {key: pad(column, extra) for key, column in rows().items()}
    split = [{key: column[part] for key, column in tables.items()} for part in parts]
    whole = torch.stack([moments(part["rewards"], part["mask"]) for part in split]).sum(0)
    for part, numbers in zip(split, parts, strict=True):
        result = ADVANTAGES[name](part, whole)
        found = found if len(found) else result.new_zeros(ROWS, *result.shape[1:])
        found[numbers] = result
    return found


def pad(column: Tensor, extra: int) -> Tensor:
    if column.ndim == 1:
        return column
    return torch.nn.functional.pad(column, (0, extra), value=False if column.dtype == torch.bool else math.nan)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_row_order_changes_no_bit(name):
    whole = run(name, [torch.arange(ROWS)])
    assert whole.isfinite().all() and whole.any()
    for seed in range(5):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
        # The sums of moments follow the order of the rows: all else is bitwise equal.
        torch.testing.assert_close(run(name, [order]), whole, rtol=1e-6 if name == "whiten" else 0, atol=0)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_no_split_by_groups_changes_it(name):
    parts = [GROUPS.eq(group).nonzero()[:, 0] for group in (0, 3, 5, 8)]
    torch.testing.assert_close(run(name, parts), run(name, [torch.arange(ROWS)]), rtol=1e-6, atol=1e-7)
    two = [torch.cat([parts[3], parts[0]]), torch.cat([parts[2], parts[1]])]
    torch.testing.assert_close(run(name, two), run(name, [torch.arange(ROWS)]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"gae"}))
def test_no_padding_changes_it(name):
    narrow, wide = run(name, [torch.arange(ROWS)]), run(name, [torch.arange(ROWS)], extra=5)
    torch.testing.assert_close(wide[:, :WIDTH] if wide.ndim == 2 else wide, narrow, rtol=1e-6, atol=1e-7)
    assert wide.ndim == 1 or not wide[:, WIDTH:].any()
