"""``adaserve gpu-check``: everything that can be measured only on a GPU host, in one command."""
