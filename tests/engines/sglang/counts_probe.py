"""What SGLang reports of a request with speculative decoding: `python -m ...counts_probe`, one JSON object.

Its own method computes the fields, from the counters of its schedulers: speculative decoding does not run on a CPU.
"""

import json
from types import SimpleNamespace
from unittest.mock import patch

from sglang.srt.managers import tokenizer_manager


def main() -> None:
    """Prints `meta_info` of a request of 12 tokens in 5 verifications of 3 drafted tokens, 7 of which were accepted."""
    received = SimpleNamespace(
        spec_verify_ct=[5], spec_num_correct_drafts=[7], completion_tokens=[12], spec_correct_drafts_histogram=[]
    )
    meta: dict[str, float] = {}
    with patch.object(tokenizer_manager, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=4)):
        tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics(SimpleNamespace(), meta, received, 0)
    print(json.dumps(meta))


if __name__ == "__main__":
    main()
