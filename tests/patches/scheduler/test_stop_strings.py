"""Where a request ends does not depend on how many tokens come at once."""

from __future__ import annotations

import random
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from adaserve.pair.folders import weights_folder
from adaserve.pair.vocabulary import EOS_ID
from adaserve.patches.scheduler.stop_strings import _check, _ended, longest_match

pytestmark = pytest.mark.usefixtures("ours")

TEXT = "def __repr__(self):\n        return self.name\n\nclass Fox(Dog):\n    def run(self, far): # back\n"
STOPS = ("self", "return", "\n\n", ":", "class", "name\n", "far)", "(", "no such text")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return get_tokenizer(str(weights_folder() / "target"))


def ended(tokenizer: Any, tokens: list[int], sizes: list[int], **params: Any) -> tuple[Any, ...]:
    """How and where a request ends whose tokens come in portions."""
    sampling = SamplingParams(max_new_tokens=len(tokens), **params)
    sampling.normalize(tokenizer)
    req = Req("r", "a", [5], sampling)
    req.tokenizer, req.eos_token_ids = tokenizer, {EOS_ID}
    original = Req._check_str_based_finish
    at = 0
    for size in sizes:
        portion = tokens[at : at + size]
        req.output_ids.extend(portion)
        at += size
        # What the hook does inside of update_finish_state.
        req._check_str_based_finish = lambda n, req=req: _check(original, req, n)
        req.update_finish_state(len(portion))
        vars(req).pop("_check_str_based_finish", None)
        assert len(req.output_ids) == at
        if req.finished():
            return req.finished_reason.to_json(), list(req.output_ids_through_stop)
    return None, list(req.output_ids)


def reasoned(tokenizer: Any, tokens: list[int], sizes: list[int], end: list[int]) -> tuple[int, int]:
    """Tokens of a stopped request that reasons up to ``end``, and how many of them reason."""
    sampling = SamplingParams(max_new_tokens=len(tokens), stop=["far"])
    sampling.normalize(tokenizer)
    req = Req("r", "a", [5], sampling)
    req.tokenizer, req.eos_token_ids = tokenizer, {EOS_ID}
    at = 0
    while not req.finished():  # as SGLang's processor of results
        portion = tokens[at : at + sizes.pop(0)]
        at += len(portion)
        req.output_ids.extend(portion)
        req.update_reasoning_tokens(portion, end)
        req.update_finish_state(len(portion))
        _ended(None, req, len(portion))
    return len(req.output_ids_through_stop), req.reasoning_tokens


def portions(total: int, rng: random.Random) -> list[int]:
    sizes: list[int] = []
    while sum(sizes) < total:
        sizes.append(min(rng.randrange(1, 7), total - sum(sizes)))
    return sizes


@pytest.mark.parametrize("seed", range(60))
def test_portions_change_nothing(tokenizer: Any, seed: int) -> None:
    rng = random.Random(seed)
    tokens = list(tokenizer.encode(TEXT, add_special_tokens=False))
    if rng.random() < 0.4:
        tokens.insert(rng.randrange(len(tokens)), EOS_ID)
    params: dict[str, Any] = {
        "stop": rng.sample(STOPS, rng.randrange(1, 4)),
        "ignore_eos": rng.random() < 0.3,
    }
    if rng.random() < 0.3:
        params["stop_regex"] = ["[A-Z][a-z]{1,2}", "ba.k$"]
    right = ended(tokenizer, tokens, [1] * len(tokens), **params)
    assert right[0] is not None
    for _ in range(5):
        assert ended(tokenizer, tokens, portions(len(tokens), rng), **params) == right
    assert ended(tokenizer, tokens, [len(tokens)], **params) == right


def test_the_first_stop_of_the_text_counts_and_not_of_the_list(tokenizer: Any) -> None:
    tokens = list(tokenizer.encode(TEXT, add_special_tokens=False))
    reason, kept = ended(tokenizer, tokens, [len(tokens)], stop=["return", "self"])
    assert reason["matched"] == "self" and tokenizer.decode(kept) == "def __repr__(self"


def test_an_end_token_before_a_stop_string_counts(tokenizer: Any) -> None:
    tokens = [*tokenizer.encode("a fox", add_special_tokens=False), EOS_ID, *tokenizer.encode(TEXT)]
    reason, kept = ended(tokenizer, tokens, [len(tokens)], stop=["return"])
    assert reason["matched"] == EOS_ID and kept[-1] == EOS_ID


@pytest.mark.parametrize(
    ("expression", "characters"), [("abc", 3), ("[^z]", 1), ("[^z]{2,5}x", 6), ("(ab|c)?$", 2), ("a{3}+", 3)]
)
def test_no_more_of_the_answer_is_searched_than_can_match(expression: str, characters: int) -> None:
    assert longest_match(expression) == characters


@pytest.mark.parametrize("end", ["class", "back", "no such text"])
@pytest.mark.parametrize("seed", range(10))
def test_reasoning_behind_the_stop_is_not_counted(tokenizer: Any, seed: int, end: str) -> None:
    rng = random.Random(seed)
    tokens = list(tokenizer.encode(TEXT, add_special_tokens=False))
    mark = list(tokenizer.encode(end, add_special_tokens=False))
    right = reasoned(tokenizer, tokens, [1] * len(tokens), mark)
    assert right[1] <= right[0] < len(tokens)
    for sizes in (portions(len(tokens), rng), [len(tokens)]):
        assert reasoned(tokenizer, tokens, sizes, mark) == right


@pytest.mark.parametrize(("stop", "kept"), [("self", "def __repr__(self"), ("no such text", TEXT)])
def test_an_aborted_answer_has_nothing_behind_its_stop(tokenizer: Any, stop: str, kept: str) -> None:
    tokens = list(tokenizer.encode(TEXT, add_special_tokens=False))
    sampling = SamplingParams(max_new_tokens=2 * len(tokens), stop=[stop])
    sampling.normalize(tokenizer)
    req = Req("r", "a", [5], sampling)
    req.tokenizer, req.eos_token_ids = tokenizer, {EOS_ID}
    req.output_ids.extend(tokens)
    req.to_finish = FINISH_ABORT()
    req.update_finish_state(len(tokens))
    _ended(None, req, len(tokens))
    assert req.finished_reason.to_json()["type"] == "abort"
    assert tokenizer.decode(req.output_ids_through_stop) == kept
