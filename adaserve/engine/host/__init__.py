"""Fast CPU forwards of Llama-family models: used on hosts without a GPU."""

from adaserve.engine.host.extract import supports
from adaserve.engine.host.forward import LeanModel
from adaserve.engine.host.params import LayerWeights, ModelConfig, ModelWeights
from adaserve.engine.trees.plan import TreeAttentionPlan

__all__ = ["LayerWeights", "LeanModel", "ModelConfig", "ModelWeights", "TreeAttentionPlan", "supports"]
