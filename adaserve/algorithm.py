"""ADASERVE as a speculative algorithm of SGLang: registration and settings."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang.srt.model_executor.cuda_graph_config import Backend, Phase
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from adaserve.checkpoints.draft_kind import kind_at
from adaserve.config import GPU_WIDTH, MAX_RUNNING, AdaServeConfig, settle_classes
from adaserve.host.device import ATTENTION_BACKEND, on_device
from adaserve.patches import require_applied
from adaserve.refusals import refuse_unsupported
from adaserve.sglang_compat import NAME, ensure_registered

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from adaserve.patches.scheduler.worker_interface import WorkerInterface

logger = logging.getLogger(__name__)


class AdaServeAlgorithm(CustomSpecAlgo):
    """SGLang also asks an algorithm what only its own enum can answer; a contract test compares the two. What
    the enum says holds for one that is none of its members, too."""

    create_future_map = SpeculativeAlgorithm.create_future_map
    carries_draft_hidden_states = SpeculativeAlgorithm.carries_draft_hidden_states
    need_topk = SpeculativeAlgorithm.need_topk
    get_platform_worker_cls = SpeculativeAlgorithm.get_platform_worker_cls

    def supports_grammar_overlap(self) -> bool:
        """The worker advances matchers itself, by the barrier that it is given."""
        return True

    def handle_server_args(self, server_args: ServerArgs) -> None:
        """Refuses what cannot be served and sizes SGLang's speculative reserve. Raises ValueError."""
        ensure_registered()
        require_applied()
        settle_classes()  # before any other process is started
        config = settle_width(AdaServeConfig.load(), server_args.device)
        let_drafts_say_how_they_are_quantized(server_args)
        refuse_unsupported(server_args, config)
        size_reserve(server_args, config)
        tell_what_is_not_used(server_args)
        server_args.enable_mixed_chunk = False
        server_args.disable_hybrid_swa_memory = True  # layers with windows have their KV where the others do
        leave_graphs_to_us(server_args, config)
        if server_args.max_running_requests is None:
            server_args.max_running_requests = MAX_RUNNING


def settle_width(config: AdaServeConfig, device: object) -> AdaServeConfig:
    """Drafts are wider on a GPU, in all processes that are started from here on, unless a width was asked
    for."""
    if config.max_width is None and on_device(device):
        config = config.changed(max_width=GPU_WIDTH)
        config.export()
    return config


ONLINE = ("fp8", "mxfp8", "w8a8_fp8", "bitsandbytes", "gguf")
"""Of SGLang's ways to quantize, those that it applies to weights in 16 bits while it loads them; and GGUF, in
which all models are read or none."""


def let_drafts_say_how_they_are_quantized(args: Any) -> None:
    """SGLang reads drafts in the way that --quantization names for the target, unless another one is given.
    Most ways need a checkpoint that was made for them, and a draft seldom is."""
    is_given = args._speculative_draft_quantization_explicitly_set
    if not is_given and args.speculative_draft_model_quantization not in (None, *ONLINE):
        args.speculative_draft_model_quantization = None  # as its config.json says, then


def size_reserve(args: Any, config: AdaServeConfig) -> None:
    """Sets SGLang's tree sizes, from which it computes its KV reserve. Sizes given by flags are not used."""
    sizes = {
        "speculative_num_steps": (config.deepest, "--adaserve-max-depth"),
        "speculative_eagle_topk": (config.widest, "--adaserve-max-width"),
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
        (args.enable_mixed_chunk, "enable-mixed-chunk", "see --adaserve-prefill mixed"),
        (args.speculative_accept_threshold_single != 1.0, "speculative-accept-threshold-single", exact),
        (args.speculative_accept_threshold_acc != 1.0, "speculative-accept-threshold-acc", exact),
        (args.speculative_use_rejection_sampling, "speculative-use-rejection-sampling", exact),
        (
            args.speculative_token_map and not args.speculative_draft_model_path,
            "speculative-token-map",
            "there is no draft model",
        ),
    ]
    for given, flag, why in unused:
        if given:
            logger.warning("AdaServe: --%s has no effect: %s", flag, why)


def leave_graphs_to_us(args: Any, ours: AdaServeConfig) -> None:
    """SGLang cannot capture a plugin algorithm's decode graphs; ours are captured by ``GpuDevice``. Its
    prefill graphs are captured before a head has said what it reads, and would never hand that out.

    What the operator has turned off, by whichever flag, is off for our graphs as well.

    SGLang also tunes FlashInfer's kernels of quantized models by a verification, whose masks it can make for
    its own algorithms alone."""
    args.disable_flashinfer_autotune = True
    given, asked = args.cuda_graph_config, args._cuda_graph_config_locked
    for phase in Phase.ALL:
        is_off = (phase, "backend") in asked and getattr(given, phase).backend == Backend.DISABLED
        setattr(args, f"disable_{phase}_cuda_graph", is_off)
    config = replace(given, decode=replace(given.decode, backend=Backend.DISABLED))
    path, revision = args.speculative_draft_model_path, args.speculative_draft_model_revision
    kind = kind_at(path, revision, ours.draft_kind) if path else None  # refused before anything is loaded
    if ours.medusa is not None or kind in ("eagle3", "mtp"):
        config = replace(config, prefill=replace(config.prefill, backend=Backend.DISABLED))
    args.cuda_graph_config = config


def register() -> None:
    """Registers the algorithm and the CPU attention backend with SGLang."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, DRAFT_ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    @register_attention_backend(ATTENTION_BACKEND)
    def _cpu_backend(runner: Any) -> Any:
        from adaserve.engine.cpu.attention_backend import CpuAttentionBackend

        return CpuAttentionBackend(runner)

    for choices in (ATTENTION_BACKEND_CHOICES, DRAFT_ATTENTION_BACKEND_CHOICES):
        if ATTENTION_BACKEND not in choices:
            choices.append(ATTENTION_BACKEND)

    @SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=AdaServeAlgorithm)
    def _worker(server_args: ServerArgs) -> type[WorkerInterface]:
        from adaserve.engine import worker

        return worker.AdaServeWorker
