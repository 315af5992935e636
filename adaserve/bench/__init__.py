"""The laboratory: everything that measures or demonstrates, and nothing that serves."""
