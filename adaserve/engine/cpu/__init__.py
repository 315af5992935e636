"""Fast CPU forwards of Llama-family models: used on hosts without a GPU."""

from adaserve.engine.cpu.llama import LlamaModel
from adaserve.engine.cpu.params import Inputs, LayerWeights, ModelConfig, ModelWeights

__all__ = ["Inputs", "LayerWeights", "LlamaModel", "ModelConfig", "ModelWeights"]
