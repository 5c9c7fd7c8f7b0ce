"""What one rank has that no other knows of: rows that wait in a buffer, samples that it has begun, random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from pydantic import model_validator
from torch import Tensor

from verl_mg.batch import Batch, ColumnKind
from verl_mg.checkpoint.sharded_safetensors import ShardedReader
from verl_mg.config import ConfigSection, Count
from verl_mg.rollout.engine import Finish, Sample

LENGTHS = "lengths"


class SampleState(ConfigSection):
    """See `verl_mg.rollout.engine.Sample`; its routed experts stand among the tensors."""

    id: Count
    tokens: tuple[Count, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    finish: Finish

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        if not len(self.tokens) == len(self.logprobs) == len(self.policy_versions):
            raise ValueError("as many tokens as log-probabilities and versions belong there")
        return self


class NumpyState(ConfigSection):
    """Of `numpy.random.get_state(legacy=False)`."""

    bit_generator: str
    key: list[int]
    pos: int
    has_gauss: int
    gauss: float


class RankState(ConfigSection):
    """The part of it that is no tensor. kinds: by batch and column."""

    done: list[SampleState]
    cut: list[SampleState]
    kinds: dict[str, dict[str, ColumnKind]]
    python: tuple[int, list[int], float | None]
    numpy: NumpyState


def rank_state(batches: Mapping[str, Batch], done: Mapping[int, Sample], cut: Mapping[int, Sample]) -> RankState:
    """What this rank is to write, beside `rank_tensors`."""
    version, numbers, gauss = random.getstate()
    drawn = np.random.get_state(legacy=False)
    return RankState(
        done=[_sample_state(sample) for sample in done.values()],
        cut=[_sample_state(sample) for sample in cut.values()],
        kinds={name: {column: batch.kind(column) for column in batch.names()} for name, batch in batches.items()},
        python=(version, list(numbers), gauss),
        numpy=NumpyState(
            bit_generator=drawn["bit_generator"],
            key=drawn["state"]["key"].tolist(),
            pos=drawn["state"]["pos"],
            has_gauss=drawn["has_gauss"],
            gauss=drawn["gauss"],
        ),
    )


def rank_tensors(
    batches: Mapping[str, Batch], done: Mapping[int, Sample], cut: Mapping[int, Sample]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that go with it, by key."""
    for name, batch in batches.items():
        yield f"batch/{name}/{LENGTHS}", batch.lengths
        yield from ((_column(name, column), batch[column]) for column in batch.names())
    for which, samples in (("done", done), ("cut", cut)):
        for i, sample in samples.items():
            if sample.routed_experts is not None:
                yield _routing(which, i), sample.routed_experts
    yield "random/torch", torch.get_rng_state()
    if torch.cuda.is_available():
        yield "random/cuda", torch.cuda.get_rng_state()
        yield from ((f"random/megatron/{name}", state) for name, state in get_cuda_rng_tracker().get_states().items())


def samples(which: str, states: Sequence[SampleState], stored: ShardedReader, vocabulary: int) -> dict[int, Sample]:
    """The way back; which: "done" or "cut". ValueError for a token beyond the vocabulary."""
    found = {}
    for state in states:
        if max(state.tokens, default=0) >= vocabulary:
            raise ValueError(f"sample {state.id} has the token {max(state.tokens)}, the model has {vocabulary}")
        key = _routing(which, state.id)
        routed = stored.tensor(key) if key in stored.keys(key) else None
        found[state.id] = Sample(**state.model_dump(), routed_experts=routed)
    return found


def batch(name: str, state: RankState, stored: ShardedReader) -> Batch:
    """The way back."""
    whole = Batch(stored.tensor(f"batch/{name}/{LENGTHS}"))
    for column, kind in state.kinds[name].items():
        whole.put(column, stored.tensor(_column(name, column)), kind)
    return whole


def restore_random_numbers(state: RankState, stored: ShardedReader) -> None:
    """All generators of this process go on as they would have."""
    version, numbers, gauss = state.python
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(
        {
            "bit_generator": state.numpy.bit_generator,
            "state": {"key": np.array(state.numpy.key, dtype=np.uint32), "pos": state.numpy.pos},
            "has_gauss": state.numpy.has_gauss,
            "gauss": state.numpy.gauss,
        }
    )
    torch.set_rng_state(stored.tensor("random/torch"))
    if torch.cuda.is_available() and stored.keys("random/cuda"):
        torch.cuda.set_rng_state(stored.tensor("random/cuda"))
        begin = "random/megatron/"
        get_cuda_rng_tracker().set_states({key.removeprefix(begin): stored.tensor(key) for key in stored.keys(begin)})


def _sample_state(sample: Sample) -> SampleState:
    return SampleState(
        id=sample.id,
        tokens=sample.tokens,
        logprobs=sample.logprobs,
        policy_versions=sample.policy_versions,
        finish=sample.finish,
    )


def _column(batch: str, column: str) -> str:
    return f"batch/{batch}/columns/{column}"


def _routing(which: str, sample: int) -> str:
    return f"routed_experts/{which}/{sample}"
