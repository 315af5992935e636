"""The forwards that are measured at start are those of serving, and compute what they are asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adaserve.engine.device.graphs import Tiers
from adaserve.engine.device.measured import MeasuredForward
from adaserve.engine.host.gumbel import Reading
from adaserve.engine.measure import QUICK, measure
from adaserve.engine.trees.attention import causal_plan
from tests.engine.device.factories import Requests, TinyModel, device_forward

TIERS = Tiers((1, 2, 4, 8, 16, 32, 64))


@pytest.mark.parametrize("most_rows", [0, 2, 8])
@pytest.mark.parametrize("q_lens", [[1], [3, 2], [1, 4, 2]])
def test_padded_forwards_give_the_same(q_lens: list[int], most_rows: int) -> None:
    lengths = [12, 20, 7][: len(q_lens)]
    requests = Requests(lengths)
    models = [TinyModel(requests.slots), TinyModel(requests.slots)]
    slots = [requests.req_to_token[row, :n] for row, n in zip(requests.pool_rows, lengths, strict=True)]
    plan = causal_plan(torch.cat(slots).long(), np.array(q_lens), np.array(lengths))
    own = torch.cat([s[n - q : n] for s, n, q in zip(slots, lengths, q_lens, strict=True)]).long()
    at = torch.cat([torch.arange(n - q, n) for n, q in zip(lengths, q_lens, strict=True)])
    tokens = torch.arange(len(own)) + 3
    for model in models:
        requests.prefill(model)
    right = models[0].hidden(tokens, at, own, plan)
    measured = MeasuredForward(device_forward(models[1]), TIERS, most_rows)
    got = measured.hidden(tokens, at, own, plan)
    if most_rows:
        assert torch.equal(measured.argmax(got), models[0].argmax(right))
        torch.testing.assert_close(measured.logits(got), models[0].logits(right), rtol=1e-4, atol=1e-4)
    else:
        scale = Reading.plain(np.ones(len(own)))
        ours, theirs = measured.topk_logprobs(got, scale, 3), models[0].topk_logprobs(right, scale, 3)
        assert torch.equal(ours[1], theirs[1])
        torch.testing.assert_close(ours[0].float(), theirs[0], rtol=1e-4, atol=1e-4)


def test_the_measurement_runs_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with fewer requests allowed than are measured at once."""
    import dataclasses

    grid = dataclasses.replace(QUICK, verify_tokens=(1, 8, 40), draft_rows=(1, 12), contexts=(32,), repeats=1)
    model = TinyModel(2048)
    target, draft = device_forward(model), device_forward(model)
    profile = measure(
        MeasuredForward(target, TIERS, 2), MeasuredForward(draft, TIERS, 0), 2048, grid, context_len=96
    )
    assert profile.verify[:, 0].tolist() == [1, 8, 40] and profile.draft[:, 0].tolist() == [1, 12]
    assert (profile.verify[:, 2] > 0).all()
    assert len(target.table) == 2, "only sizes that serving uses are kept: not 40 tokens of 10 requests"
