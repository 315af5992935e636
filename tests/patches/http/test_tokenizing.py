"""The server's tokenizer refuses what would hold up everybody, and is otherwise what it was."""

from __future__ import annotations

import asyncio
import functools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.openai import serving_rerank
from sglang.srt.entrypoints.openai.parallel_prompt_encode import _build_plan
from sglang.srt.entrypoints.openai.protocol import V1RerankReqInput
from transformers import AutoTokenizer

from adaserve.boundary import RequestError
from adaserve.pair.folders import weights_folder
from adaserve.patches.http.tokenizing import (
    _between_others,
    _compiling_once,
    _few_documents,
    _few_items,
    _few_questions,
    guard,
)

CONTEXT = 100
CHAT = [{"role": "user", "content": "def main():"}]
TEXTS = ["", "def main(argv):\n    return 1\n", "é\U0001f600 " * 30]


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(weights_folder() / "target")


@pytest.fixture(autouse=True)
def serving(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    given = SimpleNamespace(default_chat_template_kwargs=None, trust_request_chat_template=False)
    monkeypatch.setattr("sglang.srt.runtime_context.get_serving", lambda: given)
    return given


@pytest.fixture(scope="module")
def guarded() -> Any:
    made = tokenizer()
    guard(made, CONTEXT)
    return made


def test_tokens_are_the_same(guarded: Any) -> None:
    plain = tokenizer()
    assert guarded(TEXTS)["input_ids"] == plain(TEXTS)["input_ids"]
    assert [guarded.encode(text) for text in TEXTS] == [plain.encode(text) for text in TEXTS]
    for tokenize in (False, True):
        ask = dict(tokenize=tokenize, add_generation_prompt=True, return_dict=False)
        assert guarded.apply_chat_template(CHAT, **ask) == plain.apply_chat_template(CHAT, **ask)
    assert (_build_plan(guarded) is None) == (_build_plan(plain) is None), (
        "SGLang's parallel encoding is lost"
    )


@pytest.mark.parametrize("tokenize", [False, True])
def test_what_cannot_fit_is_refused(guarded: Any, tokenize: bool) -> None:
    long = "def main(argv):\n" * 10_000
    for read in (guarded, guarded.encode, lambda text: guarded(["a", text])):
        with pytest.raises(RequestError, match="longer than the model's context length"):
            read(long)
    with pytest.raises(RequestError, match="longer than the model's context length"):
        guarded.apply_chat_template([{"role": "user", "content": long}], tokenize=tokenize)


def test_a_server_that_truncates_takes_any_length() -> None:
    made = tokenizer()
    guard(made, None)
    assert len(made.encode("def main(argv):\n" * 1000)) > CONTEXT


def test_a_client_brings_no_template_unless_it_may(guarded: Any, serving: SimpleNamespace) -> None:
    ask = dict(tokenize=False, chat_template="x")
    with pytest.raises(RequestError, match="chat_template is refused"):
        guarded.apply_chat_template(CHAT, **ask)
    serving.default_chat_template_kwargs = {"chat_template": "x"}
    assert guarded.apply_chat_template(CHAT, **ask) == "x"
    serving.default_chat_template_kwargs, serving.trust_request_chat_template = None, True
    assert guarded.apply_chat_template(CHAT, **ask) == "x"


def test_a_client_says_nothing_about_rendering(guarded: Any) -> None:
    with pytest.raises(RequestError, match="may not hold max_length, padding"):
        guarded.apply_chat_template(CHAT, tokenize=True, padding="max_length", max_length=10**9)


def test_a_score_makes_so_many_prompts() -> None:
    _few_items(None, "a" * 1000, ["b"] * 4000)
    for query, items in (("a" * 10_000_000, ["b"] * 1000), ([5] * 2000, [[6]] * 4000), ("a", ["b"] * 5000)):
        with pytest.raises(RequestError, match="send it in parts"):
            _few_items(None, query, items)


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"query": "a" * 1000, "documents": ["b" * 20] * 4000}, False),
        ({"query": "a", "documents": ["b"] * 4097}, True),
        ({"query": "a" * 10_000, "documents": ["b"] * 500}, True),
        ({"query": "a", "instruct": "c" * 10_000, "documents": ["b"] * 500}, True),
        ({"query": "a", "documents": ["b" * 10_000] * 500}, True),
        ({"query": [{"type": "text", "text": "a" * 10_000}], "documents": ["b"] * 500}, True),
        ({"query": "a", "documents": [[{"type": "text", "text": "b" * 10_000}]] * 500}, True),
    ],
)  # fmt: skip
def test_documents_are_few(fields: dict[str, Any], refused: bool) -> None:
    with pytest.raises(RequestError, match="documents: a request may become") if refused else nullcontext():
        _few_documents(None, V1RerankReqInput(**fields))


def test_a_template_is_compiled_once_for_all_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a millisecond, in the HTTP event loop."""
    kept = functools.partial(_compiling_once, serving_rerank._get_jinja_env)
    monkeypatch.setattr(serving_rerank, "_get_jinja_env", kept)
    compiled = kept().compile

    def compile_once(*given: Any, **more: Any) -> Any:
        monkeypatch.setattr(kept(), "compile", None)
        return compiled(*given, **more)

    monkeypatch.setattr(kept(), "compile", compile_once)
    template = "{{ messages[0].content }}/{{ messages[1].content }}/{{ instruct | default('none') }}"
    render = functools.partial(serving_rerank._render_jinja_chat_template, template, query="a", instruct=None)
    assert [render(document=text) for text in ("b", "c")] == ["a/b/none", "a/c/none"]


def test_questions_about_a_long_input_are_few() -> None:
    async def collect(questions: Any) -> list[Any]:
        return list(questions)

    def ask(count: int, tokens: int) -> list[Any]:
        return asyncio.run(_few_questions(collect, iter([([5] * tokens, [6], [])] * count)))

    assert len(ask(100, 8000)) == 100
    with pytest.raises(RequestError, match="questions"):
        ask(600, 8000)


@pytest.mark.parametrize("limit", [CONTEXT, None])
def test_a_long_text_takes_no_others_with_it(limit: int | None) -> None:
    """SGLang can tokenize the texts of several requests together; one that fails fails all."""
    made = tokenizer()
    guard(made, limit)
    together: list[str] = []

    async def tokenize(manager: Any, text: str) -> None:
        together.append(text)

    async def ask() -> list[Any]:
        manager = SimpleNamespace(tokenizer=made, async_dynamic_batch_tokenizer=object())
        texts = ("a", "def main(argv):\n" * 10_000, "b")
        asked = (_between_others(tokenize, manager, text) for text in texts)
        return await asyncio.gather(*asked, return_exceptions=True)

    refused = [isinstance(answer, RequestError) for answer in asyncio.run(ask())]
    assert refused == [False, limit is not None, False]
    assert len(together) == 3 - sum(refused)
