"""Rows of logits, on any device: scaled, filtered, some at a time, and as log-probabilities."""
