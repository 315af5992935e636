"""Hooks that act in the scheduler."""
