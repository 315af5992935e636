"""KV pool for CPU hosts: the stock pool, moved with plain tensor copies instead of Triton."""

from __future__ import annotations

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class CpuMHATokenToKVPool(MHATokenToKVPool):
    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None
        self.use_native_move_kv_cache = True
