"""SGLang attention backend for CPU hosts.

What SGLang runs itself is causal, and is laid out here. For trees ``SGLangForward`` sets the layout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from adaserve.engine.kv_writes import scales_of, write_kv
from adaserve.engine.model_support import plain_layers, require_no_more
from adaserve.engine.trees.attention import Scores, TreeAttentionPlan, attend, causal_plan, gather_slots


class CpuAttentionBackend(AttentionBackend):
    def __init__(self, runner: Any) -> None:
        """Raises UnsupportedError for a model whose text would be another one."""
        super().__init__()
        plain_layers(runner.model)
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.kv_index_translator = runner.kv_index_translator
        self.plan: TreeAttentionPlan | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        decodes, kv_lens = forward_batch.forward_mode.is_decode(), forward_batch.seq_lens.numpy()
        q_lens = np.ones_like(kv_lens) if decodes else forward_batch.extend_seq_lens.numpy()
        rows = forward_batch.req_pool_indices.numpy()
        slots = gather_slots(self.req_to_token_pool.req_to_token, rows, kv_lens)
        self.plan = causal_plan(torch.from_numpy(slots), q_lens, kv_lens)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **more: Any,
    ) -> torch.Tensor:
        require_no_more(more)
        if save_kv_cache and k is not None and v is not None:
            write_kv(self.token_to_kv_pool, layer, forward_batch.out_cache_loc, k, v)
        assert self.plan is not None
        heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        of_keys, of_values = scales_of(self.token_to_kv_pool, layer)
        out = attend(heads.float(), keys, values, self.plan, Scores.of(layer, sinks).times(of_keys))
        return (out if of_values == 1 else out * of_values).to(q.dtype)

    forward_decode = forward_extend

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1
