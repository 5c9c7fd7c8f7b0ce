"""Test cases of contest problems, as the sets LiveCodeBench and Codeforces publish them.

    livecodebench/code_generation_lite   public_test_cases, private_test_cases, metadata: JSON texts; private cases
                                         may be compressed: base64 of zlib of a pickled text
    open-r1/codeforces                   examples, official_tests, generated_checker

Read here they have a form of `verl_mg.rewards.code`.
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import zlib
from collections.abc import Mapping
from typing import Any

MAX_BYTES = 1 << 30  # largest size of the private test cases of a problem, decompressed
CHECKER = "generated_checker"  # field with a program that compares outputs, of problems with several right ones
_TEXTS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"}
_WITHOUT_EFFECT = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"}


def contest_tests(record: Mapping[str, Any]) -> Any:
    """Returns the test cases of a record in a form of `verl_mg.rewards.code`, None where it is of no such set."""
    if record.get("public_test_cases"):
        return _livecodebench(record)
    if record.get("official_tests") or (record.get("examples") and "input_format" in record):
        cases = record.get("official_tests") or record["examples"]
        return [{"input": case["input"], "output": case["output"]} for case in cases]
    return None


def _livecodebench(record: Mapping[str, Any]) -> Any:
    cases = json.loads(record["public_test_cases"]) + _private(record.get("private_test_cases") or "[]")
    if all(case["testtype"] == "stdin" for case in cases):
        return [{"input": case["input"], "output": case["output"]} for case in cases]
    metadata = record.get("metadata") or "{}"
    name = (json.loads(metadata) if isinstance(metadata, str) else metadata).get("func_name")
    if not name:
        raise ValueError("metadata has no func_name")
    return {
        "fn_name": name,
        "inputs": [case["input"] for case in cases],
        "outputs": [case["output"] for case in cases],
    }


def _private(text: str) -> list[dict[str, Any]]:
    try:
        cases: list[dict[str, Any]] = json.loads(text)
    except ValueError:
        cases = json.loads(pickled_text(_decompressed(text)))
    return cases


def _decompressed(text: str) -> bytes:
    # Not `zlib.decompress`, which has no limit: a few KiB of a record can become all of a host's memory.
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(base64.b64decode(text, validate=True), MAX_BYTES)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"private_test_cases are neither JSON nor compressed ({error})") from None
    if stream.unconsumed_tail:
        raise ValueError(f"private_test_cases are larger than {MAX_BYTES} bytes")
    return data


def pickled_text(data: bytes) -> str:
    """Returns the text that a pickle consists of, without executing it; ValueError for anything but one text."""
    # A pickle is never loaded, since it can run anything: its instructions are listed.
    texts: list[str] = []
    for instruction, argument, _ in pickletools.genops(data):
        if instruction.name in _TEXTS:
            texts.append(str(argument))
        elif instruction.name not in _WITHOUT_EFFECT:
            raise ValueError(f"private_test_cases are a pickle of more than a text ({instruction.name})")
    if len(texts) != 1:
        raise ValueError(f"private_test_cases are a pickle of {len(texts)} texts")
    return texts[0]
