"""Discrete-event simulator: the policies of the engine against a latency model and synthetic trees."""
