"""The largest values that a request may ask for."""

from __future__ import annotations

from dataclasses import dataclass, field

from adaserve.boundary.grammar_check_budget import GrammarBudget

INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

MAX_BODY_BYTES = 32 << 20
MAX_UNFINISHED_BYTES = 1 << 30
"""Of all bodies together, what has come of those that are not complete."""

MIN_PIECE_BYTES = 1 << 18
MAX_PIECE_S = 30.0
"""So much of a body, or its end, must come in every period of that length."""

MAX_BODY_VALUES = 1 << 16
"""Values in all lists and objects of a body, but for token ids and biases."""

MAX_BODY_IDS = 1 << 22
"""Token ids in all prompts of a body, where not one prompt may have more. They keep the HTTP process for less
than a second, half of which is parsing; 16 million of one digit took two to three."""

MAX_SAMPLES = 128
"""``n``, as in OpenAI's API: one request becomes that many."""

MAX_TOP_LOGPROBS = 1024
"""Per position; each is a Python object in the answer."""

MAX_PROMPT_LOGPROBS = 1 << 18
"""Of one prompt, at all of its positions. They are made in one go: 800,000 kept a small server for 25 s."""

MAX_LOGPROBS = 1 << 22
"""Of all answers of a request. They come one position at a time, and are kept until its end."""

MAX_REPEATED_LOGPROBS = 1 << 16
"""Of a prompt and its answer together, where every output of a stream repeats those before it: an output of
some milliseconds."""

MAX_ID_CHARACTERS = 256
"""Of a request id and of other names that are kept while the server runs."""

MAX_TEMPERATURE = 1000.0
"""Beyond it every token is equally likely anyhow; far beyond, 32-bit floats overflow."""

MIN_REPETITION_PENALTY = 0.01
"""Logits are divided by it."""

MAX_LOGIT_BIAS = 1e6

MAX_BATCH = 4096
"""Answers of one request: its prompts, times ``n``. Each is several objects from the start."""

MAX_COPIES_BYTES = 1 << 28
"""Of all answers of a request together, what each is given a copy of, by a guess: its sampling parameters and
all else but the prompt. Biases of 100,000 tokens, a body of 2 MB, took 52 GB with 4096 answers."""

MAX_PROMPT_TOKENS = 1 << 26
"""Of all answers of a request together, each of which has a copy of its prompt, 8 bytes per token: a body of
32 MB, with 128 answers for each prompt, would take 6 GB."""

VALUE_BYTES = 64
"""What a value takes besides its characters."""

MAX_STOPS = 32
MAX_STOP_CHARACTERS = 512
"""Of all texts together that end an answer. Where 4 tokens are accepted at once, to look for one of 4096
characters took 4 ms of every iteration, and 0.5 ms for one of 512."""

MAX_GRAMMAR_CHARACTERS = 1 << 16
MAX_SCHEMA_CHARACTERS = 1 << 19
"""A hundred tools with their descriptions have some 100,000; schemas of Kubernetes have up to 400,000."""

MAX_SCHEMA_LEVELS = 1000
"""Schemas one inside of the other, references followed. xgrammar compiles by recursion: with a stack of 8 MB
6,000 were fine and 8,000 ended the process. Of 9,162 schemas in JSONSchemaBench the deepest has 114."""

MAX_GRAMMAR_DEPTH = 64
MAX_GRAMMAR_SIZE = 20_000
"""Terms that a regular expression or schema has once its counted repeats are written out."""

MAX_SCHEMA_PROPERTIES = 256
"""Of one object: compiling takes time with their square, 12 s for 1500."""

MAX_STOP_WAYS = 1000
"""Of all expressions together; tried at every place of the text, after every token."""

MAX_PARAMS_DEPTH = 8
MAX_PARAMS_CHARACTERS = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    """What depends on the server, its model and how its processes talk, and on where a request comes from."""

    vocab_size: int
    """Of the target: token ids run from 0 to ``vocab_size - 1``."""
    flat_params: bool = False
    """SGLANG_USE_PICKLE_IPC=0: the scheduler cannot decode ``custom_params`` nested more than once."""
    takes_media: bool = False
    """Whether the model takes images, audio or video."""
    seeded: bool = False
    """--enable-deterministic-inference: SGLang draws by seeds, and asserts that there is no min_p."""
    labels: frozenset[str] = frozenset()
    """--tokenizer-metrics-allowed-custom-labels: SGLang's metrics have these labels and no others."""
    of_tools: bool = False
    """Whether SGLang made the request's structural tag or EBNF itself, of a chat's tools."""
    grammar_budget: GrammarBudget = field(default_factory=GrammarBudget)
    """For the grammars of the request at hand."""
