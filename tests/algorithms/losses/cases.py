"""Every loss as a function of columns, and rows of columns, for the tests about all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_mg.algorithms import losses
from verl_mg.algorithms.advantages import moments
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


def pack(rows: Sequence[Columns]) -> Columns:
    """Rows side by side, with sequence ids of this micro-batch."""
    together = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    lengths = torch.tensor([len(row["mask"]) for row in rows])
    return together | {"sequence_ids": torch.repeat_interleave(torch.arange(len(rows)), lengths)}
