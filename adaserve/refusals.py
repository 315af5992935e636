"""Settings of SGLang that ADASERVE cannot serve, each with the flag to change."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from uvicorn.config import LOG_LEVELS

from adaserve.checkpoints.draft_kind import other_size, read_config
from adaserve.checkpoints.fingerprint import local_folder
from adaserve.config import AdaServeConfig, ConfigError
from adaserve.host.device import ATTENTION_BACKEND, NO_E4M3, on_device, reads_e4m3
from adaserve.pair.folders import PACKED_NAME, WEIGHTS_VARIABLE

CORES_ENV = "SGLANG_CPU_OMP_THREADS_BIND"
"""SGLang's: the cores of each rank on a CPU, such as 0-3|4-7; "all" counts as unset."""

_KEY = re.compile(r"[!-~]([ -~]*[!-~])?")
"""What a header can carry, and can be compared with."""

_TOKENIZER = re.compile(r"tok|tekken|vocab|merges|\.(model|py|gguf)$", re.IGNORECASE)
"""In names of files that make or hold a tokenizer, of whatever kind."""

Refusals = Iterator[tuple[bool, str]]
"""Whether something is asked for that is not served, and what to do about it."""


def refuse_unsupported(args: Any, config: AdaServeConfig) -> None:
    """Raises ConfigError with the remedy for a combination that ADASERVE cannot serve. ``args``: SGLang's
    ``ServerArgs``."""
    refusals = [
        *_of_drafts(args, config),
        *_of_vocabularies(args, config),
        *_of_contexts(args, config),
        *_of_packed(args, config),
        *_of_ranks(args, config),
        *_of_http(args),
        *_of_engine(args),
    ]
    refusals += _of_gpus(args) if on_device(args.device) else _of_cpus(args, config)
    for is_refused, reason in refusals:
        if is_refused:
            raise ConfigError(f"--speculative-algorithm ADASERVE: {reason}")


def _of_drafts(args: Any, config: AdaServeConfig) -> Refusals:
    path = args.speculative_draft_model_path
    yield (
        config.has_model and config.medusa is None and not path,
        "a draft model is missing: add --speculative-draft-model-path, or serve without one: "
        '--adaserve-drafts suffix, or ADASERVE_CONFIG=\'{"drafts": "suffix"}\' for sgl.Engine',
    )
    yield (
        not config.has_model and bool(path),
        f"drafts are {config.drafts}, so a draft model would not be used: remove "
        "--speculative-draft-model-path",
    )
    yield (
        config.medusa is not None and bool(path),
        "Medusa heads draft in place of a draft model: remove --speculative-draft-model-path",
    )
    yield (
        config.medusa is not None and args.tp_size > 1,
        "Medusa heads are not shared between ranks: use --tp-size 1",
    )
    yield (
        config.leaves_window,
        f"the policy {config.policy} chooses no draft window, so drafts would read everything: give "
        "--draft-window a number of recent tokens, or use --policy priced",
    )
    yield (
        config.learn and not _is_there(config.learn_device),
        f"there is no {config.learn_device} to train drafts on: give another --adaserve-learn-device",
    )
    asked, draft = args.speculative_draft_model_quantization, (path, args.speculative_draft_model_revision)
    yield (
        config.learn and bool(path) and _is_quantized([asked], draft),
        "a quantized draft does not learn: serve one in 16 bits (beside --quantization with "
        "--speculative-draft-model-quantization unquant), or leave --learn out",
    )


def _is_there(device: str) -> bool:
    return device == "cpu" or (torch.device(device).index or 0) < torch.cuda.device_count()


def _of_vocabularies(args: Any, config: AdaServeConfig) -> Refusals:
    """What checkpoints on this host say before they are loaded, which may take minutes. On a GPU a draft may
    have fewer tokens, as far as the target's tokenizer allows (``require_same_size``)."""
    target = _number("vocab_size", args.model_path, args.revision)
    for path, revision in _drafts(args, config):
        if target is not None and (size := _number("vocab_size", path, revision)) is not None:
            refused = size > target or (size < target and not on_device(args.device))
            yield refused, other_size(path, size, target)


def _of_contexts(args: Any, config: AdaServeConfig) -> Refusals:
    """As of vocabularies: SGLang says it in a traceback, once the target is loaded."""
    from sglang.srt.environ import envs

    longer = envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN
    served = args.context_length or _context(args, args.model_path, args.revision)
    if served is None or longer.get():
        return
    for path, revision in _drafts(args, config):
        if (own := _context(args, path, revision)) is not None:
            yield (
                own < served,
                f"the draft {path} is made for contexts of {own} tokens, and {served} are served: use "
                f"--context-length {own}, or set {longer.name}=1, with which drafts beyond that may be worse",
            )


def _of_packed(args: Any, config: AdaServeConfig) -> Refusals:
    """SGLang would take the 8-bit numbers for the weights, without their scales, and serve nonsense."""
    for path in (args.model_path, *(path for path, _ in _drafts(args, config))):
        yield (
            (Path(path) / PACKED_NAME).exists(),
            f"{path} holds 8-bit weights as AdaServe ships them: set {WEIGHTS_VARIABLE} to the folder of its "
            "pair and name no model, or give what was trained (docs/heads.md)",
        )


def _drafts(args: Any, config: AdaServeConfig) -> Iterator[tuple[str, str | None]]:
    """Draft models and their revisions."""
    first = args.speculative_draft_model_path, args.speculative_draft_model_revision
    for path, revision in (first, (config.second_draft, None)):
        if path:
            yield path, revision


def _context(args: Any, path: str, revision: str | None) -> int | None:
    """The longest context of the model at ``path``, by SGLang's rule; None where it isn't on this host."""
    from sglang.srt.utils import hf_transformers_utils as hub

    folder = local_folder(path, revision)
    if not read_config(Path(folder)):
        return None
    changes = json.loads(args.json_model_override_args)
    config = hub.get_config(folder, args.trust_remote_code, model_override_args=changes)
    return int(hub.get_context_length(hub.get_hf_text_config(config)))


def _number(name: str, path: str, revision: str | None) -> int | None:
    """What the config.json of the model at ``path`` says, if it is on this host."""
    config = _read(path, revision)
    number = config.get("text_config", config).get(name)
    return number if isinstance(number, int) else None


def _read(path: str, revision: str | None) -> dict[str, Any]:
    return read_config(Path(local_folder(path, revision)))


def _of_ranks(args: Any, config: AdaServeConfig) -> Refusals:
    yield (
        config.learn and args.dp_size * args.tp_size > 1,
        "drafts learn from the requests of a single rank: use --dp-size 1 and --tp-size 1, or leave --learn "
        "out",
    )
    for path, revision in _drafts(args, config):
        heads = _number("num_attention_heads", path, revision)
        yield (
            heads is not None and heads % args.tp_size > 0,
            f"the draft {path} has {heads} attention heads, which {args.tp_size} ranks cannot share: use a "
            "--tp-size that divides them, or another draft",
        )
    yield args.pp_size > 1, "pipeline parallelism is not supported: use --pp-size 1"
    yield (
        args.attn_dp_size > 1,  # SGLang makes this of --enable-dp-attention
        "data-parallel attention is not supported: remove --attn-dp-size and --enable-dp-attention",
    )
    yield (
        args.disaggregation_mode not in (None, "null"),
        "prefill/decode disaggregation is not supported: remove --disaggregation-mode",
    )


def _of_http(args: Any) -> Refusals:
    from sglang.srt.environ import envs

    yield (
        args.tokenizer_worker_num > 1 and bool(args.api_key or args.admin_api_key),
        "keys are checked by a single HTTP process only: remove --tokenizer-worker-num, or leave "
        "the keys to a proxy",
    )
    yield (
        not all(_KEY.fullmatch(key) for key in (args.api_key, args.admin_api_key) if key is not None),
        "keys must be ASCII text, not empty and without spaces at the ends: change --api-key and "
        "--admin-api-key, or leave them out",
    )
    yield (
        envs.SGLANG_RUST_SERVER.get(),
        "the Rust HTTP server bypasses the checks of requests and their SLOs: unset SGLANG_RUST_SERVER",
    )
    yield (
        bool(args.grpc_port or args.smg_grpc_mode or args.grpc_mode or envs.SGLANG_GRPC_PORT.get()),
        "requests over gRPC would be unchecked and without SLOs: remove --grpc-port, --grpc-mode and "
        "--smg-grpc-mode, and unset SGLANG_GRPC_PORT",
    )
    yield (
        envs.SGLANG_ENABLE_REQUEST_DECOMPRESSION.get(),
        "nothing limits what a compressed body may hold: unset SGLANG_ENABLE_REQUEST_DECOMPRESSION",
    )
    level = args.log_level_http or args.log_level
    yield (
        level.lower() not in LOG_LEVELS,
        f"the HTTP server has no log level {level}: give --log-level-http {', '.join(LOG_LEVELS)}",
    )


def _of_engine(args: Any) -> Refusals:
    yield (
        (args.page_size or 1) > 1,
        f"page size {args.page_size} is not supported: use --page-size 1, and no --attention-backend that "
        "needs larger pages, such as trtllm_mha",
    )
    yield (
        bool(args.enable_lora or args.lora_paths),
        "LoRA adapters are not supported: remove --enable-lora and --lora-paths",
    )
    path = args.tokenizer_path or args.model_path
    yield (
        not args.skip_tokenizer_init and not _may_have_tokenizer(path),
        f"{path} has no tokenizer: give --tokenizer-path, or --skip-tokenizer-init to serve token ids alone",
    )
    yield args.is_embedding, "embeddings are not served: remove --is-embedding"
    yield (
        args.enable_return_hidden_states,
        "hidden states are not returned: remove --enable-return-hidden-states and "
        "--return-hidden-states-mode",
    )
    yield (
        bool(args.reasoning_parser) and args.grammar_backend in ("llguidance", "outlines"),
        f"SGLang compiles no {args.grammar_backend} grammar behind a reasoning parser: use "
        "--grammar-backend xgrammar, or remove --reasoning-parser",
    )
    yield (
        args.enable_streaming_session,
        "streaming sessions keep the KV of candidates that were not accepted: remove "
        "--enable-streaming-session (ordinary sessions are served)",
    )
    yield (
        args.enable_hierarchical_cache,
        "the hierarchical cache is not supported: remove --enable-hierarchical-cache",
    )
    # With less than 1 a server hangs, or ends at its first request.
    names = ("max_prefill_tokens", "prefill_max_requests", "max_queued_requests", "decode_log_interval")
    for name in (*names, "watchdog_timeout"):
        value, flag = getattr(args, name), name.replace("_", "-")
        yield value is not None and value < 1, f"--{flag} {value} would serve nobody: give at least 1"


def _may_have_tokenizer(path: str) -> bool:
    """Whether SGLang may find one there: it says in a traceback that it has not. Names on a hub have one."""
    folder = Path(path)
    return not folder.is_dir() or any(_TOKENIZER.search(file.name) for file in folder.iterdir())


def _of_gpus(args: Any) -> Refusals:
    """What would be refused once all models are loaded."""
    kinds = args.kv_cache_dtype, args.speculative_draft_kv_cache_dtype
    yield "fp8_e4m3" in kinds and not reads_e4m3(), NO_E4M3
    yield (
        kinds[0] not in ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2"),
        f"a KV cache of {kinds[0]} is not supported: use --kv-cache-dtype auto, bf16, fp8_e4m3 or fp8_e5m2",
    )


def _of_cpus(args: Any, config: AdaServeConfig) -> Refusals:
    """What needs a GPU."""
    from sglang.srt.utils import cpu_has_amx_support, is_host_cpu_arm64

    asked = args.quantization, args.speculative_draft_model_quantization
    models = ((args.model_path, args.revision), *_drafts(args, config))
    yield (
        _is_quantized(asked, *models) and not (cpu_has_amx_support() or is_host_cpu_arm64()),
        "on CPUs SGLang reads quantized weights only with its kernels for AMX or Arm, which this host lacks: "
        "serve models in 16 or 32 bits, without --quantization and --speculative-draft-model-quantization",
    )
    yield args.tp_size > 1, "tensor parallelism is not supported on a CPU: use --tp-size 1"
    yield (
        args.dp_size > 1 and not _has_cores(args.dp_size),
        f"--dp-size {args.dp_size} on a CPU needs as many NUMA nodes, or cores for each rank: set "
        f"{CORES_ENV}, such as to 0-3|4-7, or start several servers (adaserve fleet up)",
    )
    backends = (args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend)
    yield (
        any(backend not in (None, ATTENTION_BACKEND) for backend in backends),
        "on a CPU only AdaServe's own attention reads trees: remove --attention-backend, "
        "--prefill-attention-backend and --decode-attention-backend",
    )
    yield (
        args.enable_memory_saver,
        "SGLang's memory saver needs a GPU: remove --enable-memory-saver",
    )
    yield (
        args.enable_forward_pass_metrics,
        "SGLang times its forwards on GPUs only: remove --enable-forward-pass-metrics",
    )
    yield (
        config.cpu_weights != "off" and bool(args.debug_tensor_dump_output_folder or args.forward_hooks),
        "AdaServe's kernels call no modules of the model, so hooks would see nothing: add "
        "--adaserve-cpu-weights off, or remove --debug-tensor-dump-output-folder and --forward-hooks",
    )
    yield (
        args.enable_strict_thinking,
        "strict thinking needs a GPU: remove --enable-strict-thinking",
    )


def _is_quantized(asked: Iterable[str | None], *models: tuple[str, str | None]) -> bool:
    """``asked``: ways to quantize that flags name; ``models``: folders and their revisions."""
    by_flag = bool({*asked} - {None, "unquant"})
    return by_flag or any("quantization_config" in _read(*model) for model in models)


def _has_cores(ranks: int) -> bool:
    """Whether SGLang finds cores on this host for so many ranks: otherwise its schedulers end."""
    from sglang.srt.utils import get_cpu_ids_by_node

    return os.environ.get(CORES_ENV, "all") != "all" or ranks <= len(get_cpu_ids_by_node())
