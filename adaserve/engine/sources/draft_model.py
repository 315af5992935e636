"""Draft models as SGLang workers see them: own weights and KV, the target's slots."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from sglang.srt.configs.draft_parallel import DraftParallelLayout, DraftParallelSpec, DraftTPExecution
from sglang.srt.layers.moe.utils import draft_model_build_scope
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_model, get_serving
from sglang.srt.speculative.base_spec_worker import EagleDraftWorkerBase
from sglang.srt.speculative.draft_parallel import resolve_draft_parallel_layout
from sglang.srt.speculative.pp_draft_embedding import resolve_draft_embed_and_head
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from adaserve.checkpoints.draft_kind import HEADS, DraftKind, draft_kind, other_size, require_known_head
from adaserve.checkpoints.fingerprint import local_folder
from adaserve.config import AdaServeConfig
from adaserve.engine.model_support import require_supported_model, require_windows
from adaserve.engine.sources.token_map import FLAG, PLAIN, keep_tokens, token_map
from adaserve.errors import UnsupportedError
from adaserve.host.device import on_device
from adaserve.patches.start.kv_sizing import draft_config

logger = logging.getLogger(__name__)


class DraftModel:
    """A language model with the target's vocabulary, or a head that reads the target's hidden states."""

    def __init__(
        self, path: str, worker: TpModelWorker, layout: DraftParallelLayout, kind: DraftKind
    ) -> None:
        self.path, self.worker, self._layout, self.kind = path, worker, layout, kind
        self.runner = worker.model_runner

    @property
    def folder(self) -> str:
        """Where its checkpoint lies, in the revision that is served; its name where it isn't on this host."""
        return local_folder(self.path, self.runner.model_config.revision)

    def extend(self, batch: Any) -> None:
        """Writes the draft's KV of the tokens that the target has just prefilled. Those that only a larger
        target has are not looked up: beyond the draft's embedding that would end the server. Images are not
        shown to it: in their places it reads tokens."""
        batch = copy(batch)
        batch.multimodal_inputs = [None] * len(batch.reqs)
        with draft_tp_context(self._layout):
            forward_batch = ForwardBatch.init_new(batch, self.runner, return_hidden_states_before_norm=False)
            forward_batch.return_logprob = False  # the target's are asked for
            last_token = self.runner.model_config.vocab_size - 1
            forward_batch.input_ids = forward_batch.input_ids.clamp(max=last_token)
            self.runner.forward(forward_batch)


class DraftModels(EagleDraftWorkerBase):
    """All draft models as the one draft worker that SGLang knows. ``paths``: at least one."""

    def __init__(
        self,
        paths: Sequence[str],
        server_args: Any,
        gpu_id: int,
        nccl_port: int,
        target_worker: TpModelWorker,
    ) -> None:
        super().__init__()
        layout = resolve_draft_parallel_layout(DraftParallelSpec(tp_execution=DraftTPExecution.TARGET_LAYOUT))
        of_target = target_worker.model_runner.model_config
        with draft_tp_context(layout), draft_pp_context(), draft_model_build_scope():
            workers = [
                _DraftWorker(
                    path,
                    of_target.dtype,
                    server_args,
                    gpu_id,
                    nccl_port,
                    is_draft_worker=True,
                    context_length=of_target.context_len,
                )
                for path in paths
            ]
        config = AdaServeConfig.load()
        kinds = [
            draft_kind(worker.model_runner.model_config.hf_config.architectures, config.draft_kind, path)
            for path, worker in zip(paths, workers, strict=True)
        ]
        require_servable(kinds, config)
        for path, worker, kind in zip(paths, workers, kinds, strict=True):
            require_same_size(target_worker, worker, path)
            if kind == "model":
                require_same_tokens(target_worker, worker, path)
                require_windows(worker.model_runner.model, config.deepest, config.draft_window != 0)
            else:  # a head has the target's tokens
                share_embeddings(target_worker, worker, kind)
            if (listed := server_args.speculative_token_map) is not None:
                with draft_tp_context(layout):
                    keep_listed(listed, worker, path, kind, config)
        models = zip(paths, workers, kinds, strict=True)
        self.models = tuple(DraftModel(path, worker, layout, kind) for path, worker, kind in models)

    @property
    def draft_runners(self) -> list[Any]:
        return [model.runner for model in self.models]

    def alloc_memory_pool(self, **pools: Any) -> None:
        for model in self.models:
            model.worker.alloc_memory_pool(**pools)

    def init_attention_backends(self) -> None:
        for model in self.models:
            model.worker.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        for model in self.models:
            model.worker.init_cuda_graphs(capture_decode_cuda_graph=False)
            # SGLang captures them for the target alone, unless asked. Heads read prompts in our forwards.
            has_graphs = check_cuda_graph_backend(Phase.PREFILL, Backend.BREAKABLE)
            if has_graphs and model.kind == "model" and on_device(model.runner.device):
                model.runner.init_prefill_cuda_graph(force_for_draft_worker=True)

    def draft(self) -> None:
        raise RuntimeError("AdaServe drafts through adaserve.engine.sources.beam")

    draft_extend = draft


class _DraftWorker(TpModelWorker):
    """SGLang's worker of the model at ``path``; of itself it knows only --speculative-draft-model-path.
    ``of_target``: the target's type of numbers."""

    def __init__(self, path: str, of_target: torch.dtype, *args: Any, **kwargs: Any) -> None:
        self._path, self._of_target = path, of_target
        super().__init__(*args, **kwargs)

    def _init_model_config(self) -> None:
        self.model_config = draft_config(self.server_args, self._path, context_length=self.context_length)
        architectures = self.model_config.hf_config.architectures
        require_known_head(architectures, self._path)
        require_supported_model(self.model_config)
        if not {*HEADS}.isdisjoint(architectures):
            # It reads the target's embedding and hidden states, and SGLang's norms take one type at a time.
            self.model_config.dtype = self._of_target


_HEAD_NAMES: dict[DraftKind, str] = {"eagle3": "EAGLE-3 head", "mtp": "MTP layer"}


def require_servable(kinds: Sequence[DraftKind], config: AdaServeConfig) -> None:
    """Raises UnsupportedError with the remedy where heads stand in a combination that is not served."""
    name = next((_HEAD_NAMES[kind] for kind in kinds if kind in _HEAD_NAMES), None)
    if name is None:
        return
    refusals = [
        (len(kinds) > 1, "cannot be one of two drafts: leave --second-draft out"),
        (config.learn and "mtp" in kinds, "does not learn while it serves: leave --learn out"),
    ]
    for refused, reason in refusals:
        if refused:
            raise UnsupportedError(f"an {name} {reason}")


def share_embeddings(target: Any, head: Any, kind: DraftKind) -> None:
    """Gives the head the target's embeddings, and its output matrix where the head has none of its own, as an
    MTP layer never has. As in SGLang's ``EagleDraftWorker.init_lm_head``. Raises UnsupportedError where the
    target's are quantized."""
    runner, model = target.model_runner, head.model_runner.model
    takes_matrix = kind == "mtp" or model.load_lm_head_from_target
    try:
        embed, matrix = resolve_draft_embed_and_head(
            target_model=runner.model,
            draft_model=model,
            model_path=runner.model_config.model_path,
            revision=runner.model_config.revision,
            load_config=runner.load_config,
        )
    except AttributeError:  # most ways to quantize leave no weight of that name
        embed = matrix = None
    if any(t is None or t.dtype not in PLAIN for t in (embed, *[matrix] * takes_matrix)):
        raise UnsupportedError(
            f"an {_HEAD_NAMES[kind]} uses the target's embedding and output matrix, which are quantized "
            "here: serve a checkpoint of the target that keeps both in 16 bits, or a draft model"
        )
    if takes_matrix:
        model.set_embed_and_head(embed, matrix)
    else:
        model.set_embed(embed)


def keep_listed(listed: str, draft: Any, path: str, kind: DraftKind, config: AdaServeConfig) -> None:
    """From now on the draft at ``path`` knows the tokens alone that the file ``listed`` names. Raises
    UnsupportedError."""
    if kind == "eagle3":  # as in SGLang
        logger.warning("AdaServe: %s has no effect: the EAGLE-3 head has a vocabulary of its own", FLAG)
        return
    runner = draft.model_runner
    ids = token_map(listed, runner.model_config.vocab_size, config.most_children)
    keep_tokens(runner.model, ids, path)


def require_same_size(target: Any, draft: Any, path: str) -> None:
    """Raises UnsupportedError with the remedy where a draft at ``path`` has tokens that the target
    lacks, or lacks some of the target's."""
    t_size, d_size = target.model_runner.model_config.vocab_size, draft.model_runner.model_config.vocab_size
    # A larger model of a family may pad its vocabulary further. Looked up, its padding would read beyond the
    # draft's embedding, so only forwards that guard against it (those on a device) may have such a draft.
    may_be_smaller = target.tokenizer is not None and str(target.model_runner.device) != "cpu"
    if t_size != d_size and not (may_be_smaller and len(target.tokenizer) <= d_size < t_size):
        raise UnsupportedError(other_size(path, d_size, t_size))


def require_same_tokens(target: Any, draft: Any, path: str) -> None:
    """Raises UnsupportedError with the remedy where the tokens of the draft model at ``path`` would mean
    something else to the target. Where one of the two has no tokenizer, nobody can tell."""
    if target.tokenizer is None:  # --skip-tokenizer-init
        return
    try:
        ours, theirs = _ordinary_tokens(target.tokenizer, _tokenizer_of(draft.model_runner.model_config))
    except Exception as error:  # of whatever kind of tokenizer, which the draft does not need to be served
        logger.warning(
            "AdaServe: the tokens of the draft %s were not compared with the target's (%r): make sure that "
            "both models have the same tokenizer",
            path, error,
        )  # fmt: skip
        return
    if different := [t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t)]:
        token = min(different)
        raise UnsupportedError(
            f"the draft {path} and the target number {len(different)} of their tokens differently (first "
            f"{token!r}, which is {theirs.get(token)} in the draft and {ours.get(token)} in the target): "
            "choose a draft with the target's tokenizer"
        )


def _ordinary_tokens(target: Any, draft: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Tokens and their ids of two tokenizers, without those that either has added to its vocabulary. Models
    of a family differ in them (marks of turns, thoughts and tools), and a draft is wrong there at most.

    Raises ValueError where one has no others: Transformers makes such a one for some folders without any.
    """
    added = target.get_added_vocab().keys() | draft.get_added_vocab().keys()
    ours, theirs = ({t: i for t, i in each.get_vocab().items() if t not in added} for each in (target, draft))
    if not (ours and theirs):
        raise ValueError("one of them has no tokenizer")
    return ours, theirs


def _tokenizer_of(config: Any) -> Any:
    """By a draft's ``ModelConfig``: SGLang gives it no tokenizer, and --tokenizer-path names the target's."""
    return get_tokenizer(
        config.model_path,
        tokenizer_mode=get_serving().tokenizer_mode,
        trust_remote_code=get_model().trust_remote_code,
        revision=config.revision,
        tokenizer_backend=get_serving().tokenizer_backend,
    )
