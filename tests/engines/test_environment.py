"""What libraries change in a rank's environment only by being imported does not reach engines or training."""

import base64
import hashlib
import importlib
import json
import os
import pickletools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

import verl_mg
from tests.helpers import warm_start
from tests.helpers.tiny_models import noise_image, vision_model
from tests.helpers.traces import needs_sglang
from verl_mg.data.image_processor import ImageProcessor
from verl_mg.engines.engine_options import CACHES, inherited_environment
from verl_mg.engines.payloads import Staging
from verl_mg.engines.sglang.arguments import ON_CPU
from verl_mg.engines.sglang.weight_loader import message_for_loader
from verl_mg.launch.program import IMPORTED
from verl_mg.sharding.boxes import Shard

PICKLING = re.compile(r"pickle\.dumps?\(|Pickler\(\w+\)\.dump|torch\.save\(")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_inherited_environment_leaves_out_caches_that_torch_names(monkeypatch):
    cache_dir()  # as the first compiled function does
    monkeypatch.setenv("TRITON_CACHE_DIR", triton_cache_dir(0))
    assert set(CACHES) <= os.environ.keys() and not set(CACHES) & inherited_environment(None).keys()


def test_inherited_environment_keeps_caches_that_the_user_names(monkeypatch, folder):
    for name in CACHES:
        monkeypatch.setenv(name, str(folder / "mine"))
    cache_dir()
    assert {inherited_environment(None)[name] for name in CACHES} == {str(folder / "mine")}


@needs_sglang
@pytest.mark.nightly
def test_parsers_of_sglang_leave_the_environment_of_training_as_it_is():
    code = """
import json, os
from verl_mg.engines.sglang import internals
before = dict(os.environ)
parsers = internals.reply_parsers()
import sys
print(json.dumps([parsers is not None, "sglang" in sys.modules, dict(set(os.environ.items()) ^ set(before.items()))]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [True, True, {}]


PIXELS = """
import hashlib, importlib, sys
from tests.engines.test_environment import pixels_of
for module in sys.argv[2:]:
    importlib.import_module(module)
print(pixels_of(sys.argv[1]))
"""


def pixels_of(folder: str) -> str:
    """Digest of what the processor of a model makes of an image."""
    processor = ImageProcessor.read(folder)
    assert processor
    inputs = processor.model_inputs([(noise_image(84, 56, 0),)])
    return hashlib.sha256(b"".join(inputs[name].numpy().tobytes() for name in sorted(inputs))).hexdigest()


@needs_sglang
def test_pixels_in_a_process_of_sglang_are_those_of_training():
    """SGLang replaces a method of an image processor on CPUs with AMX."""
    folder = str(vision_model("qwen2_5_vl"))
    late = ["sglang.srt.multimodal.processors.qwen_vl"]
    command = [warm_start.sglang().python, "-c", PIXELS, folder, *late]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ON_CPU)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == pixels_of(folder)


def test_processes_that_ranks_are_forked_from_import_no_engine():
    """Kernels of engines start CUDA when they are imported, which a fork cannot use."""
    code = "import sys\nprint([name for name in ('sglang', 'sgl_kernel', 'vllm') if name in sys.modules])"
    done = subprocess.run(
        [warm_start.shared().python, "-c", f"import {IMPORTED}\n{code}"], capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr[-2000:]


def test_training_sends_no_pickle_of_a_tensor_but_handles_and_messages_to_loaders():
    package = Path(verl_mg.__file__).parent
    files = {str(file.relative_to(package)) for file in package.rglob("*.py") if PICKLING.search(file.read_text())}
    assert files == {"engines/payloads.py", "engines/sglang/weight_loader.py"}


def test_pickles_for_engines_name_nothing_of_megatron():
    """megatron-core replaces a function that pickles of tensors name; engines do not find megatron-core."""
    importlib.import_module("megatron.core")
    staging = Staging({"a": Shard((3,), ())}, {"a": torch.float32}, torch.device("cpu"))
    for text in (staging.payload(), message_for_loader({"payloads": []})):
        named = [argument for _, argument, _ in pickletools.genops(base64.b64decode(text)) if isinstance(argument, str)]
        assert not [name for name in named if "megatron" in name] and any("torch" in name for name in named)


def test_warnings_of_torch_are_shown_in_training():
    code = "import verl_mg.megatron, warnings\nwarnings.warn_explicit('beware', UserWarning, 'f.py', 1, 'torch.nn.f')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "UserWarning: beware" in done.stderr and "Apex" not in done.stderr
