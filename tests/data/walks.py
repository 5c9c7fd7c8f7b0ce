"""Prompts without files, and the state of a walk as a checkpoint has it, for tests."""

import json
from collections.abc import Iterable

from verl_mg.data import Mixture, Prompt, Prompts, PromptSet


def some(count: int, *, first: int = 0, source: str = "", seed: int = 0) -> PromptSet:
    prompts = [Prompt(i, (i,), f"p{i}", None, {}, source) for i in range(first, first + count)]
    return PromptSet(prompts, seed=seed, source=source)


def mixed(sizes: dict[str, int], weights: dict[str, float], seed: int = 0) -> Mixture:
    sets, first = {}, 0
    for name, size in sizes.items():
        sets[name] = some(size, first=first, source=name, seed=seed)
        first += size
    return Mixture(sets, weights)


def ids(prompts: Iterable[Prompt]) -> list[int]:
    return [prompt.id for prompt in prompts]


def resume(fresh: Prompts, old: Prompts) -> Prompts:
    fresh.load_state(json.loads(json.dumps(old.state())))
    return fresh
