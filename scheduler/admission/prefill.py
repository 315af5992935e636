"""The prefill share of an iteration: which prompts start, in which order, and how large the chunk is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adaserve.scheduler.admission.chunks import reserved_tokens, slack_tokens, unsplit_tokens
from adaserve.scheduler.admission.gate import first_to_start, held_back, most_overdue
from adaserve.scheduler.admission.order import in_order
from adaserve.scheduler.admission.situation import Situation
from adaserve.scheduler.interface import IntArray


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What to prefill now: the rows of ``order`` until ``tokens`` are spent (0 = decode first). ``lost``: a
    lost prompt comes first this time, because it has waited longest. ``reserved``: how many of the tokens
    belong to prompts that overtake a started one.

    A lost prompt has had its turn even if there is no room for it. Otherwise it would come first until there
    is room, and no prompt that can still be in time could pass it. In the simulator, with little memory, a
    tenth of all requests would miss their SLOs because of that, and no prompt would wait less."""

    tokens: int
    order: IntArray
    lost: bool = False
    reserved: int = 0


def plan_prefill(situation: Situation, n_running: int) -> PrefillPlan:
    """Pure: the prefill share of one iteration of ``n_running`` requests.

    Started prompts go first (their KV slots are taken already), except that with the order ``deadline``
    others may overtake them.
    """
    config, waiting = situation.config, situation.waiting
    order = in_order(situation)
    overdue, ahead = None, 0  # tokens of the started prompts, which come before it
    if n_running:
        overdue = most_overdue(situation, order)
        order = order[~held_back(situation, order) | (order == overdue)]
        if overdue is not None:
            order = order[np.argsort((order != overdue) & ~waiting.started[order], kind="stable")]
            ahead = int(waiting.prompt_left[order[waiting.started[order]]].sum())
    elif config.gate is not None:
        order = first_to_start(situation, order)
    tokens = config.chunk_tokens if len(order) else 0
    if tokens and config.pacing == "slack":
        tokens = slack_tokens(situation, order) if n_running else unsplit_tokens(situation, order) or tokens
    reserved = reserved_tokens(waiting, order, tokens)
    lost = overdue is not None and ahead < tokens
    return PrefillPlan(tokens, order, lost, reserved)
