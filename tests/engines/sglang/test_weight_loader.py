"""Messages to weight loaders, as SGLang's schedulers read them."""

import base64
import pickletools

import torch

from verl_mg.engines.sglang.weight_loader import message_for_loader


def test_message_after_megatron_core_has_replaced_a_function_of_torch_names_that_of_torch(monkeypatch):
    def safe_load_from_bytes(values):
        raise AssertionError(values)

    safe_load_from_bytes.__module__ = "megatron.core.safe_globals"
    monkeypatch.setattr(torch.storage, "_load_from_bytes", safe_load_from_bytes)
    message = base64.b64decode(message_for_loader({"folder": "/tmp"}))
    strings = {argument for _, argument, _ in pickletools.genops(message) if isinstance(argument, str)}
    assert {"torch.storage", "_load_from_bytes"} <= strings
    assert not any("megatron" in text for text in strings)
