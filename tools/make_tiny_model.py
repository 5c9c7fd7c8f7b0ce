"""Writes a tiny random model: python -m tools.make_tiny_model --architecture qwen3 --out DIR"""

import argparse
import json
import string
import sys

from verl_mg.errors import UserError
from verl_mg.models.tiny_model import ARCHITECTURES, make_tiny_model


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for invalid arguments."""
    options = vars(_parser().parse_args(arguments))
    folder = options.pop("out")
    try:
        make_tiny_model(folder, **options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(folder)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Write a tiny random model in the Hugging Face layout, with a tokenizer of characters.",
    )
    parser.add_argument("--architecture", required=True, help=f"one of: {', '.join(ARCHITECTURES)}")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write")
    parser.add_argument(
        "--characters",
        default=string.printable,
        metavar="TEXT",
        help="one token each; printable ASCII unless given",
    )
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, help="hidden // heads unless given")
    parser.add_argument("--ffn", type=int, default=128)
    parser.add_argument("--experts", type=int, default=4, help="a layer, where the architecture has any")
    parser.add_argument("--shared-experts", type=int, default=1, help="a layer (DeepSeek)")
    parser.add_argument("--dense-layers", type=int, default=0, help="first layers without experts (DeepSeek)")
    parser.add_argument("--q-rank", type=int, default=0, help="queries are compressed to this (DeepSeek)")
    parser.add_argument("--tie-embeddings", action="store_true")
    parser.add_argument("--rope-scaling", type=json.loads, metavar="JSON", help="as in a config.json")
    parser.add_argument("--max-positions", type=int, default=1024)
    parser.add_argument("--init-std", type=float, default=0.02)
    parser.add_argument("--perturb", action="store_true", help="add small noise to norms and biases")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
