"""Records the lengths of samples, for `verl-mg simulate` and `tools/bench_packing.py`.

    python -m tools.record_lengths --out FILE --samples RUN/samples     of a run, from its sample records
    python -m tools.record_lengths --out FILE --draw 4096               of samples drawn now from a tiny random model

The file has one line per sample: tokens of the prompt, tokens of the response. A tiny random model ends a response at
every token with a probability that depends on the text before it, so lengths are a mixture of geometric distributions,
with a heavy tail. `tools/lengths/` contains a file that the second command wrote.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from verl_mg.errors import EXIT_CODE, UserError
from verl_mg.planner.lengths import Length, write_lengths

HIDDEN, LAYERS, FFN = 32, 2, 64
INIT_STD = 0.5  # so large that the probability of the end depends on the text before it
LONGEST_SUM = 40  # operands


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for samples that cannot be read."""
    options = _parser().parse_args(arguments)
    try:
        if options.samples:
            lengths, source = recorded(options.samples), [f"recorded in the samples of {options.samples.parent.name}"]
        else:
            lengths = drawn(options.draw, options.max_new_tokens, options.seed)
            command = f"--draw {options.draw} --max-new-tokens {options.max_new_tokens} --seed {options.seed}"
            source = [
                f"python -m tools.record_lengths --out {options.out.name} {command}",
                f"drawn at temperature 1 from a random Qwen3 of {LAYERS} layers, hidden {HIDDEN}, init_std {INIT_STD}; "
                f"prompts are sums of 2 to {LONGEST_SUM} operands",
            ]
        what = summary(lengths)
        write_lengths(options.out, lengths, [*source, what, "tokens of the prompt, tokens of the response"])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CODE
    print(f"{options.out}: {what}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the file to write")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--samples", type=Path, metavar="DIR", help="the samples folder of a run")
    source.add_argument("--draw", type=int, metavar="N", help="number of samples to draw from a tiny random model")
    parser.add_argument("--max-new-tokens", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def recorded(folder: Path) -> list[Length]:
    """Returns the lengths of all samples of a run, ordered by iteration and sample; UserError if there are none."""
    rows = sorted(row for file in folder.glob("*/rank-*.parquet") for row in _read_rows(file))
    if not rows:
        raise UserError(f"{folder}: no samples in files */rank-*.parquet. Pass the samples folder of a run.")
    # A response that was cut before its first token has none.
    return [Length(prompt, response) for *_, prompt, response in rows if response]


def _read_rows(path: Path) -> list[tuple[int, int, int, int, int]]:
    """Returns iteration, call, sample, and tokens of prompt and response of each row."""
    from pyarrow import ArrowException, compute, parquet

    names = ["iteration", "call", "sample_id", "prompt_length"]
    try:
        table = parquet.read_table(path, columns=[*names, "tokens"])
        lengths = compute.list_value_length(table["tokens"])
        responses = compute.subtract(lengths, table["prompt_length"])
        columns = [table[name].to_pylist() for name in names]
    except (ArrowException, OSError, KeyError) as error:
        raise UserError(f"{path}: not the samples of a run ({str(error).splitlines()[0]}). Record a new one.") from None
    return list(zip(*columns, responses.to_pylist(), strict=True))


def drawn(count: int, max_new_tokens: int, seed: int) -> list[Length]:
    """Returns the lengths of samples that the `hf` engine draws now."""
    import torch
    from transformers import AutoTokenizer

    from verl_mg.engines.engine import Request, Sampling
    from verl_mg.engines.hf.engine import HFEngine
    from verl_mg.models.tiny_model import make_tiny_model

    generator = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(
            folder,
            "qwen3",
            hidden=HIDDEN,
            layers=LAYERS,
            ffn=FFN,
            max_positions=max_new_tokens + 4 * LONGEST_SUM,
            init_std=INIT_STD,
            perturb=True,
            seed=seed,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
        engine = HFEngine(folder, "cpu", torch.float32)
    prompts = [tuple(tokenizer.encode(_sum(generator))) for _ in range(count)]
    requests = [Request(id=number, prompt=prompt, seed=number) for number, prompt in enumerate(prompts)]
    sampling = Sampling(max_new_tokens=max_new_tokens, stop_token_ids=(tokenizer.eos_token_id,))
    samples = engine.generate(requests, sampling)
    return [Length(len(prompt), len(sample.tokens)) for prompt, sample in zip(prompts, samples, strict=True)]


def _sum(generator: random.Random) -> str:
    operands = generator.randint(2, LONGEST_SUM)
    return "+".join(str(generator.randrange(100)) for _ in range(operands)) + "="


def summary(lengths: Sequence[Length]) -> str:
    """Describes the lengths of responses in one line."""
    responses = sorted(length.response for length in lengths)
    median, tail = statistics.median(responses), responses[int(0.99 * (len(responses) - 1))]
    return (
        f"{len(responses)} responses: mean {statistics.fmean(responses):.0f}, median {median:.0f}, "
        f"99th percentile {tail}, longest {responses[-1]}"
    )


if __name__ == "__main__":
    sys.exit(main())
