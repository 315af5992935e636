"""The engine inside SGLang's scheduler process: one worker, one iteration, on every device."""
