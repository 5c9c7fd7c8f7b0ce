"""Candidates that SGLang's sampler packs, as in our schedulers: `python -m tests.engines.sglang.candidates_probe`."""

import json
from types import SimpleNamespace as Object

import torch
from sglang.srt.layers.sampler import Sampler, _SamplingMaskCapture

from verl_mg.engines.sglang.arguments import MAX_CANDIDATES
from verl_mg.engines.sglang.internals import return_all_candidates


def main() -> None:
    """Prints the ids of two draws, with how many of each count, and what is packed after a step with fewer."""
    return_all_candidates()
    rows = torch.arange(2)
    sampler = Object(sampling_mask_max_tokens=MAX_CANDIDATES, tp_sync_group=None, cp_sync_group=None)
    found = []
    for weights in ([[0.0, 0.5, 0.0, 0.25], [0.0, 1.0, 0.0, 0.0]], [[0.5, 0.5, 0.0, 0.25], [0.0, 1.0, 0.0, 0.0]]):
        captured = _SamplingMaskCapture(torch.tensor(weights), None, None, rows)
        packed = Sampler._build_sampling_mask_output(sampler, torch.tensor([1, 1]), captured, None)
        found.append([packed.token_ids.tolist(), packed.lengths.tolist(), packed.statuses.tolist()])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
