"""Constants of the pair's vocabulary."""

VOCAB_SIZE = 4096
BOS, EOS = "<|begin|>", "<|end|>"
BOS_ID, EOS_ID = 0, 1
MAX_CONTEXT_TOKENS = 8192
