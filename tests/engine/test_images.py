"""Images in prompts of a model with M-RoPE: the text is the target's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adaserve.host.device import DEVICE_PATH_ENV
from tests.engine.conftest import ALONE, RESTLESS, TIGHT, TREES, Served, adaserve_server, audited
from tests.engine.harness import Zygote, run_jobs
from tests.engine.images import IMAGE, MARKS, image_jobs, reading, save_reader
from tests.engine.test_heads import assert_best

WAYS = {
    "cpu": {"drafts": "model,suffix", "suffix_scope": "key"},  # the draft does not see images
    "device": ALONE,
}


@pytest.fixture(scope="module", params=WAYS)
def reader(
    request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Path, Served]]:
    """A target that reads images, in chunks shorter than most images: as on a CPU, or as on GPUs."""
    way = str(request.param)
    folder = tmp_path_factory.mktemp("reader")
    torch.set_num_threads(1)
    model = save_reader(folder)
    server, probe = adaserve_server(
        folder, folder, "noisy" if way == "cpu" else None, {**TREES, **WAYS[way]},
        {**RESTLESS, "retract_every": 12, "audit_every": 1 << 30}, overlap=way == "device",
        **{**TIGHT, "max-total-tokens": 700, "chunked-prefill-size": 48},
    )  # fmt: skip
    if way == "device":
        server.environment[DEVICE_PATH_ENV] = "1"
    for served in audited(zygote, way, server, probe):
        yield model, folder / "target", served


def test_greedy_is_the_target_alone(reader: tuple[Any, Path, Served]) -> None:
    model, folder, served = reader
    jobs, told = image_jobs(30, folder, seed=3), []
    for _ in range(2):  # the second time earlier answers are proposed where that is asked for
        answers = run_jobs(served.server, [job for job, _ in jobs])
        for (job, seen), answer in zip(jobs, answers, strict=True):
            assert_best(reading(model, seen), [job], [answer])
            assert answer is not None and answer["meta_info"]["prompt_tokens"] == len(job.input_ids)
            told.append(answer["meta_info"])
    assert sum(each["num_retractions"] for each in told) > 1
    assert sum(each["cached_tokens"] for each in told) > 100
    stats = served.probe.read()
    assert 1.3 < 1 + stats["accepted"] / stats["rows"] < 5, "drafts agree too rarely or too often"


def test_images_that_cannot_be_read_are_refused(reader: tuple[Any, Path, Served]) -> None:
    """A client that waits for ever is none the wiser."""
    _, folder, served = reader
    (job, _), *_ = (found for found in image_jobs(9, folder, seed=3) if found[0].extra)
    sent, mark = job.extra, MARKS["vision_start_token_id"] + IMAGE + MARKS["vision_end_token_id"]
    for wrong, told in (
        ({"text": sent["text"] + IMAGE}, "one placeholder for each"),
        ({"text": mark, "image_data": [str(folder / "none.png")]}, "cannot be read"),
        ({"text": mark, "image_data": ["data:image/png;base64,AAAA"]}, "IMAGE data at index 0"),
        ({"text": sent["text"] + mark}, "placeholders"),
        ({"text": MARKS["video_token_id"], "video_data": ["data:video/mp4;base64,AAAA"]}, "with a GPU"),
    ):
        response = served.server.post("/generate", {**sent, **wrong}, timeout=10)
        assert response.status_code == 400 and told in response.text, response.text
