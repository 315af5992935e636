"""Fast CPU forwards of Llama-family models: what stands in for a GPU where there is none."""

from adaserve.cpu.extract import supports
from adaserve.cpu.forward import LeanModel
from adaserve.cpu.params import LayerWeights, ModelConfig, ModelWeights
from adaserve.cpu.plan import TreeAttentionPlan

__all__ = ["LayerWeights", "LeanModel", "ModelConfig", "ModelWeights", "TreeAttentionPlan", "supports"]
