"""Every loss and KL estimator far from the old policy: finite, the formula's numbers, and 0 where a clip says so.

Log-ratios up to 10,000 nats are exact in every dtype here: one of the two log-probs is 0.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf
from torch import Tensor

from tests.algorithms.losses.cases import LOSSES, Columns
from verl_mg.algorithms import kl

mp.dps = 50
BOUNDS = {torch.float32: mpf("0.9") * 128 * mp.log(2), torch.bfloat16: mpf(80)}
"""Largest log-ratio, nine tenths of the logarithm of 2^128; bfloat16 has only multiples of a half there."""
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.03}
LOG_RATIOS = [0.0, *(sign * d for d in (2**-10, 0.3125, 1.0, 5.0, 40.0, 79.0, 90.0, 704.0, 9984.0) for sign in (1, -1))]
ADVANTAGES = [0.0, 1.0, -1.0, 0.25, -3.0]
OF_ADVANTAGES = ("clip", "cispo", "sapo", "gpg", "gspo", "dppo")
"""Losses of which a token with advantage 0 has none: GMPO's are of its sequence, and KL-Cov has a penalty."""


def columns(log_ratios: list[float], advantages: list[float], lengths: list[int], dtype: torch.dtype) -> Columns:
    """Rows with these log-ratios; each is the better one of a pair, whose other row has one token that never moves."""
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    rows = torch.cat([rows, len(lengths) + torch.arange(len(lengths))])
    own = len(log_ratios)
    zeros = [0.0] * len(lengths)
    differences, factors = torch.tensor([*log_ratios, *zeros], dtype=dtype), torch.tensor([*advantages, *zeros])
    old, count = -differences.clamp(min=0), len(rows)
    everywhere = torch.ones(count, dtype=torch.bool)
    last = torch.cat([rows.diff() != 0, torch.tensor([True])])
    names = {"old": old, "ref": old, "old_values": old, "advantages": factors, "token_advantages": factors}
    names |= {"labels": torch.ones(count), "weights": torch.full((count,), 0.5), "returns": torch.zeros(count)}
    return {
        **{name: column.to(dtype) for name, column in names.items()},
        "logprobs": differences.clamp(max=0).requires_grad_(),
        **dict.fromkeys(("mask", "masked_but_3", "penalized"), everywhere),
        "last": last,
        "cut": ~everywhere,
        "sequence_ids": rows,
        "pair": rows % len(lengths),
        "chosen": torch.arange(count) < own,
    }


Oracle = Callable[[mpf, mpf, mpf], tuple[mpf, mpf]]
"""(bound, d, A) -> value and derivative by the log-prob, of one token that is its sequence, d = new - old."""


def ratio(bound: mpf, d: mpf) -> tuple[mpf, mpf]:
    """A ratio and its derivative by d."""
    return (mp.exp(d), mp.exp(d)) if d <= bound else (mp.exp(bound), mpf(0))


def clipped(low: str, high: str, dual: str | None = None) -> Oracle:
    def oracle(bound: mpf, d: mpf, a: mpf) -> tuple[mpf, mpf]:
        r, slope = ratio(bound, d)
        ends = 1 - mpf(low), 1 + mpf(high)
        if (a > 0 and r > ends[1]) or (a < 0 and r < ends[0]):
            return -a * (ends[1] if a > 0 else ends[0]), mpf(0)
        if a < 0 and dual is not None and r > mpf(dual):
            return -a * mpf(dual), mpf(0)
        return -a * r, -a * slope

    return oracle


def masked_drift(bound: mpf, d: mpf, a: mpf) -> tuple[mpf, mpf]:
    return (mpf(0), mpf(0)) if a < 0 and -d > mpf("0.05") else clipped("0.2", "0.28")(bound, d, a)


def cispo(bound: mpf, d: mpf, a: mpf) -> tuple[mpf, mpf]:
    weight = min(max(mp.exp(d), mpf("0.8")), mpf("1.28"))
    return -weight * a * min(d, 0), -weight * a


def sapo(bound: mpf, d: mpf, a: mpf) -> tuple[mpf, mpf]:
    tau = mpf(1) if a > 0 else mpf("1.05")
    r, slope = ratio(bound, d)
    gate = 1 / (1 + mp.exp(-tau * (r - 1)))
    return -a * 4 / tau * gate, -a * 4 * gate * (1 - gate) * slope


def gmpo(bound: mpf, d: mpf, a: mpf) -> tuple[mpf, mpf]:
    limited = min(d, mpf("0.1")) if a > 0 else min(max(d, -mpf("0.1")), mp.log("1.2"))
    return -a * mp.exp(limited), -a * mp.exp(limited) if limited == d else mpf(0)


def dppo(kind: str) -> Oracle:
    def oracle(bound: mpf, d: mpf, a: mpf) -> tuple[mpf, mpf]:
        new, old = min(d, mpf(0)), -max(d, mpf(0))
        p, q = mp.exp(new), mp.exp(old)
        others = [max(1 - x, mpf("1e-8")) for x in (q, p)]
        distance = abs(p - q) if kind == "tv" else q * (old - new) + others[0] * mp.log(others[0] / others[1])
        outside = distance > mpf("0.05") and a * d > 0
        weight = mpf(0) if outside else min(mp.exp(d), mpf(20))
        return -weight * a * new, -weight * a

    return oracle


def kl_cov(bound: mpf, d: mpf, a: mpf) -> tuple[mpf, mpf]:
    r, slope = ratio(bound, d)
    return -a * r + abs(d), -a * slope + mp.sign(d)


def squared_error(bound: mpf, d: mpf, a: mpf) -> tuple[mpf, mpf]:
    # The value is min(d, 0), the old one -max(d, 0), the return 0.
    value, old = min(d, mpf(0)), -max(d, mpf(0))
    near = min(max(value, old - mpf("0.5")), old + mpf("0.5"))
    return (near**2 / 2, mpf(0)) if near**2 > value**2 else (value**2 / 2, value)


def preference(kind: str) -> Oracle:
    def oracle(bound: mpf, d: mpf, a: mpf) -> tuple[mpf, mpf]:
        beta, smoothing = mpf("0.3"), mpf("0.1") if kind == "sigmoid" else mpf(0)
        if kind == "ipo":
            return (d - 1 / (2 * beta)) ** 2, 2 * (d - 1 / (2 * beta))
        if kind == "hinge":
            return max(mpf(0), 1 - beta * d), -beta if beta * d < 1 else mpf(0)
        right, wrong = (1 / (1 + mp.exp(-sign * beta * d)) for sign in (1, -1))
        return -(1 - smoothing) * mp.log(right) - smoothing * mp.log(wrong), beta * (right - 1 + smoothing)

    return oracle


def outcome(beta: str, of_score: bool) -> Oracle:
    def oracle(bound: mpf, d: mpf, a: mpf) -> tuple[mpf, mpf]:
        x = mpf(beta) * (min(d, mpf(0)) if of_score else d)
        chance = 1 / (1 + mp.exp(-x))
        return -mp.log(chance), mpf(beta) * (chance - 1)

    return oracle


ORACLES: dict[str, Oracle] = {
    "clipped_policy_loss": clipped("0.2", "0.28", "3"),
    "cispo_loss": cispo,
    "sapo_loss": sapo,
    "gpg_loss": lambda bound, d, a: (-a * min(d, mpf(0)), -a),
    "gspo_loss": clipped("0.05", "0.06", "1.1"),
    "gmpo_loss": gmpo,
    "dppo_loss, tv": dppo("tv"),
    "dppo_loss, kl": dppo("kl"),
    "clipped_policy_loss, off-policy sequence masking": masked_drift,
    "clip_cov_loss": clipped("0.2", "0.28", "3"),
    "kl_cov_loss": kl_cov,
    "value_loss": squared_error,
    "sft_loss": lambda bound, d, a: (-min(d, mpf(0)), mpf(-1)),
    "imitation_loss": lambda bound, d, a: (-min(d, mpf(0)) / 2, mpf(-1) / 2),
    "dpo_loss": preference("sigmoid"),
    "dpo_loss, hinge": preference("hinge"),
    "dpo_loss, ipo": preference("ipo"),
    "bradley_terry_loss": outcome("1", of_score=True),
    "prime_loss": outcome("0.4", of_score=False),
}


def run(name: str, given: Columns) -> tuple[Tensor, Tensor]:
    """Values and gradients of the tokens, all of which are finite, as the metrics are."""
    loss, metrics = LOSSES[name].call(given)
    # The loss of a pair is on both of its rows.
    kept = torch.where(given["chosen"], loss, 0.0)
    (gradient,) = torch.autograd.grad(kept.sum(), given["logprobs"])
    for column in (loss, gradient, *metrics.values()):
        assert column.isfinite().all(), name
    return loss.detach(), gradient


def compare(found: Sequence[float], expected: Sequence[mpf], dtype: torch.dtype, *place: float) -> None:
    """Where the formula says 0, it is 0 exactly."""
    for number, wanted in zip(found, expected, strict=True):
        error = abs(mpf(number) - wanted)
        assert number == 0 if wanted == 0 else error <= TOLERANCES[dtype] * max(abs(wanted), mpf("0.1")), (
            *place,
            found,
        )


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_of_extreme_log_ratios_is_finite_and_equals_the_formula(name, dtype):
    pairs = [(d, a) for d in LOG_RATIOS for a in ADVANTAGES]
    log_ratios, advantages = (list(column) for column in zip(*pairs, strict=True))
    columns_found = run(name, columns(log_ratios, advantages, [1] * len(pairs), dtype))
    for (d, a), *found in zip(pairs, *(column[: len(pairs)].tolist() for column in columns_found), strict=True):
        compare(found, ORACLES[name](BOUNDS[dtype], mpf(d), mpf(a)), dtype, d, a)


EXTREMES = st.tuples(
    st.floats(0, 1).map(lambda x: float(int(2.0 ** (x * 13.2)))) | st.sampled_from([0.0, 0.25, 79.0, 80.0, 88.0, 90.0]),
    st.sampled_from([1.0, -1.0]),
    st.sampled_from([0.0, 1.0, -1.0, 0.3, -2.5]),
)


@settings(max_examples=5)
@given(st.lists(st.lists(EXTREMES, min_size=3, max_size=9), min_size=12, max_size=24))
def test_losses_of_extreme_rows_are_finite_and_equal_those_in_float64(rows):
    tokens = [token for row in rows for token in row]
    log_ratios, advantages = [size * sign for size, sign, _ in tokens], [a for *_, a in tokens]
    lengths, without = [len(row) for row in rows], torch.tensor([a == 0 for a in advantages])
    for name in LOSSES:
        exact = run(name, columns(log_ratios, advantages, lengths, torch.float64))
        for dtype in TOLERANCES:
            found = run(name, columns(log_ratios, advantages, lengths, dtype))
            if name.startswith(OF_ADVANTAGES):
                assert not found[1][: len(tokens)][without].any(), name
            if dtype is torch.bfloat16:  # the mean of a sequence has too few digits for its exponential
                continue
            for column, reference in zip(found, exact, strict=True):
                known = reference.abs() < 1e33  # larger ones are of ratios beyond the bound
                torch.testing.assert_close(column[known].double(), reference[known], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", [*kl.ESTIMATORS, *kl.STRAIGHT_THROUGH])
def test_kl_penalty_of_extreme_log_ratios_is_finite_and_equals_the_formula(kind, dtype):
    differences = torch.tensor(LOG_RATIOS, dtype=dtype)
    leaf = differences.clamp(max=0).requires_grad_()
    penalty = kl.penalty(leaf, -differences.clamp(min=0), kind)
    (gradient,) = torch.autograd.grad(penalty.sum(), leaf)
    for d, *found in zip(map(mpf, LOG_RATIOS), penalty.tolist(), gradient.tolist(), strict=True):
        r, slope = ratio(BOUNDS[dtype], -d)
        beyond = -d > BOUNDS[dtype]
        k3 = r - 1 + max(d, -BOUNDS[dtype]), mpf(0) if beyond else 1 - slope
        formulas = {"k1": (d, mpf(1)), "abs": (abs(d), mp.sign(d)), "k2": (d**2 / 2, d), "k3": k3}
        straight = kl.STRAIGHT_THROUGH.get(kind)
        compare(found, (formulas[straight][0], d) if straight else formulas[kind], dtype, d)
