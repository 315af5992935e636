"""SGLang attention backend for CPU hosts that understands tree masks.

Every mode is turned into the flat layout that FlashInfer takes and run by one attention function.
For a verification the layout comes from ``SpecInput.generate_attn_arg_prefill``, the method that
FlashInfer's backend calls, so the inputs meant for the GPU are exercised on any machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from adaserve.engine.plain_attention import plain_layers, require_no_more
from adaserve.engine.trees.attention import TreeAttentionPlan, attend, causal_plan, gather_slots


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
        mode = forward_batch.forward_mode
        if mode.is_target_verify():
            self.plan = self._verify_plan(forward_batch)
            return
        kv_lens = forward_batch.seq_lens.numpy()
        q_lens = np.ones_like(kv_lens) if mode.is_decode() else forward_batch.extend_seq_lens.numpy()
        self.plan = self._causal_plan(forward_batch.req_pool_indices, q_lens, kv_lens)

    def _causal_plan(
        self, pool_indices: torch.Tensor, q_lens: np.ndarray, kv_lens: np.ndarray
    ) -> TreeAttentionPlan:
        table = self.req_to_token_pool.req_to_token
        slots = gather_slots(table, pool_indices.numpy(), kv_lens.astype(np.int64))
        return causal_plan(torch.from_numpy(slots), q_lens.astype(np.int64), kv_lens.astype(np.int64))

    def _verify_plan(self, forward_batch: Any) -> TreeAttentionPlan:
        lens = forward_batch.seq_lens
        indices, kv_indptr, qo_indptr, mask = forward_batch.spec_info.generate_attn_arg_prefill(
            req_pool_indices=forward_batch.req_pool_indices,
            paged_kernel_lens=lens,
            paged_kernel_lens_sum=int(lens.sum()),
            translator=self.kv_index_translator,
            plan=forward_batch.kv_loc_plan,
        )
        return TreeAttentionPlan(qo_indptr, kv_indptr, indices, mask)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> torch.Tensor:
        require_no_more(more)
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        assert self.plan is not None
        heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        scaled = heads * (layer.scaling * layer.qk_head_dim**0.5)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        return attend(scaled.float(), keys, values, self.plan).to(q.dtype)

    forward_decode = forward_extend

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return False
