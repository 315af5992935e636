"""What a client's texts may cost before they are a request: SGLang tokenizes them in its HTTP event loop.

Why: a body of 8 MB keeps the loop for 7 to 18 s, on every route that takes text, and meanwhile nobody gets a
token, and ``/health`` no answer. So the server's tokenizer looks at the beginning of a long text first
(``adaserve/boundary/prompts.py``), the prompts of a batch let others in between, and requests that hand over
many texts at once are limited. For ``/v1/rerank`` SGLang renders a template with each document in one go, and
compiles it anew each time: 65,000 documents of a letter, which fit into a body, took a minute.

The same tokenizer renders chat templates. SGLang refuses templates of clients, which can loop for ever, but
not on ``/v1/responses`` and ``/v1/decisions``; and nowhere other arguments of the renderer, which allocate
what they say. Here both are refused where everything meets.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.boundary import RequestError
from adaserve.boundary.prompts import require_few, require_few_scored, require_fitting
from adaserve.patches import hook

OF_THE_RENDERER = frozenset(
    (
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    )
)
"""Arguments of ``apply_chat_template`` that no template reads, and SGLang never gives."""

_CHECK = "_adaserve_check"
"""A method of a guarded tokenizer: raises RequestError for a text that is too long."""


def register() -> None:
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    hook(f"{manager}.init_tokenizer_and_processor", _guard_tokenizer, HookType.AFTER)
    hook(f"{manager}._tokenize_texts", _between_others, HookType.AROUND)
    score = "sglang.srt.managers.tokenizer_manager_score_mixin.TokenizerManagerScoreMixin"
    hook(f"{score}.score_request", _few_items, HookType.BEFORE)
    decisions = "sglang.srt.entrypoints.openai.serving_decisions._encode_all"
    hook(decisions, _few_questions, HookType.AROUND)
    rerank = "sglang.srt.entrypoints.openai.serving_rerank"
    hook(f"{rerank}.OpenAIServingRerank._validate_request", _few_documents, HookType.BEFORE)
    hook(f"{rerank}._get_jinja_env", _compiling_once, HookType.AROUND)
    tokenize = "sglang.srt.entrypoints.openai.serving_tokenize.OpenAIServingTokenize"
    hook(f"{tokenize}._handle_non_streaming_request", _few_prompts, HookType.AROUND)


def _guard_tokenizer(_: None, manager: Any) -> None:
    if hasattr(manager.tokenizer, "_encode_plus"):
        guard(manager.tokenizer, None if manager.allow_auto_truncate else manager.model_config.context_len)


def guard(tokenizer: Any, context: int | None) -> None:
    """Makes a tokenizer of Transformers refuse what is too long for ``context`` tokens (None: nothing is)
    and what a client may not say about rendering: it raises RequestError."""
    cls = type(tokenizer)
    encode, render = cls._encode_plus, cls.apply_chat_template

    def check(self: Any, text: Any) -> None:
        if context is None:
            return
        for one in _texts(text):
            require_fitting(one, context, lambda part: len(encode(self, part)["input_ids"]))

    @functools.wraps(encode)  # SGLang encodes in parallel where it knows the method's module
    def encode_plus(self: Any, text: Any, *rest: Any, **more: Any) -> Any:
        check(self, text)
        return encode(self, text, *rest, **more)

    @functools.wraps(render)
    def apply_chat_template(self: Any, conversation: Any, *rest: Any, **more: Any) -> Any:
        _refuse_arguments(more)
        rendered = render(self, conversation, *rest, **more)
        check(self, rendered)
        return rendered

    methods = {"_encode_plus": encode_plus, "apply_chat_template": apply_chat_template, _CHECK: check}
    tokenizer.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, **methods})


def _texts(value: Any) -> Iterator[str]:
    """The texts in what a tokenizer is given; rendered chats may be token ids already."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value if value and isinstance(value[0], str | list | tuple) else ():
            yield from _texts(item)


def _refuse_arguments(given: dict[str, Any]) -> None:
    from sglang.srt.runtime_context import get_serving

    if wrong := OF_THE_RENDERER & given.keys():
        raise RequestError(f"chat_template_kwargs may not hold {', '.join(sorted(wrong))}")
    template, serving = given.get("chat_template"), get_serving()
    ours = (serving.default_chat_template_kwargs or {}).get("chat_template")
    if template not in (None, ours) and not serving.trust_request_chat_template:
        raise RequestError("chat_template is refused: this server renders chats by its own template")


async def _between_others(
    original: Callable[..., Awaitable[Any]], self: Any, texts: Any, *args: Any, **more: Any
) -> Any:
    """With --enable-dynamic-batch-tokenizer a text may be tokenized together with those of other requests,
    and they would all be refused if it is too long."""
    await asyncio.sleep(0)
    if self.async_dynamic_batch_tokenizer is not None:
        getattr(self.tokenizer, _CHECK, lambda _: None)(texts)
    return await original(self, texts, *args, **more)


def _few_items(self: Any, query: Any = None, items: Any = None, *_: Any, **__: Any) -> None:
    if isinstance(items, list):
        size = len(query or ()) * len(items) + sum(
            len(item) for item in items if isinstance(item, str | list)
        )
        require_few_scored("items", len(items), size)


def _few_documents(_: Any, request: Any) -> None:
    """``request``: of ``/v1/rerank``; query and instruction are rendered with each document."""
    repeated = len(request.instruct or "") + _characters(request.query)
    size = repeated * len(request.documents) + sum(map(_characters, request.documents))
    require_few_scored("documents", len(request.documents), size)


def _characters(content: Any) -> int:
    """Of a text, or of the texts among other parts."""
    return len(content) if isinstance(content, str) else sum(len(getattr(p, "text", "")) for p in content)


@functools.cache
def _compiling_once(original: Callable[[], Any]) -> Any:
    environment = original()
    environment.from_string = functools.lru_cache(maxsize=1)(environment.from_string)
    return environment


async def _few_questions(original: Callable[..., Awaitable[Any]], encoded: Iterator[Any]) -> Any:
    """Each question is asked about the whole input, which is rendered and tokenized again."""

    def few() -> Iterator[Any]:
        size = 0
        for count, question in enumerate(encoded, start=1):
            size += len(question[0])
            require_few_scored("questions", count, size)
            yield question

    return await original(few())


async def _few_prompts(
    original: Callable[..., Awaitable[Any]], self: Any, adapted: Any, request: Any, raw_request: Any
) -> Any:
    manager = self.tokenizer_manager
    if isinstance(request.prompt, list):
        try:
            require_few("prompt", request.prompt, manager.model_config.context_len)
        except RequestError as error:
            return self.create_error_response(str(error))
    return await original(self, adapted, request, raw_request)
