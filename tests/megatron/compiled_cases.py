"""Functions that torch.compile joins to kernels on GPUs, compiled for the CPU: python -m tests.megatron.compiled_cases

A process of its own: gradients of compiled functions start threads, after which a test process could not fork ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

import verl_mg.megatron  # noqa: F401
from verl_mg.megatron import attention, experts, layers, routing
from verl_mg.megatron.core_version import for_all_sizes
from verl_mg.training import flex_attention
from verl_mg.training.microbatch import zigzag_tokens

HEADS, PLAIN, ROTARY, WIDTH, EXPERTS, TOP_K = 4, 16, 8, 32, 16, 4


def main() -> None:
    """Compares results with those of the functions as they are, and counts compilations."""
    torch.manual_seed(0)
    for name, function, arguments in functions():
        counter = CompileCounterWithBackend("inductor")
        compiled = for_all_sizes(torch.compile(function, backend=counter, fullgraph=True))
        for tokens in (40, 72, 88):
            given = arguments(tokens)
            assert_close(compiled(*given), function(*given), rtol=1e-2, atol=1e-2)  # bfloat16, rounded elsewhere
        print(f"{name}: {counter.frame_count} compilations", flush=True)
        assert counter.frame_count == 1, "one for all sizes"
    block_masks()


def functions() -> list[tuple[str, Callable[..., Any], Callable[[int], tuple[Any, ...]]]]:
    """Name, function, and its arguments for a number of tokens."""
    weight = half(WIDTH)
    return [
        ("end_rotated", attention._end_rotated, lambda t: (half(t, HEADS, PLAIN + ROTARY), *angles(t), True)),
        ("end_rotated_back", attention._end_rotated_back, lambda t: (half(t, HEADS, 24), *angles(t), True)),
        ("joined", attention._joined, lambda t: (half(t, HEADS, PLAIN), half(t, 1, ROTARY), *angles(t), True)),
        ("summed_back", attention._summed_back, lambda t: (half(t, HEADS, ROTARY), *angles(t), False)),
        ("normalized", layers._normalized, lambda t: (half(t, 1, WIDTH), weight, 1e-6, True)),
        (
            "norm_gradients",
            layers._norm_gradients,
            lambda t: (half(t, 1, WIDTH), half(t, 1, WIDTH), weight, torch.rand(t, 1, 1), True, True),
        ),
        ("gated", layers._gated, lambda t: (half(t, 2 * WIDTH), torch.rand(t), False)),
        ("scores", routing._scores, lambda t: (torch.randn(t, EXPERTS), torch.rand(EXPERTS), True)),
        ("weights", routing._weights, lambda t: (torch.rand(t, EXPERTS), chosen(t), True, 2.5)),
        (
            "gradient_of_logits",
            routing._gradient_of_logits,
            lambda t: (torch.rand(t, TOP_K), torch.rand(t, EXPERTS), chosen(t), False, True, 2.5),
        ),
        ("of_groups", routing._of_groups, lambda t: (torch.rand(t, 8, 2), torch.randint(0, 8, (t, 3)))),
        ("replayed", routing._replayed, lambda t: (chosen(t).short() - 1, chosen(t))),
        ("sources", experts._sources, lambda t: (torch.randperm(t * TOP_K), TOP_K)),
    ]


def half(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def angles(tokens: int) -> tuple[Tensor, Tensor]:
    return torch.rand(tokens, 1, ROTARY), torch.rand(tokens, 1, ROTARY)


def chosen(tokens: int) -> Tensor:
    return torch.rand(tokens, EXPERTS).topk(TOP_K).indices


def block_masks() -> None:
    """FlexAttention with a mask of its own for each micro-batch, which must not be compiled for each of them.

    Queries are those of all tokens, or of one of two context-parallel ranks.
    """
    counter = CompileCounterWithBackend("inductor")
    plain = flex_attention._attend_by_mask
    compiled = torch.compile(plain, backend=counter, fullgraph=True)
    for lengths in ((304, 200), (304, 104, 8), (704, 16), (88,) * 9):
        for window, cp in ((None, 1), (40, 1), (None, 2)):
            queries = zigzag_tokens(torch.tensor(lengths), cp, 1) if cp > 1 else None
            mask = flex_attention.block_mask(torch.tensor(lengths), window, torch.device("cpu"), queries)
            tokens = sum(lengths)
            inputs = [torch.randn(t, heads, WIDTH) for t, heads in ((tokens // cp, HEADS), (tokens, 2), (tokens, 2))]
            results = []
            for function in (compiled, plain):
                flex_attention._compiled = function
                results.append(flex_attention.attend_with_block_mask(*inputs, mask, 0.3, 0.5))
            assert_close(*results, rtol=1e-4, atol=1e-5)
    print(f"flex_attention: {counter.frame_count} compilations", flush=True)
    assert counter.frame_count == 1, "one for all sizes"


if __name__ == "__main__":
    main()
