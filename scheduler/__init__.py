"""Policies, rules of admission, costs and a simulator; neither torch nor SGLang is imported."""
