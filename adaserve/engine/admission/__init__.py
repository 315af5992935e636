"""When a waiting prompt may start, what it would get, and which prompts are refused."""
