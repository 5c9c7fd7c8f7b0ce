"""Compares tokens per second of the `hf` engine with `generate` of transformers, on the same requests.

    python -m tools.bench_embedded_rollout [--hidden 64] [--layers 2] [--rows 128] [--tokens 48] [--rounds 5]

Both run in turn in one process on one thread; medians are compared. Four cases: distinct or grouped prompts
(8 samples each), and equal or heavy-tailed lengths (stop tokens are drawn at random).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config

from verl_mg.engines.engine import Request, Sampling
from verl_mg.engines.hf.engine import HFEngine

VOCABULARY = 512
GROUP = 8


def main() -> None:
    """Prints one line per case: both rates and their ratio."""
    options = _options()
    torch.set_num_threads(1)
    engine = _engine(options.hidden, options.layers)
    # Under near-uniform logits this many stop tokens end a row after a quarter of its tokens, on average.
    stops = tuple(range(max(1, 4 * VOCABULARY // options.tokens)))
    for group in (1, GROUP):
        requests = _requests(options.rows, group, options.prompt)
        for name, stop in (("equal lengths", ()), ("heavy tail", stops)):
            sampling = Sampling(max_new_tokens=options.tokens, stop_token_ids=stop)
            ours, theirs = _race(engine, requests, sampling, options.rounds)
            print(
                f"{name}, groups of {group}: hf engine {ours:.0f} tokens/s, generate {theirs:.0f} tokens/s, "
                f"ratio {ours / theirs:.2f}"
            )


def _options() -> argparse.Namespace:
    verbatim = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=verbatim)
    defaults = {"hidden": 64, "layers": 2, "rows": 128, "prompt": 32, "tokens": 48, "rounds": 5}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def _engine(hidden: int, layers: int) -> HFEngine:
    """Builds an engine with small random weights, so that all tokens are about equally likely."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=4096,
    )
    engine = HFEngine(config, "cpu", torch.float32, load_weights=False)
    generator = torch.Generator().manual_seed(0)
    engine.begin_update()
    for tensor in engine.parameters().values():
        tensor.normal_(std=0.02, generator=generator)
    engine.end_update(1)
    return engine


def _requests(rows: int, group: int, longest: int) -> list[Request]:
    """Builds prompts of half to all of `longest` tokens, with `group` samples each."""
    generator = torch.Generator().manual_seed(1)
    requests = []
    for index in range(rows):
        if index % group == 0:
            length = int(torch.randint(longest // 2, longest + 1, (), generator=generator))
            prompt = tuple(torch.randint(VOCABULARY, (length,), generator=generator).tolist())
        requests.append(Request(id=index, prompt=prompt, seed=index))
    return requests


def _race(engine: HFEngine, requests: list[Request], sampling: Sampling, rounds: int) -> tuple[float, float]:
    """Returns median tokens per second of the engine and of `generate`, run alternately after a warm-up."""

    def ours() -> int:
        return sum(len(sample.tokens) for sample in engine.generate(requests, sampling))

    def theirs() -> int:
        return _generate(engine.module, requests, sampling)

    rates: dict[Callable[[], int], list[float]] = {ours: [], theirs: []}
    for _ in range(rounds + 1):
        for run, measured in rates.items():
            start = time.perf_counter()
            tokens = run()
            measured.append(tokens / (time.perf_counter() - start))
    return statistics.median(rates[ours][1:]), statistics.median(rates[theirs][1:])


def _generate(module: PreTrainedModel, requests: list[Request], sampling: Sampling) -> int:
    """Counts the tokens of `generate`, which also computes the log-probs that training needs."""
    width = max(len(request.prompt) for request in requests)
    ids = torch.tensor([[0] * (width - len(request.prompt)) + list(request.prompt) for request in requests])
    attend = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in requests])
    stops = list(sampling.stop_token_ids)
    generate: Any = module.generate
    output = generate(
        ids,
        attention_mask=attend,
        do_sample=True,
        top_k=0,
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=stops or None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = output.sequences[:, width:]
    torch.stack(output.logits, dim=1).log_softmax(dim=-1).gather(-1, tokens[..., None])
    stopped = torch.isin(tokens, torch.tensor(stops, dtype=tokens.dtype)).long()
    stopped_before = stopped.cumsum(dim=1) - stopped
    return int((stopped_before == 0).sum())


if __name__ == "__main__":
    main()
