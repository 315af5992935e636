"""The embedded pair: a small target and draft that ship with the package, and the tools that made them.

=========  ==========================================================================================
files      ``folders`` (where models are), ``packed`` (the shipped form of weights), ``shape``,
           ``vocabulary``, ``tokenizer``
text       ``corpus`` (from ``sources.toml``) with ``clean``, ``data`` (batches), ``prompts`` (held out)
networks   ``model`` (target and draft), ``eagle`` and ``medusa`` (heads), ``target_outputs``,
           ``generate`` (without a server)
training   ``train`` (the loop, the target) with ``optimizer`` and ``schedule``, ``distill`` (the draft),
           ``train_head``; ``export`` (all steps in order), ``runs`` (which run goes on)
measuring  ``evaluate`` with ``candidates``, ``head_drafts``, ``long_context``, ``sharpening_loss``
widening   ``widen`` (sizes and folders), ``widened_tensors``
commands   ``cli``, ``perturbed`` (drafts for tests)
=========  ==========================================================================================
"""
