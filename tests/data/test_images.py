"""Images of records in all their forms become the tokens and inputs that the model's own processor makes of them."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor, AutoTokenizer

from tests.helpers.json_lines import data_file
from tests.helpers.prompts import prompt_set
from tests.helpers.published_rows import write_parquet
from tests.helpers.tiny_models import noise_image, vision_model
from verl_mg.data import PromptSet, demonstrations_batch
from verl_mg.data.image_processor import ImageProcessor
from verl_mg.errors import UserError

pytest.importorskip("torchvision", reason="transformers prepares images with torchvision, which is not installed")

WIDE, TALL = noise_image(84, 56, 0), noise_image(33, 90, 1)
QUESTION = "a <image>b<image> c"
PARTS = [{"type": "text", "text": "a "}, {"type": "image"}, {"type": "text", "text": "b"}, {"type": "image"}]
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3")


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def paths(folder: Path) -> Path:
    (folder / "pictures").mkdir()
    for name, image in (("wide", WIDE), ("tall", TALL)):
        (folder / "pictures" / name).write_bytes(image.data)
    return data_file(folder, {"prompt": QUESTION, "images": ["pictures/wide", "pictures/tall"]})


def urls(folder: Path) -> Path:
    messages = [{"role": "user", "content": [*PARTS, {"type": "text", "text": " c"}]}]
    return data_file(folder, {"prompt": messages, "images": [data_url(WIDE.data), data_url(TALL.data)]})


def parquet_bytes(folder: Path) -> Path:
    messages = [{"role": "user", "content": QUESTION}]
    return write_parquet(folder / "data.parquet", [{"prompt": messages, "images": [WIDE.data, TALL.data]}])


def datasets_parquet(folder: Path) -> Path:
    import datasets

    features = datasets.Features({"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    rows = {"prompt": [QUESTION], "images": [[WIDE.pixels(), TALL.pixels()]]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "data.parquet")
    return folder / "data.parquet"


def read(file: Path, family: str = "qwen2_5_vl", **options: Any) -> PromptSet:
    folder = vision_model(family)
    tokenizer, processor = AutoTokenizer.from_pretrained(folder), ImageProcessor.read(folder)
    return prompt_set(file, tokenizer, processor=processor, **{"max_prompt_tokens": 100} | options)


@pytest.mark.parametrize("form", [paths, urls, parquet_bytes, datasets_parquet])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_with_images_has_tokens_and_inputs_of_the_processor(tmp_path, family, form):
    (prompt,) = read(form(tmp_path), family)
    oracle = AutoProcessor.from_pretrained(vision_model(family))
    parts = [*PARTS, {"type": "text", "text": " c"}]
    text = oracle.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    pixels = [WIDE.pixels(), TALL.pixels()]
    wanted = oracle(text=[text], images=[pixels], return_tensors="pt")
    assert prompt.tokens == tuple(wanted["input_ids"][0].tolist()) and prompt.text == text
    processor = ImageProcessor.read(vision_model(family))
    inputs = processor.model_inputs([prompt.load_images()])
    per_token = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}
    assert inputs.keys() == wanted.keys() - per_token and "pixel_values" in inputs
    assert all(torch.equal(inputs[name], wanted[name]) for name in inputs)
    kinds = wanted["token_type_ids" if family == "gemma3" else "mm_token_type_ids"][0]
    assert processor.image_mask(torch.tensor(prompt.tokens)).tolist() == (kinds == 1).tolist()


def test_images_are_loaded_once_for_all_samples_and_released(tmp_path):
    (prompt,) = read(paths(tmp_path))
    first = prompt.load_images()
    assert prompt.load_images()[1] is first[1] and first == (WIDE, TALL)
    del first
    (tmp_path / "pictures" / "tall").unlink()
    with pytest.raises(UserError, match=r"data\.jsonl:1: image 2 of 'images': .*tall cannot be read \(No such file"):
        prompt.load_images()


def test_text_prompts_of_a_vision_model_are_as_before(tmp_path):
    first, second = read(data_file(tmp_path, {"prompt": "1 <image>"}, {"prompt": "2", "images": []}))
    tokenizer = AutoTokenizer.from_pretrained(vision_model("qwen2_5_vl"))
    assert [list(prompt.tokens) for prompt in (first, second)] == tokenizer(["1 <image>", "2"])["input_ids"]
    assert not first.images and not second.images


def test_demonstrations_with_images_give_their_rows_the_images(tmp_path):
    file = data_file(
        tmp_path, {"prompt": "<image>", "image": data_url(WIDE.data), "answer": "1"}, {"prompt": "2", "answer": "3"}
    )
    prompts, tokenizer = read(file, image_field="image"), AutoTokenizer.from_pretrained(vision_model("qwen2_5_vl"))
    batch = demonstrations_batch([*prompts], tokenizer, 50, 0)
    assert batch.images == [(WIDE,), ()]


GOOD = data_url(WIDE.data)


@pytest.mark.parametrize(("record", "options", "message"), [
    ({"images": ["none.png"]}, {}, r"1: image 1 of 'images': there is no file .*none\.png\. Write its path"),
    ({"images": [GOOD, GOOD]}, {}, r"1: the prompt has places for 1 images, the record has 2\. Write <image>"),
    ({"images": []}, {"prompt": [{"role": "user", "content": PARTS[1:2]}]}, r"places for 1 images, the record has 0"),
    ({"images": [GOOD]}, {"max_image_pixels": 4703}, r"it has 84 x 56 pixels, data\.max_image_pixels is 4703"),
    ({"images": [GOOD] * 3}, {"max_images": 2}, r"1: 3 images, data\.max_images is 2\. Raise it"),
    ({"images": [data_url(b"text")]}, {}, r"image 1 of 'images': not a readable image \(cannot identify"),
    ({"images": ["data:image/png;base64,?"]}, {}, r"image 1 of 'images': not an image in base64"),
    ({"images": [7]}, {}, r"image 1 of 'images': 7 is not an image\. Write a path"),
])  # fmt: skip
def test_images_that_cannot_be_used_are_one_line_with_the_row(tmp_path, record, options, message):
    prompt = options.pop("prompt", "<image>")
    file = data_file(tmp_path, {"prompt": prompt} | record)
    with pytest.raises(UserError, match=message) as error:
        read(file, **options)
    assert "\n" not in str(error.value) and "data.jsonl:1: " in str(error.value)


def test_image_that_is_cut_short_is_found_when_it_is_loaded(tmp_path):
    (prompt,) = read(data_file(tmp_path, {"prompt": "<image>", "images": data_url(WIDE.data[: len(WIDE.data) // 2])}))
    with pytest.raises(UserError, match=r"^\S*data\.jsonl:1: image 1 of 'images': not a readable image"):
        prompt.load_images()


def test_processor_of_another_model_is_refused(tmp_path):
    """Its token of an image is one that the model reads as text."""
    folder = shutil.copytree(vision_model("qwen2_5_vl"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"image_token_id": 5}))
    with pytest.raises(UserError, match=r"config\.json: features of images replace the token 5, but the processor"):
        ImageProcessor.read(folder)


def test_images_of_a_text_model_are_refused(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(vision_model("qwen2_5_vl"))
    with pytest.raises(UserError, match=r"data\.jsonl:1: the record has 'images', which the model does not read"):
        prompt_set(data_file(tmp_path, {"prompt": "1", "images": [GOOD]}), tokenizer, max_prompt_tokens=9)
