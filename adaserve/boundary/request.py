"""The fields of a generation request beside its sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from adaserve.boundary.errors import RequestError, shown
from adaserve.boundary.grammar_check_budget import GrammarBudget
from adaserve.boundary.limits import (
    INT32_MAX,
    INT64_MAX,
    MAX_BATCH,
    MAX_COPIES_BYTES,
    MAX_LOGPROBS,
    MAX_PROMPT_LOGPROBS,
    MAX_PROMPT_TOKENS,
    MAX_REPEATED_LOGPROBS,
    MAX_TOP_LOGPROBS,
    Limits,
)
from adaserve.boundary.sampling import check_sampling, custom_params, watermark
from adaserve.boundary.values import (
    Check,
    absent,
    finite,
    flag,
    identifier,
    integer,
    is_integer,
    known_fields,
    label,
    mapping,
    require_encodable,
    size_bytes,
    text,
    token_ids,
)

_lora = absent("LoRA adapters are not served by ADASERVE")
_internal = absent("it is internal to SGLang")
_positions = absent("ADASERVE reads logits at generated positions only")


def media(name: str, value: Any, limits: Limits) -> None:
    """Images, audio and video, for a model that takes them; lists of nothing pass."""
    if not limits.takes_media and _holds_something(value):
        raise RequestError(f"{name} is refused: this model takes text only")


def _holds_something(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_something, value))
    return value is not None


def prompt_text(name: str, value: Any, _: Limits) -> None:
    """Text that can be encoded. Whether it holds a token only the tokenizer knows."""
    if not isinstance(value, str):
        raise RequestError(f"{name} must be text, got {shown(value)}")
    require_encodable(name, value)


def top_logprobs_num(name: str, value: Any, limits: Limits) -> None:
    """As many as the vocabulary has, and not more than an answer should hold."""
    integer(0, min(limits.vocab_size, MAX_TOP_LOGPROBS))(name, value, limits)


def hidden_states(name: str, value: Any, _: Limits) -> None:
    """false. SGLang would tell the client of a flag that ADASERVE refuses."""
    if value is not False:
        raise RequestError(f"{name} must be false: ADASERVE returns none, got {shown(value)}")


def session_params(name: str, value: Any, limits: Limits) -> None:
    """Which turn of which session is continued; an empty object stands for none. Only a session may be given
    an empty prompt, and SGLang serves an object without an id as if there were no session."""
    known_fields(name, value, limits, _SESSION)
    if value and value.get("id") is None:
        raise RequestError(f"{name}.id must name the session that is continued, got none")


def custom_labels(name: str, value: Any, limits: Limits) -> None:
    """Labels of the request's metrics, by names that the server's metrics have."""
    mapping(name, value, limits)
    for key, item in value.items():
        if key not in limits.labels:
            known = ", ".join(sorted(limits.labels)) or "none (see --tokenizer-metrics-allowed-custom-labels)"
            raise RequestError(f"{name} has no label {shown(key)} on this server; it knows {known}")
        label(f"{name}.{key}", item, limits)


_SESSION: dict[str, Check] = {
    "id": identifier,
    "rid": label,
    "offset": integer(-INT32_MAX - 1),
    "replace": flag,
    "drop_previous_output": flag,
}

EACH: dict[str, Check] = {
    "text": prompt_text,
    "sampling_params": check_sampling,
    "rid": identifier,
    "return_logprob": flag,
    "logprob_start_len": integer(-1),
    "top_logprobs_num": top_logprobs_num,
    "return_hidden_states": hidden_states,
    "return_sampling_mask": flag,
    "sampling_logprobs_mode": label,
    "custom_logit_processor": text(1 << 20),
    "lora_path": _lora,
    "lora_id": _lora,
    "extra_key": label,
    "cache_salt": label,
    "bootstrap_host": label,
    "bootstrap_port": integer(0, 65535),
    "bootstrap_room": integer(0, INT64_MAX),
    "bootstrap_pair_key": label,
    "decode_tp_size": integer(1),
    "kv_hints": absent("the hierarchical cache, which reads them, is not used"),
    "watermark": watermark,
}
"""Fields with one value for the request, or a list with one for each of its prompts."""

_MEDIA = ("image_data", "video_data", "audio_data")
OF_MEDIA = (*_MEDIA, "modalities", "mm_hashes", "mm_content_hashes")
"""What a model of text has no use for. SGLang trusts the lengths even of lists that hold nothing. Those
that are not ``_MEDIA`` it checks itself."""

WHOLE: dict[str, Check] = {
    "input_embeds": absent("ADASERVE needs tokens, which the draft model reads too"),
    **dict.fromkeys(_MEDIA, media),
    "session_params": session_params,
    "session_id": identifier,
    "stream": flag,
    "log_metrics": flag,
    "no_logs": flag,
    "background": flag,
    "require_reasoning": flag,
    "return_text_in_logprobs": flag,
    "return_flat_raw_top_logprobs": flag,
    "return_flat_raw_output_top_logprobs": flag,
    "return_flat_raw_top_logprobs_b64": flag,
    "return_routed_experts": flag,
    "return_indexer_topk": flag,
    "return_bytes": flag,
    "return_entropy": flag,
    "return_prompt_token_ids": flag,
    "use_audio_in_video": flag,
    "routed_experts_start_len": integer(0),
    "max_thinking_tokens": integer(0),
    "priority": integer(-INT32_MAX - 1),
    "routed_dp_rank": integer(0),
    "data_parallel_rank": integer(0),
    "disagg_prefill_dp_rank": integer(0),
    "routing_key": label,
    "conversation_id": label,
    "received_time": finite,
    "external_trace_header": mapping,
    "custom_labels": custom_labels,
    "mm_processor_kwargs": custom_params,
    "images_config": custom_params,
    "video_config": custom_params,
    "max_dynamic_patch": integer(0),
    "min_dynamic_patch": integer(0),
    "image_max_dynamic_patch": integer(0),
    "video_max_dynamic_patch": integer(0),
    "positional_embed_overrides": _internal,
    "http_worker_ipc": _internal,
    "need_wait_for_mm_inputs": _internal,
    "num_items_assigned": _internal,
    "encoder_urls": _internal,
    "multi_item_delimiter_indices": _positions,
    "token_indices_to_pool": _positions,
}
"""Fields with one value for the whole request."""


def check_request(fields: Mapping[str, Any], limits: Limits) -> None:
    """Raises RequestError for the first field that SGLang, the worker or a kernel could not take.

    ``fields``: of SGLang's ``GenerateReqInput``, before it is normalized. Missing and None mean unset.
    """
    limits = replace(limits, grammar_budget=GrammarBudget())
    count = _prompt_count(fields, limits)
    for name, check in EACH.items():
        value = fields.get(name)
        if isinstance(value, list | tuple):
            if count is None:
                raise RequestError(f"{name} must be one value for one prompt, got {shown(value)}")
            if len(value) != count:
                raise RequestError(f"{name} must have {count} entries, one for each prompt, got {len(value)}")
            for i, item in enumerate(value):
                if item is not None:
                    check(f"{name}[{i}]", item, limits)
        elif value is not None:
            check(name, value, limits)
    _check_token_ids_logprob(fields.get("token_ids_logprob"), count, limits)
    for name, check in WHOLE.items():
        value = fields.get(name)
        if value is not None:
            check(name, value, limits)
    _require_few_answers(fields, count or 1)


def check_prompt(tokens: int, logprob_start_len: int | None, continues: bool) -> None:
    """What only the tokenized prompt shows. ``continues``: a session adds its history to it."""
    if tokens == 0 and not continues:
        raise RequestError("the prompt must hold at least 1 token, got none")
    if logprob_start_len is not None and logprob_start_len > tokens and not continues:
        raise RequestError(
            f"logprob_start_len must be from -1 to {tokens}, the prompt's tokens, got {logprob_start_len}"
        )


def check_logprobs(
    prompt: int, new: int, each: int, *, repeated: bool = False, after_others: bool = False
) -> int:
    """Log probabilities that an answer holds: at positions of the prompt whose log probabilities are asked
    for and at tokens that may be generated, ``each`` of them. ``repeated``: every output of it holds those
    before it. ``after_others``: the prompt continues a session and counts as the whole context.

    Raises RequestError."""
    total = (prompt + new) * each
    of_prompt = "a session's prompt, which counts as the whole context," if after_others else "the prompt,"
    if repeated and total > MAX_REPEATED_LOGPROBS:
        raise RequestError(
            "each output of this stream repeats all log probabilities, so prompt and answer may have at most "
            f"{MAX_REPEATED_LOGPROBS}, got {each} at each of {prompt + new} tokens; more are possible "
            "without stream, on /v1, and on a server with --incremental-streaming-output"
        )
    for what, positions, most in (
        (f"{of_prompt} from logprob_start_len on,", prompt, MAX_PROMPT_LOGPROBS),
        ("what may be generated, up to max_new_tokens,", new, MAX_LOGPROBS),
    ):
        if positions * each > most:
            raise RequestError(
                f"{what} may have at most {most} log probabilities, got {each} at each of {positions} tokens"
            )
    return total


def check_all_prompts(total: int) -> None:
    """Checks the prompt tokens of all answers of a request. Raises RequestError."""
    if total > MAX_PROMPT_TOKENS:
        raise RequestError(
            f"the prompts of all answers of a request, its prompts times n, may have at most "
            f"{MAX_PROMPT_TOKENS} tokens together, got {total}: send it in parts"
        )


def check_all_logprobs(total: int) -> None:
    """Checks the log probabilities of all answers of a request, which are kept until the last answer is done.
    Raises RequestError."""
    if total > MAX_LOGPROBS:
        raise RequestError(
            f"all answers of a request, its prompts times n, may have at most {MAX_LOGPROBS} log "
            f"probabilities together, got {total}: send it in parts, or give a max_new_tokens"
        )


def _prompt_count(fields: Mapping[str, Any], limits: Limits) -> int | None:
    """Prompts of a batch; None for a single prompt, and for one whose shape SGLang will refuse."""
    prompts, ids = fields.get("text"), fields.get("input_ids")
    if ids is not None:
        nested = _check_ids(ids, limits, bool(fields.get("session_params")))
        if prompts is None:
            return len(ids) if nested else None
        if nested != isinstance(prompts, list | tuple) or (nested and len(ids) != len(prompts)):
            raise RequestError("text and input_ids must hold as many prompts; give one of them")
    if isinstance(prompts, list | tuple):
        if not prompts:
            raise RequestError("text must hold at least 1 prompt, got an empty list")
        if None in prompts:
            raise RequestError(f"text[{list(prompts).index(None)}] must be text, got None")
        return len(prompts)
    return None


def _require_few_answers(fields: Mapping[str, Any], prompts: int) -> None:
    """SGLang makes each answer a request of its own, with a copy of every field. Raises RequestError."""
    samples = _samples(fields.get("sampling_params"))
    if (answers := prompts * samples) > MAX_BATCH:
        raise RequestError(
            f"a request may ask for at most {MAX_BATCH} answers, its prompts times n, got {shown(answers)}"
        )
    for name in (name for name in EACH if name != "text"):
        value = fields.get(name)
        copies = samples if isinstance(value, list | tuple) else answers
        if (size := copies * size_bytes(value)) > MAX_COPIES_BYTES:
            raise RequestError(
                f"{name} may have at most {MAX_COPIES_BYTES} bytes in all answers of a request, its prompts "
                f"times n, got about {size}: ask for fewer answers at a time"
            )


def _samples(params: Any) -> int:
    """The largest ``n`` of any prompt."""
    each = params if isinstance(params, list | tuple) else [params]
    asked = [p.get("n") for p in each if isinstance(p, Mapping)]
    return max([1, *(n for n in asked if isinstance(n, int))])  # true is refused, and counts as 1


def _check_ids(ids: Any, limits: Limits, continues: bool) -> bool:
    """Whether ``input_ids`` is a batch. Raises RequestError."""
    if not isinstance(ids, list | tuple):
        raise RequestError(f"input_ids must be a list of token ids, got {shown(ids)}")
    if not ids and not continues:
        raise RequestError("input_ids must hold at least 1 token id, got an empty list")
    nested = bool(ids) and isinstance(ids[0], list | tuple)
    if not nested:
        token_ids("input_ids", ids, limits)
        return False
    for i, prompt in enumerate(ids):
        token_ids(f"input_ids[{i}]", prompt, limits)
        if not prompt and not continues:
            raise RequestError(f"input_ids[{i}] must hold at least 1 token id, got an empty list")
    return True


def _check_token_ids_logprob(value: Any, count: int | None, limits: Limits) -> None:
    """One id, a list for every prompt, or one list for each prompt of a batch."""
    if value is None:
        return
    if is_integer(value):
        value = [value]

    def check(name: str, ids: Any) -> None:
        token_ids(name, ids, limits)
        if len(ids) > MAX_TOP_LOGPROBS:
            raise RequestError(f"{name} takes at most {MAX_TOP_LOGPROBS} token ids, got {len(ids)}")

    if isinstance(value, list | tuple) and any(isinstance(item, list | tuple) for item in value):
        if len(value) != count:
            raise RequestError(
                f"token_ids_logprob must be a list of token ids, or {count or 1} such lists, "
                f"one for each prompt, got {len(value)}"
            )
        for i, ids in enumerate(value):
            if ids is not None:
                check(f"token_ids_logprob[{i}]", ids)
    else:
        check("token_ids_logprob", value)
