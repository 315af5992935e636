"""Tiny random models that read images, and requests with images for them."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from tests.engine.harness import Job
from tests.engine.pairs import CORPUS, SETTINGS, noisy_copy, save_tokenizer

IMAGE = "<|image_pad|>"
MARKS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": IMAGE,
    "video_token_id": "<|video_pad|>",
}
SIDE = 28  # pixels of a token
MAX_TOKENS = 100  # of an image


def save_reader(folder: Path) -> Any:
    """Writes a Qwen 2.5-VL to ``target`` below ``folder``, and a draft of its text layers to ``noisy``.
    Returns the target."""
    ids = _save_tokenizer(folder / "target")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    vision = {
        "depth": 2, "num_heads": 2, "hidden_size": 64, "intermediate_size": 64, "out_hidden_size": 128,
        "fullatt_block_indexes": [1], "window_size": 2 * SIDE,
    }  # fmt: skip
    torch.manual_seed(1)
    text = {**SETTINGS, "rope_parameters": rope}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(2.2)
        model.lm_head.weight[list(ids.values())] = 0  # or it might write an image
    model.save_pretrained(folder / "target")
    read_text = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SETTINGS)).eval()
    read_text.model.load_state_dict(model.model.language_model.state_dict())
    read_text.lm_head.load_state_dict(model.lm_head.state_dict())
    noisy_copy(read_text, 0.05).save_pretrained(folder / "noisy")
    _save_tokenizer(folder / "noisy")
    return model


def _save_tokenizer(folder: Path) -> dict[str, int]:
    """With the marks of images, and with a processor. Returns their ids by the names of the configuration."""
    save_tokenizer(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    last = content["added_tokens"][-len(MARKS) :]
    for token, mark in zip(last, MARKS.values(), strict=True):
        token.update(content=mark, special=True)
    path.write_text(json.dumps(content))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(path), eos_token="<eos>", pad_token="<pad>"
    )
    images = transformers.Qwen2VLImageProcessor(min_pixels=SIDE**2, max_pixels=MAX_TOKENS * SIDE**2)
    videos = transformers.Qwen2VLVideoProcessor()
    transformers.Qwen2_5_VLProcessor(images, tokenizer, videos).save_pretrained(folder)
    return {name: token["id"] for name, token in zip(MARKS, last, strict=True)}


def picture(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


def as_url(image: Image.Image) -> str:
    out = io.BytesIO()
    image.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def image_jobs(count: int, folder: Path, seed: int) -> list[tuple[Job, dict[str, Any]]]:
    """Greedy requests with 0 to 2 images of 1 to 100 tokens, many of which share a prefix; and what
    Transformers is given of each besides tokens."""
    rng = random.Random(seed)
    sizes = ((1, 1), (3, 2), (2, 7), (10, 10), (9, 4), (4, 12))
    pictures = [picture(np.random.default_rng(seed), SIDE * w, SIDE * h) for w, h in sizes]
    processor = transformers.Qwen2_5_VLProcessor.from_pretrained(folder)
    image = MARKS["vision_start_token_id"] + IMAGE + MARKS["vision_end_token_id"]
    words = CORPUS.split()[:26]
    jobs = []
    for _ in range(count):
        chosen = rng.sample(pictures, rng.choice((0, 1, 1, 1, 2)))
        texts = [" ".join(rng.choices(words, k=rng.choice((0, 3, 12)))) for _ in chosen]
        if rng.random() < 0.4:
            chosen, texts = pictures[2 : 2 + len(chosen)], ["" for _ in chosen]
        prompt = "".join(t + image for t in texts) + " ".join(rng.choices(words, k=rng.choice((2, 9))))
        read = processor(text=[prompt], images=chosen or None, return_tensors="pt")
        params = {
            "temperature": 0,
            "max_new_tokens": rng.choice((5, 13, 40)),
            "ignore_eos": rng.random() < 0.5,
        }
        sent = {"input_ids": None, "text": prompt, "image_data": [as_url(p) for p in chosen]}
        job = Job(tuple(read.input_ids[0].tolist()), params, rng.random(), extra=sent if chosen else {})
        jobs.append((job, {name: read[name] for name in ("pixel_values", "image_grid_thw") if chosen}))
    return jobs


def reading(model: Any, seen: dict[str, Any]) -> Callable[[torch.Tensor], Any]:
    """``model`` with what it is given besides tokens."""

    def read(ids: torch.Tensor) -> Any:
        return model(ids, mm_token_type_ids=(ids == model.config.image_token_id).int(), **seen)

    return read if seen else partial(model)
