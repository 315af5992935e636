"""Hooks that act in the HTTP process."""
