"""Hooks that act while a server starts."""
