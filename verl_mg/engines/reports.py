"""Checks of all reports of engines, by what has to be true of them; the job ends with one line where it is not.

    engine of this rank, process or server ──▶ Sample ──▶ ReportRules.check ──▶ `collect`
    server that scores given tokens ──▶ scores ──▶ check_scores ──▶ teacher

Shapes and ranges do not show a report that means nothing: a router that is never asked reports expert 0 for all k
experts of a token, and an overflow makes log-probs that are no numbers.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from verl_mg.engines.engine import Finish, Request, Sample, Sampling
from verl_mg.engines.fed_tokens import SelectedKeys
from verl_mg.engines.sampled_support import SampledSupport, Wire, widened
from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import
from verl_mg.models.attention_config import IndexerConfig
from verl_mg.models.hf_config import ExpertsConfig, HFConfig

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")

# Largest log-prob: logits of hundreds in float32 are rounded by up to 1e-4, and so is their difference to the sum.
LARGEST_LOGPROB = 1e-3
# Finish reasons, counters and versions are the engine's own words, which change with its version.
OTHER_VERSION = "Install the version of the engine in the documentation, or report this"
OTHER_MODEL = "Give the engine the model of the job"
OVERFLOW = "Look for infinite weights or activations, such as with model.dtype=float32"
ROUTERS = (
    "Choose a runner of experts that reports them, such as rollout.sglang.moe_runner_backend=triton, or set "
    "rollout.replay_routing=false"
)
INDEXERS = "Set rollout.replay_selections=false"
NO_SUPPORT = "Set algorithm.support=full"
OTHER_WEIGHTS = "Let no other job send weights to this engine, and start it again"

FINISHES: Sequence[str] = get_args(Finish)
Problem = tuple[str, str]  # what is wrong with a report, and what to do


@dataclass(frozen=True, kw_only=True)
class ReportRules:
    """Facts that each report of an engine satisfies if it computes the job's model."""

    engine: str  # beginning of messages: key and name of the engine, or address of the server
    vocab: int
    layers: int = 0
    experts: ExpertsConfig | None = None  # experts that samples report, for all layers; None: they report none
    indexer: IndexerConfig | None = None  # indexers whose selections samples report; None: they report none

    @classmethod
    def of_model(cls, engine: str, model: HFConfig, routed: bool, selected: bool = False) -> ReportRules:
        """Returns the rules for a model; `routed`, `selected`: samples report the experts, or keys, of each token."""
        return cls(
            engine=engine,
            vocab=model.vocab,
            layers=model.layers,
            experts=model.experts if routed else None,
            indexer=model.indexer if selected else None,
        )

    def check(self, request: Request, sampling: Sampling, sample: Sample, newest: int) -> Sample:
        """Returns the continuation of a request if it is valid; `newest` is the last version that was sent."""
        for what, remedy in self._problems(request, sampling, sample, newest):
            raise self._error(sample.id, what, remedy)
        return sample

    def read_experts(self, sample: int, text: str | None, num_fed: int, is_complete: bool) -> Tensor | None:
        """Returns the experts of the tokens that were fed, (num_fed, layers, top_k) int16, from base64 of int32."""
        if self.experts is None:
            return None
        flat = self._of_fed_tokens(
            sample, text, (num_fed, self.layers, self.experts.top_k), is_complete, "experts", ROUTERS
        )
        if flat is None:
            return None
        if flat.size and not 0 <= int(flat.min()) <= int(flat.max()) < self.experts.count:
            what = f"has the experts {flat.min()} to {flat.max()}, and the model has {self.experts.count}"
            raise self._error(sample, f"{what}, counted from 0", OTHER_MODEL)
        chosen = torch.from_numpy(flat.astype(np.int16))
        if place := equal_experts(chosen, self.experts):
            token, layer, same = place
            what = f"has expert {same} more than once for token {token} in layer {layer}, and routers choose different"
            raise self._error(sample, f"{what} ones", ROUTERS)
        return chosen

    def read_keys(self, sample: int, text: str | None, num_fed: int, is_complete: bool) -> SelectedKeys | None:
        """Returns the keys that fed tokens attended to, from base64 of int32 (num_fed, layers, top_k)."""
        if self.indexer is None:
            return None
        flat = self._of_fed_tokens(
            sample, text, (num_fed, self.layers, self.indexer.top_k), is_complete, "selected keys", INDEXERS
        )
        if flat is None:
            return None
        try:
            return SelectedKeys.of_ids(flat, self.indexer.selecting)
        except ValueError as error:
            raise self._error(sample, f"has {error}", INDEXERS) from None

    def _of_fed_tokens(
        self, sample: int, text: str | None, shape: tuple[int, int, int], is_complete: bool, what: str, remedy: str
    ) -> np.ndarray | None:
        """Returns numbers of the tokens that were fed, from base64 of int32."""
        if text is None:
            if is_complete and shape[0]:
                raise self._error(sample, f"has no {what} of its tokens", remedy)
            return None  # an engine may report none for a request that was aborted while it waited
        flat = np.frombuffer(base64.b64decode(text), dtype=np.int32)
        if flat.size != math.prod(shape):
            expected = f"{' x '.join(map(str, shape))} (tokens, layers, {what}) were expected"
            raise self._error(sample, f"has {flat.size} numbers of {what}, and {expected}", remedy)
        return flat.reshape(shape)

    def read_support(self, sample: int, wire: Wire | None, tokens: Sequence[int]) -> SampledSupport:
        """Returns the candidates of each token, which is one of them."""
        if wire is None and tokens:
            raise self._error(sample, "has no candidates of its tokens", NO_SUPPORT)
        sizes, ids = (np.frombuffer(base64.b64decode(text), dtype=np.int32).copy() for text in wire or ("", ""))
        if len(sizes) != len(tokens) or (sizes < 1).any() or sizes.sum() != len(ids):
            what = f"has {len(tokens)} tokens, candidates of {len(sizes)} tokens, and {len(ids)} of {sizes.sum()} ids"
            raise self._error(sample, what, NO_SUPPORT)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab:
            what = f"has the candidates {ids.min()} to {ids.max()}, and the vocabulary has {self.vocab} tokens"
            raise self._error(sample, what, OTHER_MODEL)
        place_of = np.repeat(np.arange(len(tokens)), sizes)
        drawn = place_of[ids == np.asarray(tokens, dtype=np.int32)[place_of]]
        if not np.array_equal(drawn, np.arange(len(tokens))):
            raise self._error(sample, "has a token that is not one, or not once, among its candidates", NO_SUPPORT)
        return SampledSupport(torch.from_numpy(sizes), torch.from_numpy(ids))

    def read_top(self, sample: int, wire: Wire | None, num_tokens: int, count: int) -> Tensor:
        """Returns the likeliest tokens in the place of each token, (num_tokens, 2, count) float32."""
        reported = min(count, self.vocab)
        if wire is None and num_tokens:
            raise self._error(sample, "has no likeliest tokens", OTHER_VERSION)
        texts = [base64.b64decode(text) for text in wire or ("", "")]
        logprobs, ids = np.frombuffer(texts[0], dtype=np.float32), np.frombuffer(texts[1], dtype=np.int32)
        if not len(logprobs) == len(ids) == num_tokens * reported:
            what = (
                f"has {len(logprobs)} log-probs and {len(ids)} ids as the {reported} likeliest of {num_tokens} tokens"
            )
            raise self._error(sample, what, OTHER_VERSION)
        values = logprobs.reshape(num_tokens, reported)
        # No number is below or above NaN: comparisons are such that it fails each of them.
        if not ((values[:, 1:] <= values[:, :-1]).all() and (np.exp(values).sum(1) <= 1 + LARGEST_LOGPROB).all()):
            raise self._error(
                sample, "has log-probs of likeliest tokens that do not fall, or are of more than 1", OVERFLOW
            )
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab:
            what = f"has the likeliest tokens {ids.min()} to {ids.max()}, and the vocabulary has {self.vocab} tokens"
            raise self._error(sample, what, OTHER_MODEL)
        return widened(torch.from_numpy(np.stack([values, ids.reshape(values.shape).astype(np.float32)], 1)), count)

    def check_counts(self, counts: Mapping[str, int]) -> Mapping[str, int]:
        """Returns the counters of a report if they are valid."""
        for name, value in counts.items():
            if type(value) is not int or value < 0:
                raise UserError(f"{self.engine}: it counts {value!r} {name}. {OTHER_VERSION}.")
        # More accepted than drafted tokens are possible: SGLang does not count what was drafted, but multiplies the
        # verifications by the number of draft tokens of its start, which `speculative_adaptive` changes.
        return counts

    def _error(self, sample: int, what: str, remedy: str) -> UserError:
        return UserError(f"{self.engine}: sample {sample} {what}. {remedy}.")

    def _problems(self, request: Request, sampling: Sampling, sample: Sample, newest: int) -> Iterator[Problem]:
        tokens, logprobs, versions = sample.tokens, sample.logprobs, sample.policy_versions
        if sample.finish not in FINISHES:
            yield f"ended with {sample.finish!r}, and the reasons are {', '.join(FINISHES)}", OTHER_VERSION
        if not len(tokens) == len(logprobs) == len(versions):
            lengths = f"{len(tokens)} tokens, {len(logprobs)} log-probs and {len(versions)} versions"
            yield f"has {lengths}", OTHER_VERSION
        if len(tokens) > (most := request.remaining_tokens(sampling)):
            yield f"has {len(tokens)} new tokens, and {most} were requested", OTHER_VERSION
        if not tokens:
            if sample.finish == "stop":
                yield "ended with 'stop' and has no token that ends it", OTHER_VERSION
            return
        if not (set(map(type, tokens)) == {int} and 0 <= min(tokens) <= max(tokens) < self.vocab):
            unknown = next(token for token in tokens if type(token) is not int or not 0 <= token < self.vocab)
            yield f"has the token {unknown!r}, which is not in the vocabulary of {self.vocab}", OTHER_MODEL
        if not set(sampling.stop_token_ids).isdisjoint(tokens[:-1]):
            yield "continues after a token that ends it", OTHER_VERSION
        if not _are_logprobs(logprobs):
            place, wrong = next((i, value) for i, value in enumerate(logprobs) if not _are_logprobs((value,)))
            yield f"has the log-prob {wrong!r} for its token {place}, which is no number up to 0", OVERFLOW
        before = request.partial.generated_versions if request.partial else []
        oldest = before[-1] if before else 0
        if list(versions) != sorted(versions) or not oldest <= versions[0] <= versions[-1] <= newest:
            seen = ", ".join(map(str, dict.fromkeys(versions)))
            what = f"has tokens of the versions {seen} of the weights, after {oldest}, and {newest} were sent"
            yield what, OTHER_WEIGHTS


def _are_logprobs(values: Sequence[float]) -> bool:
    # The sum is no finite number if one of them is none.
    return set(map(type, values)) <= {float, int} and math.isfinite(sum(values)) and max(values) <= LARGEST_LOGPROB


def equal_experts(chosen: Tensor, experts: ExpertsConfig) -> tuple[int, int, int] | None:
    """Returns a token and a layer that have an expert twice, and this expert; None where there is none.

    `chosen` is (tokens, layers, top_k); negative entries are not known, and dense layers are not read.
    """
    layers, values = sorted(experts.layers), chosen.numpy()
    if len(layers) < values.shape[1]:
        values = values[:, layers]
    # As k arrays of all tokens and layers, compared with each other: a sort of each k numbers takes ten times longer.
    columns = np.ascontiguousarray(np.moveaxis(values, -1, 0))
    for distance in range(1, len(columns)):
        same = columns[distance:] == columns[:-distance]
        if same.any() and (places := np.argwhere(same & (columns[distance:] >= 0))).size:
            column, token, layer = places[0].tolist()
            return token, layers[layer], int(columns[column, token, layer])
    return None


def check_scores(scores: Sequence[tuple[float, Sequence[tuple[float, int]]]], vocab: int) -> None:
    """Checks log-probs of given tokens, each with the likeliest ones in its place; ValueError for a wrong one."""
    for logprob, likeliest in scores:
        values, ids = [value for value, _ in likeliest], {token for _, token in likeliest}
        if not _are_logprobs((logprob, *values)):
            raise ValueError(f"the log-probs {[logprob, *values][:4]} are no numbers up to 0")
        if values != sorted(values, reverse=True) or sum(map(math.exp, values)) > 1 + LARGEST_LOGPROB:
            raise ValueError(f"the log-probs {values[:4]} of the likeliest tokens do not fall, or are of more than 1")
        if len(ids) < len(likeliest) or not all(0 <= token < vocab for token in ids):
            raise ValueError(f"the likeliest tokens are not different ones of a vocabulary of {vocab}")
