"""``adaserve gpu-check``: what only a GPU host can say, in one command."""
