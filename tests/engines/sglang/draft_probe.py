"""SGLang's draft class of a model, filled by its own loader and by ours: `python -m ...draft_probe MODEL FOLDER`.

MODEL is a directory with a layer of multi-token prediction. Prints one JSON object, see `main`.
"""

import base64
import json
import pickle
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from verl_mg.checkpoint.hf_safetensors import CheckpointReader, load_shards
from verl_mg.checkpoint.model_directory import ModelDirectory
from verl_mg.engines.payloads import Staging
from verl_mg.engines.sglang.internals import unloaded_model
from verl_mg.engines.sglang.weight_loader import load_chunk, merge_stages
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import read_config
from verl_mg.models.hf_tensors import with_multi_token_layer
from verl_mg.sharding.weight_table import weight_table

QWEN = {
    "Qwen3NextForCausalLM": "Qwen3NextForCausalLMMTP",
    **dict.fromkeys(("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"), "Qwen3_5ForCausalLMMTP"),
}
"""Classes of SGLang for the layer of Qwen's models, by the class of the model."""


def draft_directory(model: Path, folder: Path) -> Path:
    """A copy of the configuration that names the draft class, as SGLang changes it for its draft worker."""
    folder.mkdir(parents=True)
    config = json.loads((model / "config.json").read_text())
    (name,) = config["architectures"]
    config["architectures"] = [QWEN.get(name, f"{name}NextN")]
    (folder / "config.json").write_text(json.dumps(config))
    for file in model.glob("model*safetensors*"):
        shutil.copy(file, folder)
    return folder


def bits(values: torch.Tensor) -> torch.Tensor:
    """Values that are equal where both are not a number, too."""
    return values.contiguous().view(torch.int32)


@torch.no_grad()
def main(model: Path, folder: Path) -> None:
    """Prints the class, the parameters that SGLang's loader leaves empty, and those that ours fills differently."""
    layout = EngineLayout()
    table = weight_table(with_multi_token_layer(read_config(model), model)).with_draft_model()
    shards = table.engine_shards(layout, 0)
    staging = Staging(shards, dict.fromkeys(shards, torch.float32), torch.device("cpu"))
    reader = CheckpointReader(ModelDirectory.find(model, table.tensor_index.stacked))
    load_shards(reader, shards, staging.tensors)
    with unloaded_model(str(draft_directory(model, folder / "draft")), layout, 0, folder / "store") as draft:
        parameters = dict(draft.named_parameters())

        for values in parameters.values():
            values.fill_(torch.nan)
        files = [load_file(file) for file in sorted(model.glob("*.safetensors"))]
        draft.load_weights(tensor for tensors in files for tensor in tensors.items())
        unfilled = sorted(name for name, values in parameters.items() if values.isnan().any())
        expected = {name: values.clone() for name, values in parameters.items()}
        for values in parameters.values():
            values.fill_(torch.nan)
        message = pickle.loads(base64.b64decode(merge_stages([staging.payload()], is_last=True, for_draft=True)))
        load_chunk(draft, message)
        different = sorted(name for name in parameters if not torch.equal(bits(parameters[name]), bits(expected[name])))
        result = {"class": type(draft).__name__, "unfilled": unfilled, "different": different, "all": len(parameters)}
        print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
