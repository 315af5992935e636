"""On the path of processes that are to see the simulated device: installs it when torch is imported."""

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar


class _Behind(MetaPathFinder):
    """Calls ``after_NAME`` of ``operators`` when a module has been imported."""

    modules: ClassVar = {"torch": "torch", "triton.runtime.interpreter": "triton",
               "sglang.kernels.ops.kvcache.kvcache": "kv_writes",
               "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph":
                   "breakable", "adaserve.engine.gpu.attention_kernel": "attention",
               "adaserve.engine.gpu.graphs": "graphs"}  # fmt: skip

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        after = self.modules.get(name)
        if after is None or name in sys.modules:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            import operators

            getattr(operators, f"after_{after}")(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Behind())
