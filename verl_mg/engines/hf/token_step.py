"""One token for each row by a `transformers` module: the attention, the cache, and the module without its Python.

In small models most of a step is Python of `transformers`. `TokenStep` records the operators of a step, and repeats
these, where no value of a tensor decides what the module does and the results are equal bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

STEPS_BEFORE_TRACE = 48  # recording takes as long as 50 to 100 steps save
MODELS = Path(transformers.__file__).parent / "models"
GROUPED_SDPA = "grouped_sdpa"  # name in `transformers`' registries


def grouped_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Computes the attention that `transformers` calls "sdpa", for a single token without copies of keys and values."""
    has_mask_of_heads = attention_mask is not None and attention_mask.shape[1] != 1
    if query.shape[2] > 1 or has_mask_of_heads or options.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    # The queries that share a key head are a sequence of queries: each has the mask of the only token.
    grouped = query.unflatten(1, (key.shape[1], -1)).squeeze(3)
    context = F.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=options.get("scaling")
    )
    return context.flatten(1, 2).unsqueeze(1), None


def grouped_sdpa_mask(
    *,
    q_length: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Tensor | None:
    """Makes the mask of "sdpa", of a single token always: only values of the mask say whether it is needed."""
    is_single, is_causal = q_length == 1, mask_function is causal_mask_function and kv_offset == 0
    if is_single and is_causal and attention_mask is not None and attention_mask.shape[1:] == (kv_length,):
        mask: Tensor | None = attention_mask[:, None, None]  # a token attends to all before it that are no padding
    else:
        options |= {"q_length": q_length, "kv_length": kv_length, "kv_offset": kv_offset}
        options |= {"mask_function": mask_function, "attention_mask": attention_mask}
        mask = sdpa_mask(allow_is_causal_skip=allow_is_causal_skip and not is_single, **options)
    if is_single and mask is not None:  # once, what attention makes of it in each layer
        mask = torch.zeros((), dtype=dtype, device=mask.device).where(mask, -torch.inf)
    return mask


# By name for the whole process, as `transformers` finds attentions and their masks.
AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
AttentionMaskInterface.register(GROUPED_SDPA, grouped_sdpa_mask)


def implementation(attention: str) -> str:
    """Returns the name by which a module that decodes gets "sdpa" or "eager"."""
    return GROUPED_SDPA if attention == "sdpa" else attention


class ColumnLayer(DynamicLayer):
    """A cache layer with spare columns; `DynamicLayer` copies the whole cache at every token.

    `keys` and `values` are (rows, heads, columns, dim), of which the first `length` are in use; a token attends to the
    last `window` of them, None: to all.
    """

    def __init__(self, window: int | None, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        super().__init__()
        self.window, self.is_sliding = window, window is not None
        self.keys, self.values, self.is_initialized = keys, values, keys is not None
        self.length: Any = 0  # a tensor while a step is recorded

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Keeps the states of prompts, or adds the states of a token; returns all that it attends to."""
        if self.keys is None or self.values is None:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
            return key_states, value_states
        attended = []
        for states, new in ((self.keys, key_states), (self.values, value_states)):
            states.narrow(2, self.length, 1).copy_(new)
            used = states.narrow(2, 0, self.length + 1)
            attended.append(used if self.window is None else used[:, :, -self.window :])
        return attended[0], attended[1]

    def get_seq_length(self) -> int:
        """Returns the number of columns in use."""
        return self.length  # type: ignore[no-any-return]  # an integer except while a step is recorded

    def get_mask_sizes(self, query_length: int) -> tuple[Any, Any]:
        """Returns the number of columns that are attended to, and the number of the first."""
        end = self.length + query_length
        if self.window is None:
            return end, 0
        most = self.window + query_length - 1
        kept = end.clamp(max=most) if isinstance(end, Tensor) else min(end, most)
        return kept, end - kept


class TokenStep:
    """Runs a module for one token of each row, after some steps by its recorded operators."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module
        self._recorded: Callable[..., Tensor] | None = None
        self._num_steps = 0
        self._places: list[int] = []  # memory of the weights

    def renew(self) -> None:
        """Forgets the recorded operators where weights are in other memory than they read."""
        places = [tensor.data_ptr() for tensor in chain(self.module.parameters(), self.module.buffers())]
        if places != self._places:
            self._places, self._recorded, self._num_steps = places, None, 0

    def __call__(self, layers: Sequence[Any], tokens: Tensor, positions: Tensor, attend: Tensor, length: int) -> Tensor:
        """Returns the logits (r, V) after tokens (r, 1) at positions (r, 1) after `length` columns of the cache.

        `attend` (r, length + 1) is false in columns that a row does not attend to.
        """
        if self._recorded and _is_plain(layers):
            with torch.jit.optimized_execution(False):  # an optimized plan depends on earlier shapes
                return self._recorded(tokens, positions, attend, torch.tensor(length), *_columns(layers))
        self._num_steps += 1
        # GPU: kernels are started by the module's Python.
        # GPU-TEST: none
        # GPU-RAN: h200-1, h100-1
        if self._num_steps == STEPS_BEFORE_TRACE and _is_plain(layers) and tokens.device.type == "cpu":
            self._recorded = self._record(layers, tokens, positions, attend, length)
        return self._logits(layers, tokens, positions, attend, length)

    def _logits(
        self, layers: Sequence[Any], tokens: Tensor, positions: Tensor, attend: Tensor, length: int | Tensor
    ) -> Tensor:
        for layer in layers:
            if isinstance(layer, ColumnLayer):
                layer.length = length
        cache = DynamicCache()
        cache.layers = list(layers)
        return forward(self.module, cache, tokens, attend, positions)

    def _record(
        self, layers: Sequence[ColumnLayer], tokens: Tensor, positions: Tensor, attend: Tensor, length: int
    ) -> Callable[..., Tensor] | None:
        """Returns the recorded operators, None where they might compute something else with other values."""
        windows = [layer.window for layer in layers]

        def run(tokens: Tensor, positions: Tensor, attend: Tensor, length: Any, *columns: Tensor) -> Tensor:
            pairs = zip(windows, columns[::2], columns[1::2], strict=True)
            return self._logits([ColumnLayer(*each) for each in pairs], tokens, positions, attend, length)

        # Fewer rows and columns too, in copies: a number that was recorded in place of a size shows.
        few, short = (len(tokens) + 1) // 2, (length + 1) // 2
        cases: list[tuple[Any, ...]] = [
            (tokens, positions, attend, length, *_columns(layers)),
            (tokens[:few], positions[:few], attend[:few, -short - 1 :], short, *(x[:few] for x in _columns(layers))),
        ]
        cases = [(*case[:4], *(states.clone() for states in case[4:])) for case in cases]
        try:
            with _ReadsValues() as reads, warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                expected = [run(*case) for case in cases]
                if reads.any:
                    return None
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                inputs = [(*case[:3], torch.tensor(case[3]), *case[4:]) for case in cases]
                recorded = torch.jit.trace(run, inputs[0], check_trace=False)
            # A size decides what the code of the family does, which may differ for larger ones.
            if any(MODELS in Path(warning.filename).parents for warning in caught):
                return None
            with torch.jit.optimized_execution(False):
                are_equal = all(torch.equal(recorded(*case), e) for case, e in zip(inputs, expected, strict=True))
            return recorded if are_equal else None
        except Exception:  # of any kind: it is the code of any family
            return None


def forward(
    module: PreTrainedModel, cache: DynamicCache, ids: Tensor, attend: Tensor, positions: Tensor, **inputs: Any
) -> Tensor:
    """Returns the logits (r, V) after the last of ids (r, t) at positions (r, t); attend: (r, cached + t) bool."""
    output = module(
        input_ids=ids,
        attention_mask=attend,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        **inputs,
    )
    logits: Tensor = output.logits[:, -1]
    return logits


class _ReadsValues(TorchDispatchMode):
    """Notices operators whose results Python reads, or whose shape values of a tensor decide."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to exclude it torch imports its compiler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operator."""
        tags = set(func.tags)
        if func is torch.ops.aten.index.Tensor:  # only by a mask does the shape depend on values
            tags = {torch.Tag.dynamic_output_shape} if any(_is_mask(each) for each in args[1]) else set()
        self.any |= bool(tags & {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
        return func(*args, **(kwargs or {}))


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _is_plain(layers: Sequence[Any]) -> bool:
    return all(isinstance(layer, ColumnLayer) for layer in layers)


def _columns(layers: Sequence[Any]) -> list[Tensor]:
    return [states for layer in layers for states in (layer.keys, layer.values)]
