"""When a waiting prompt may start, in which order, how large its chunks are, and what it would get."""
