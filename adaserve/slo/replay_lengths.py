"""How a replayed answer ends at a length that no scheduler knows.

Real answers end by themselves, and their clients state a loose ``max_tokens``. In a replay nothing but
``max_tokens`` would end an answer where its trace says, so every scheduler would know when. A request may
therefore carry its length in ``custom_params``, and a server started with this variable in its environment
ends the answer there, as if a stop token had come.
"""

ENV = "ADASERVE_REPLAY"
ANSWER_TOKENS = "answer_tokens"
"""Key in ``custom_params``: tokens after which the answer ends."""
