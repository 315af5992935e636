"""ADASERVE as a speculative algorithm of SGLang: registration, settings, and what is refused."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.spec_registry import CustomSpecAlgo
from uvicorn.config import LOG_LEVELS

from adaserve.config import MOST_RUNNING, AdaServeConfig, ConfigError
from adaserve.draft_kind import kind_at
from adaserve.host import ATTENTION_BACKEND, on_device
from adaserve.identity import NAME, ensure_registered
from adaserve.patches import require_applied

if TYPE_CHECKING:
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.server_args import ServerArgs

    from adaserve.patches.served_worker import ServedWorker

logger = logging.getLogger(__name__)

CORES_ENV = "SGLANG_CPU_OMP_THREADS_BIND"
"""SGLang's: the cores of each rank on a CPU, such as 0-3|4-7; "all" counts as unset."""

_KEY = re.compile(r"[!-~]([ -~]*[!-~])?")
"""What a header can carry, and can be compared with."""


class AdaServeAlgorithm(CustomSpecAlgo):
    """The methods that the scheduler calls beyond those ``CustomSpecAlgo`` defines.

    They exist only on SGLang's own enum ``SpeculativeAlgorithm``; a contract test compares the two.
    """

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> FutureMap:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def supports_grammar_overlap(self) -> bool:
        """The worker advances matchers itself, by the barrier that it is given."""
        return True

    def get_platform_worker_cls(self) -> type | None:
        return None

    def handle_server_args(self, server_args: ServerArgs) -> None:
        """Refuses what cannot be served and sizes SGLang's speculative reserve. Raises ValueError."""
        ensure_registered()
        require_applied()
        config = AdaServeConfig.load()
        refuse_unsupported(server_args, config)
        size_reserve(server_args, config)
        tell_what_is_not_used(server_args)
        server_args.enable_mixed_chunk = False
        leave_graphs_to_us(server_args, config)
        if server_args.max_running_requests is None:
            server_args.max_running_requests = MOST_RUNNING


def size_reserve(args: Any, config: AdaServeConfig) -> None:
    """Sets SGLang's sizes of trees, which its KV reserve is worked out from. Those that were given are not
    used."""
    sizes = {
        "speculative_num_steps": (config.deepest, "--adaserve-max-depth"),
        "speculative_eagle_topk": (config.max_width, "--adaserve-max-width"),
        "speculative_num_draft_tokens": (1 + config.max_candidates, "--adaserve-budget"),
    }
    for name, (size, ours) in sizes.items():
        given = getattr(args, name)
        if given not in (None, size):
            flag = name.replace("_", "-")
            logger.warning("AdaServe: --%s %s has no effect: see %s", flag, given, ours)
        setattr(args, name, size)


def tell_what_is_not_used(args: Any) -> None:
    """Warns of flags that SGLang heeds with its own speculation, or with none."""
    exact = "all text is exactly the target's"
    unused = [
        (args.enable_mixed_chunk, "enable-mixed-chunk", "verification shares no forward with a prefill"),
        (args.speculative_accept_threshold_single != 1.0, "speculative-accept-threshold-single", exact),
        (args.speculative_accept_threshold_acc != 1.0, "speculative-accept-threshold-acc", exact),
        (args.speculative_use_rejection_sampling, "speculative-use-rejection-sampling", exact),
        (args.speculative_token_map, "speculative-token-map", "all tokens are drafted"),
    ]
    for given, flag, why in unused:
        if given:
            logger.warning("AdaServe: --%s has no effect: %s", flag, why)


def leave_graphs_to_us(args: Any, ours: AdaServeConfig) -> None:
    """SGLang cannot capture a plugin algorithm's decode graphs; ours are captured by ``GpuDevice``. Its
    prefill graphs are captured before a head has said what it reads, and would never hand that out."""
    config = args.cuda_graph_config
    if config is None:
        return
    if config.decode.backend != "disabled":
        config = replace(config, decode=replace(config.decode, backend="disabled"))
    path, revision = args.speculative_draft_model_path, args.speculative_draft_model_revision
    has_head = ours.medusa is not None or (path and kind_at(path, revision) in ("eagle3", "mtp"))
    if config.prefill.backend != "disabled" and has_head:
        config = replace(config, prefill=replace(config.prefill, backend="disabled"))
    args.cuda_graph_config = config


def refuse_unsupported(args: Any, config: AdaServeConfig) -> None:
    """Raises ConfigError with the remedy for a combination that ADASERVE cannot serve."""
    from sglang.srt.environ import envs

    refusals = [
        (
            config.has_model and config.medusa is None and not args.speculative_draft_model_path,
            "a draft model is missing: add --speculative-draft-model-path, or serve without one: "
            '--adaserve-drafts suffix, or ADASERVE_CONFIG=\'{"drafts": "suffix"}\' for sgl.Engine',
        ),
        (
            not config.has_model and bool(args.speculative_draft_model_path),
            f"drafts are {config.drafts}, so a draft model would not be used: remove "
            "--speculative-draft-model-path",
        ),
        (
            config.medusa is not None and bool(args.speculative_draft_model_path),
            "Medusa heads draft in place of a draft model: remove --speculative-draft-model-path",
        ),
        (
            config.medusa is not None and args.tp_size > 1,
            "Medusa heads are not shared between ranks: use --tp-size 1",
        ),
        ((args.page_size or 1) > 1, f"page size {args.page_size} is not supported: use --page-size 1"),
        (bool(args.enable_lora or args.lora_paths), "LoRA adapters are not supported: remove --lora-paths"),
        (
            args.tp_size > 1 and not on_device(args.device),
            "tensor parallelism is not supported on a CPU: use --tp-size 1",
        ),
        (
            args.dp_size > 1 and not on_device(args.device) and not _has_cores(args.dp_size),
            f"--dp-size {args.dp_size} on a CPU needs as many NUMA nodes, or cores for each rank: set "
            f"{CORES_ENV}, such as to 0-3|4-7, or start several servers (adaserve fleet up)",
        ),
        (
            args.tp_size > 1 and config.prefill == "slack",
            "tensor-parallel ranks must prefill alike, and not by the clock: remove --adaserve-prefill slack",
        ),
        (
            args.tokenizer_worker_num > 1 and bool(args.api_key or args.admin_api_key),
            "keys are checked by a single HTTP process only: remove --tokenizer-worker-num, or leave the "
            "keys to a proxy",
        ),
        (
            not all(_KEY.fullmatch(key) for key in (args.api_key, args.admin_api_key) if key is not None),
            "an empty key lets everybody in, and HTTP headers carry ASCII alone, without spaces at the ends: "
            "give --api-key and --admin-api-key such values, or leave them out",
        ),
        (args.pp_size > 1, "pipeline parallelism is not supported: use --pp-size 1"),
        (
            args.attn_dp_size > 1,  # SGLang makes this of --enable-dp-attention
            "data-parallel attention is not supported: remove --attn-dp-size and --enable-dp-attention",
        ),
        (
            args.disaggregation_mode not in (None, "null"),
            "prefill/decode disaggregation is not supported: remove --disaggregation-mode",
        ),
        (
            envs.SGLANG_RUST_SERVER.get(),
            "the Rust HTTP server bypasses the checks of requests and their SLOs: unset SGLANG_RUST_SERVER",
        ),
        (
            bool(args.grpc_port or args.smg_grpc_mode or args.grpc_mode or envs.SGLANG_GRPC_PORT.get()),
            "requests over gRPC would be unchecked and without SLOs: remove --grpc-port and --smg-grpc-mode, "
            "and unset SGLANG_GRPC_PORT",
        ),
        (
            envs.SGLANG_ENABLE_REQUEST_DECOMPRESSION.get(),
            "nothing limits what a compressed body may hold: unset SGLANG_ENABLE_REQUEST_DECOMPRESSION",
        ),
        (
            args.enable_return_hidden_states,
            "hidden states are not returned: remove --enable-return-hidden-states",
        ),
        (
            bool(args.reasoning_parser) and args.grammar_backend in ("llguidance", "outlines"),
            f"SGLang compiles no {args.grammar_backend} grammar behind a reasoning parser: use "
            "--grammar-backend xgrammar, or remove --reasoning-parser",
        ),
        (args.is_embedding, "embeddings are not served: remove --is-embedding"),
        (
            not on_device(args.device) and not _attends_by_ours(args),
            "on a CPU only AdaServe's own attention reads trees: remove --attention-backend, "
            "--prefill-attention-backend and --decode-attention-backend",
        ),
        (
            (level := args.log_level_http or args.log_level).lower() not in LOG_LEVELS,
            f"the HTTP server has no log level {level}: give --log-level-http {', '.join(LOG_LEVELS)}",
        ),
        *(
            (value is not None and value < 1, f"--{flag} {value} would serve nobody: give at least 1")
            for flag, value in _at_least_one(args).items()
        ),
        (
            args.enable_memory_saver and not on_device(args.device),
            "SGLang's memory saver needs a GPU: remove --enable-memory-saver",
        ),
        (
            args.enable_forward_pass_metrics and not on_device(args.device),
            "SGLang times its forwards on GPUs only: remove --enable-forward-pass-metrics",
        ),
        (
            args.enable_strict_thinking and not on_device(args.device),
            "SGLang filters the tokens of thoughts on GPUs only: remove --enable-strict-thinking",
        ),
        (
            args.enable_streaming_session,
            "streaming sessions keep the KV of candidates that were not accepted: remove "
            "--enable-streaming-session (ordinary sessions are served)",
        ),
        (
            args.enable_hierarchical_cache,
            "the hierarchical cache is not supported: remove --enable-hierarchical-cache",
        ),
    ]
    for refused, reason in refusals:
        if refused:
            raise ConfigError(f"--speculative-algorithm ADASERVE: {reason}")


def _at_least_one(args: Any) -> dict[str, float | None]:
    """Settings with which a server hangs or ends at its first request where they are less."""
    names = ("max_prefill_tokens", "prefill_max_requests", "max_queued_requests", "decode_log_interval")
    return {name.replace("_", "-"): getattr(args, name) for name in (*names, "watchdog_timeout")}


def _attends_by_ours(args: Any) -> bool:
    backends = (args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend)
    return all(backend in (None, ATTENTION_BACKEND) for backend in backends)


def _has_cores(ranks: int) -> bool:
    """Whether SGLang finds cores on this host for so many ranks: otherwise its schedulers end."""
    from sglang.srt.utils import get_cpu_ids_by_node

    return os.environ.get(CORES_ENV, "all") != "all" or ranks <= len(get_cpu_ids_by_node())


def register() -> None:
    """Registers the algorithm and the CPU attention backend with SGLang."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, DRAFT_ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    @register_attention_backend(ATTENTION_BACKEND)
    def _cpu_backend(runner: Any) -> Any:
        from adaserve.engine.cpu.attention_backend import CpuAttentionBackend

        return CpuAttentionBackend(runner)

    for choices in (ATTENTION_BACKEND_CHOICES, DRAFT_ATTENTION_BACKEND_CHOICES):
        if ATTENTION_BACKEND not in choices:
            choices.append(ATTENTION_BACKEND)

    @SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=AdaServeAlgorithm)
    def _worker(server_args: ServerArgs) -> type[ServedWorker]:
        from adaserve.engine import worker

        return worker.AdaServeWorker
