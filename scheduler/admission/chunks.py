"""How many prompt tokens are prefilled between two decode iterations."""

from __future__ import annotations

import numpy as np

from adaserve.scheduler.admission.situation import Situation, WaitingBatch, until_read_s
from adaserve.scheduler.interface import FloatArray, IntArray

WASTE = 1.15
"""A token in a chunk that is worth a forward costs at most this many times one in the largest chunk."""


def least_chunk(sizes: IntArray, seconds: FloatArray) -> int:
    """Smallest of ``sizes`` [k] at which a token costs at most ``WASTE`` times that at the largest."""
    per_token_s = seconds / sizes
    return int(sizes[int(np.argmax(per_token_s <= WASTE * per_token_s[-1]))])


def claimed_share(situation: Situation, order: IntArray) -> float:
    """Share of the time that prefills need for all of ``order`` (not empty) to be done in time; 0 to 1.

    Only a TTFT SLO that can still be met claims more than ``late_share``. An SLO for which even all of the
    time would be too little is lost already. The next decision comes after an iteration, so the time left by
    then counts.
    """
    waiting, interference = situation.waiting, situation.interference
    work_s = until_read_s(situation, order)
    left_s = situation.aims_s[order] - situation.now_s
    firm = waiting.stated[order] & (work_s <= left_s)
    later_s = left_s - interference.period_s
    share = np.divide(work_s, later_s, out=np.full(len(order), np.inf), where=later_s > 0)
    return float(np.minimum(share, np.where(firm, 1.0, situation.config.late_share)).max())


def slack_tokens(situation: Situation, order: IntArray) -> int:
    """Size of the chunk that ``order`` (not empty) gets before the next decode iteration; 0 = decode first.

    As much as the tightest request can bear (``spend`` of its slack), or as much as the waiting prompts
    claim, whichever is more. A chunk that is too small to be worth a forward, or too small for a prompt that
    overtakes, waits until there is more, but for at most ``most_decodes`` iterations: a prompt always makes
    progress.
    """
    config, waiting, interference = situation.config, situation.waiting, situation.interference
    left = int(waiting.prompt_left[order].sum())
    sizes, seconds = interference.sizes, interference.seconds
    least_slack_s = float(np.min(interference.slack_s, initial=np.inf))
    bearable_s = config.spend * (least_slack_s + interference.spent_s)
    share = claimed_share(situation, order)
    rounds = max(1, interference.decodes)
    claimed_s = interference.period_s * rounds * share / (1 - share) if share < 1 else np.inf
    within = int(np.searchsorted(seconds, max(bearable_s, claimed_s) - interference.spent_s, side="right"))
    tokens = min(int(sizes[within - 1]) if within else 0, config.chunk_tokens)
    beside = int(waiting.prompt_left[order[0]]) + 1 if _overtakes_first(waiting, order) else 0
    unsplit = unsplit_tokens(situation, order)
    worth_it = unsplit or max(config.least_tokens, least_chunk(sizes, seconds))
    least = max(min(worth_it, config.chunk_tokens), beside)
    if tokens < min(least, left):
        if interference.decodes < config.most_decodes:
            return 0
        tokens = least
    if unsplit:
        return unsplit
    # As few chunks as that size needs, but equal ones: no forward for a few tokens at the end.
    if tokens < min(left, config.chunk_tokens):
        return max(beside, -(-left // -(-left // tokens)))
    return tokens


def unsplit_tokens(situation: Situation, order: IntArray) -> int:
    """Tokens of the prompts of ``order`` that fit whole into a forward, if a chunk must end with one of them
    because two halves would cost more than they save. 0 = a chunk may end anywhere."""
    waiting, most = situation.waiting, situation.config.chunk_tokens
    if _overtakes_first(waiting, order):
        return 0
    ends = np.cumsum(waiting.prompt_left[order])
    whole = int(ends[ends <= most].max(initial=0))
    return whole if whole <= situation.interference.worth_tokens else 0


def _overtakes_first(waiting: WaitingBatch, order: IntArray) -> bool:
    return bool(waiting.started[order].any() and not waiting.started[order[0]])


def reserved_tokens(waiting: WaitingBatch, order: IntArray, tokens: int) -> int:
    """The tokens of a chunk that belong to prompts which come before the started one and fit in beside it."""
    if not _overtakes_first(waiting, order):
        return 0
    ahead = order[: int(np.argmax(waiting.started[order]))]
    taken = np.cumsum(waiting.prompt_left[ahead])
    return int(taken[taken < tokens].max(initial=0))
