"""Drafts that learn from the traffic they serve (Online Speculative Decoding; docs/learning.md)."""
