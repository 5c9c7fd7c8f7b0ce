"""What SGLang reports of the keys that it selects: `python -m tests.engines.sglang.selections_probe SCORES`.

SCORES are the index scores of a request in JSON, (layers, tokens, tokens). The processes' environment is ours.
"""

import json
import sys
from types import SimpleNamespace as Object

import torch
from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend, TopkTransformMethod
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.state_capturer import base

TOP_K, BEFORE, PROMPT = 3, 4, 9
"""Keys of a token, tokens of another request in front of it in a batch, and tokens that are computed together."""


def main() -> None:
    """Prints the report of a request whose tokens are computed in three steps, the first with another request."""
    scores = torch.tensor(json.loads(sys.argv[1]))
    # SGLang's own function pins the memory, which needs a GPU.
    base.ALLOC_MEMORY_FUNCS["cpu"] = lambda shape, dtype, **_: torch.empty(shape, dtype=dtype)
    layers, tokens, _ = scores.shape
    capturer = base.BaseTopkCapturer(99, 32, layers, TOP_K, "cpu", "indexer_topk")
    places = 98 - torch.arange(BEFORE + tokens)  # of the tokens in the cache
    steps = [range(PROMPT), *([token] for token in range(PROMPT, tokens))]
    for number, step in enumerate(steps):
        rows, before = torch.tensor(list(step)), BEFORE if number == 0 else 0
        for layer in range(layers):
            batch = torch.rand(before + len(rows), before + int(rows[-1]) + 1)
            batch[before:, before:] = scores[layer, rows, : int(rows[-1]) + 1]
            lengths = torch.cat([torch.arange(before), rows]) + 1
            starts = torch.cat([torch.zeros(before), torch.full((len(rows),), before)]).int()
            method = TopkTransformMethod.RAGGED if before else TopkTransformMethod.PAGED
            found = DSATopKBackend.TORCH.topk_transform(
                batch, lengths, TOP_K, method, None, topk_indices_offset=starts, row_starts=starts
            )
            capturer.capture(layer, found)
        here = torch.cat([places[:before], places[BEFORE + rows]])
        capturer.on_forward_end(Object(out_cache_loc=here, out_cache_loc_virtual=None), False, None)
    cache = Object(req_to_token=torch.cat([places[BEFORE:], torch.tensor([0])])[None])
    report = capturer.get_topk(0, tokens + 1, cache)
    print(json.dumps(DetokenizerManager._b64_encode_per_request([report])))


if __name__ == "__main__":
    main()
