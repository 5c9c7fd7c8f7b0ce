"""Rows of a report about the output layer: log-probs and entropies of a model's vocabulary, and what their limit is.

The limit is the time of only the products, one in the forward pass and four with the backward pass. Liger's fused
linear scaled cross entropy is measured where it is installed (`tools/install/bare_stack.sh --with-liger`).
"""

from __future__ import annotations

import ctypes
import site
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tools.bench.update_profile import Row
from verl_mg.planner.inputs import GIB
from verl_mg.training import logprobs
from verl_mg.training.logprobs import vocab_parallel_logprobs
from verl_mg.training.output_layer import Draw, OutputLayer, aligned_empty
from verl_mg.training.vocabulary_rows import TorchRows
from verl_mg.training.weight_gradients import wgrad_gemm_accum_fp32

TEMPERATURE = 0.8
Outputs = tuple[Tensor, Tensor | None]
"""Log-probs, and entropies if they are wanted."""


class Vocabulary:
    """Output layer with random values, and the gradients of what it computes."""

    def __init__(
        self, tokens: int, hidden: int, vocab: int, place: torch.device, seconds: Callable[[Any], float]
    ) -> None:
        """Args: sizes, the device, and a function that returns the median seconds of a call."""
        torch.manual_seed(0)
        half = {"dtype": torch.bfloat16, "device": place}
        self.hidden = torch.randn(tokens, hidden, **half).requires_grad_()
        self.weight = torch.randn(vocab, hidden, **half).mul_(0.02).requires_grad_()
        # As the buffer of a trainer: the product adds the weight's gradient to it.
        self.weight.main_grad = torch.zeros(vocab, hidden, device=place)  # type: ignore[attr-defined]
        self.targets = torch.randint(vocab, (tokens,), device=place)
        self.pulls = torch.randn(2, tokens, device=place) * torch.tensor([1.0, 0.01], device=place)[:, None]
        self.layer = OutputLayer(self.weight, 0, vocab, None, fused_gradient=True)
        self._seconds = seconds
        largest = max(block.stop - block.start for block in self.layer.blocks(tokens))
        # Not zeros: products of numbers that are all alike take less power, and less time.
        self._gradient = aligned_empty(tokens, largest, torch.bfloat16, place).normal_(std=1e-4)

    def rows(self) -> Iterator[Row]:
        """Yields milliseconds, and their ratio to the limit."""
        limit = self._seconds(self._one_product)
        limit_with_gradients = self._seconds(self._four_products)
        yield "only products, forward", f"{1e3 * limit:.2f} ms"
        yield "only products, forward and backward", f"{1e3 * limit_with_gradients:.2f} ms"
        kinds: dict[str, Callable[[bool], Outputs]] = {"": self._ours, ", rows by torch's operations": self._by_torch}
        if self.hidden.is_cuda:
            kinds |= {", Liger": self._liger, ", Liger over a group of one": self._liger_of_group}
        expected: Outputs | None = None
        for name, compute in kinds.items():
            try:
                with torch.no_grad():
                    values = compute(True)
                    yield f"log-probs and entropies{name}", self._timed(partial(compute, True), limit)
                for what, entropy in (("... with gradients", True), ("... of log-probs only", False)):
                    learn = partial(self._learn, compute, entropy)
                    yield what + name, self._timed(learn, limit_with_gradients)
                expected = expected or values
                yield f"... largest difference{name}", f"{max(map(_difference, values, expected)):.2g} nats"
            except Exception as error:  # of a peer, which may need what is not here
                if expected is None:
                    raise
                text = str(error).splitlines()[0] if str(error) else ""
                yield f"failed{name}", f"{type(error).__name__}: {text[:200]}"

    def _timed(self, work: Callable[[], object], limit: float) -> str:
        seconds = self._seconds(work)
        text = f"{1e3 * seconds:.2f} ms, {seconds / limit:.2f} of the products"
        if self.hidden.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            work()
            text += f", {(torch.cuda.max_memory_allocated() - before) / GIB:.2f} GiB more at its peak"
        return text

    def _one_product(self) -> None:
        with torch.no_grad():
            for chunk in self.layer.chunks(len(self.hidden)):
                self.layer.products(self.hidden[chunk])

    def _four_products(self) -> None:
        """Computes logits twice, and gradients of hidden states and weights of each block, as the passes do."""
        self._one_product()
        with torch.no_grad():
            summed = torch.zeros(self.hidden.shape, device=self.hidden.device)
            for block in self.layer.blocks(len(self.hidden)):
                part = self.layer.part(block)
                part.products(self.hidden)
                gradient = self._gradient[:, : part.real_rows]
                wgrad_gemm_accum_fp32(part.weight, gradient.T, summed)
                wgrad_gemm_accum_fp32(self.hidden, gradient, self.weight.main_grad[block])  # type: ignore[attr-defined]

    def _learn(self, compute: Callable[[bool], Outputs], entropy: bool) -> None:
        self.hidden.grad = self.weight.grad = None
        outputs = [each for each in compute(entropy) if each is not None]
        torch.autograd.backward(outputs, list(self.pulls[: len(outputs)]))

    def _ours(self, entropy: bool) -> Outputs:
        extra: Any = "entropy" if entropy else None
        return vocab_parallel_logprobs(self.hidden, self.targets, self.layer, Draw(TEMPERATURE), extra)

    def _by_torch(self, entropy: bool) -> Outputs:
        with mock.patch.object(logprobs, "rows_on", lambda _: TorchRows):
            return self._ours(entropy)

    def _liger(self, entropy: bool) -> Outputs:
        from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

        options = TEMPERATURE, -100, 1, entropy
        return _of_losses(LigerFusedLinearScaledCrossEntropyFunction.apply(*self._inputs, *options))

    def _liger_of_group(self, entropy: bool) -> Outputs:
        _load_cuda_12()
        from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyTPFunction

        options = dist.group.WORLD, TEMPERATURE, -100, 1, entropy
        return _of_losses(LigerFusedLinearScaledCrossEntropyTPFunction.apply(*self._inputs, *options))

    @property
    def _inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.targets


def _of_losses(outputs: Any) -> Outputs:
    loss, entropy = outputs if isinstance(outputs, tuple) else (outputs, None)
    return -loss.float(), None if entropy is None else entropy.float()


def _difference(values: Tensor | None, expected: Tensor | None) -> float:
    return 0.0 if values is None or expected is None else float((values - expected).abs().max())


def _load_cuda_12() -> None:
    """Loads the runtime of CUDA 12, a package, after the runtime of CUDA 13: a library of Liger's is linked to it."""
    for folder in site.getsitepackages():
        for file in Path(folder).glob("nvidia/cuda_runtime/lib/libcudart.so.12*"):
            ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)
