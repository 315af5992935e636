"""Where the end of a request's text has occurred before, proposes what followed it there: in its own prompt
and output and, if that was asked for, in its tenant's other requests.

It needs no forward, so its proposals exist before a plan is made. Verification writes the KV
of the nodes that it keeps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adaserve.engine.request_state import DecodeRows, RequestState
from adaserve.engine.requests import rows_of_pool, tokens_of
from adaserve.engine.sources.match_rates import FIRST_QUARTER, KINDS, PER_KIND, UNKNOWN_NOISE, MatchRates
from adaserve.engine.sources.rates import LEAST
from adaserve.engine.sources.source import TreeSource
from adaserve.engine.sources.text_index import BYTES_PER_TOKEN, ORDERS, Text, TextIndex
from adaserve.engine.trees.proposal import Proposal
from adaserve.engine.trees.verify import VerifyBatch
from adaserve.noise import quantile
from adaserve.scheduler.interface import CandidateTrees

SUFFIX = 4
"""Bit of ``CandidateTrees.source``."""

MAX_INDEXED = 1024
"""Prompt tokens that are indexed in one go, some milliseconds: of a prompt from the prefix cache everything
comes at once, and all requests would wait for it."""

MAX_MATCHES = 2
"""Earlier places of which the continuation is proposed, the longest match first."""


@dataclass(slots=True)
class _Tree:
    """Candidates of one request in lists, parents first: there are too few for arrays."""

    token: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)  # -1 = child of the root
    depth: list[int] = field(default_factory=list)
    cell: list[int] = field(default_factory=list)  # of ``MatchRates``

    def __len__(self) -> int:
        return len(self.token)

    def start(self, tokens: list[int], cells: list[int]) -> None:
        """The first continuation."""
        self.token, self.cell = tokens, cells
        self.parent = list(range(-1, len(tokens) - 1))
        self.depth = list(range(1, len(tokens) + 1))

    def join(self, tokens: list[int], cells: list[int], most: int) -> None:
        """Adds the part of another continuation that is new, up to ``most`` nodes in all."""
        at = {key: i for i, key in enumerate(zip(self.parent, self.token, strict=True))}
        above = -1
        for depth, (token, cell) in enumerate(zip(tokens, cells, strict=True), 1):
            i = at.get((above, token))
            if i is None:
                if len(self) >= most:
                    return
                i = at[above, token] = len(self)
                self.token.append(token)
                self.parent.append(above)
                self.depth.append(depth)
                self.cell.append(cell)
            above = i

    def sort(self) -> list[int]:
        """Orders the nodes by depth; gives the number that each had."""
        order = sorted(range(len(self)), key=self.depth.__getitem__)
        if len(self) > self.depth[-1]:  # more than one chain
            place = {old: new for new, old in enumerate(order)} | {-1: -1}
            self.parent = [place[self.parent[i]] for i in order]
            self.token, self.depth, self.cell = (
                [values[i] for i in order] for values in (self.token, self.depth, self.cell)
            )
        return order


@dataclass(slots=True)
class _Request:
    """One that decodes. ``text`` is None when there was no memory for it."""

    rid: str
    scope: str
    prompt: int  # tokens
    text: Text | None
    backlog: list[int] = field(default_factory=list)  # of its prompt, to be indexed; nothing is offered yet
    tree: _Tree = field(default_factory=_Tree)  # what was thought of for its next tokens

    @property
    def read(self) -> int:
        """Tokens of the prompt that have come."""
        return len(self.text or ()) + len(self.backlog)

    def unknown(self, state: RequestState) -> list[int]:
        """Generated tokens that the text does not have yet and may have now."""
        if self.text is None or self.backlog:
            return []
        return state.generated[len(self.text) - self.prompt :]


class SuffixSource(TreeSource):
    """Offers what it finds in texts. ``depth``, ``nodes``: limits of one request's candidates."""

    reads_text = True

    def __init__(
        self,
        depth: int,
        nodes: int,
        memory_bytes: int,
        tenant: Callable[[Any], str] | None = None,
    ) -> None:
        """``tenant``: names the tenant of one of SGLang's requests; requests of one tenant then share what
        they were served. None = every request has its own text only."""
        self._depth, self._nodes, self._tenant = depth, nodes, tenant
        self._most_tokens = memory_bytes // BYTES_PER_TOKEN
        self.tokens = 0  # indexed
        self._scopes: dict[str, TextIndex] = {}
        self._requests: dict[int, _Request] = {}  # by request-pool row
        self._row: dict[str, int] = {}  # by rid
        self._ended: deque[_Request] = deque()  # whose texts are kept, oldest first
        self._kept = 0  # tokens of these
        self.rates = MatchRates()

    # -- what it reads ------------------------------------------------------------------------

    def prefilled(self, batch: Any, drafts: bool) -> None:
        """Reads the prefilled part of the prompts."""
        read = zip(
            batch.reqs, rows_of_pool(batch).tolist(), batch.prefix_lens, batch.extend_lens, strict=True
        )
        left = MAX_INDEXED
        for req, row, cached, new in read:
            length, known = cached + new, self._requests.get(row)
            # A retraction takes back what SGLang had not taken in yet, under overlap a whole iteration.
            if known is None or known.rid != req.rid or known.read > length:
                known = self._start(req, row)
            if known.text is not None:
                known.backlog += tokens_of(req, req.origin_input_ids[known.read : length])
                left -= self._catch_up(known, left)

    def _catch_up(self, request: _Request, most: int) -> int:
        """Indexes up to so many tokens of its backlog, and says how many."""
        new, request.backlog = request.backlog[:most], request.backlog[most:]
        self._extend(request, new)
        return len(new)

    def _start(self, req: Any, row: int) -> _Request:
        for old in {row, self._row.get(req.rid, row)}:  # retracted requests are not reported
            self.finished(old, unheard=False)
        scope = f"request {req.rid}" if self._tenant is None else f"key {self._tenant(req)}"
        request = _Request(req.rid, scope, len(req.origin_input_ids), None)
        if self._could_hold(request.prompt):
            request.text = self._scopes.setdefault(scope, TextIndex()).start()
        self._requests[row], self._row[req.rid] = request, row
        return request

    def advanced(self, rows: DecodeRows, verified: VerifyBatch, accepted: np.ndarray) -> None:
        """Learns from what was emitted: it says of every proposed token whose parents were right, whether
        it was right, verified or not."""
        for row, state in zip(rows.pool_rows.tolist(), rows.states, strict=True):
            request = self._requests.get(row)
            if request is None or request.rid != state.rid:
                continue
            emitted = request.unknown(state)
            if request.tree:
                self._learn(request.tree, emitted)
                request.tree = _Tree()
            self._extend(request, emitted)

    def _learn(self, tree: _Tree, emitted: list[int]) -> None:
        right = [True] * (len(tree) + 1)  # the root's place is the last one
        for i, (parent, depth) in enumerate(zip(tree.parent, tree.depth, strict=True)):
            right[i] = right[parent] and depth <= len(emitted)
            if right[i]:
                right[i] = emitted[depth - 1] == tree.token[i]
                self.rates.learn(tree.cell[i], right[i])

    def finished(self, pool_row: int, unheard: bool) -> None:
        """Keeps the text for the tenant's later requests, or forgets it."""
        request = self._requests.pop(pool_row, None)
        if request is None:
            return
        del self._row[request.rid]
        request.tree, request.backlog = _Tree(), []
        if self._tenant is None or request.text is None or len(request.text) <= ORDERS[0]:
            self._drop(request)  # in a text so short nothing can be found
        else:
            self._ended.append(request)
            self._kept += len(request.text)

    def _could_hold(self, new: int) -> bool:
        """So many tokens more, if all old texts made room."""
        return self.tokens - self._kept + new <= self._most_tokens

    def _extend(self, request: _Request, new: list[int]) -> None:
        """Old texts make room, the oldest first; where that would not be enough, the request goes without."""
        if request.text is None:
            return
        if not self._could_hold(len(new)):
            self._drop(request)
            return
        while self.tokens + len(new) > self._most_tokens:
            old = self._ended.popleft()
            self._kept -= len(old.text or ())
            self._drop(old)
        self._scopes[request.scope].extend(request.text, new)
        self.tokens += len(new)

    def _drop(self, request: _Request) -> None:
        text, request.text, request.backlog = request.text, None, []
        if text is None:
            return
        self.tokens -= len(text)
        index = self._scopes[request.scope]
        if len(index) > 1:
            index.remove(text)
        else:  # the last one; to forget its contexts one by one would take several times as long
            del self._scopes[request.scope]

    # -- what it proposes ---------------------------------------------------------------------

    def offer(self, rows: DecodeRows) -> Proposal | None:
        """The continuations of each request's longest matches, None when there are none."""
        left = MAX_INDEXED
        for row in rows.pool_rows.tolist():
            if (request := self._requests.get(row)) is not None and request.backlog:
                left -= self._catch_up(request, left)
        trees = [self._candidates(r, row, rows) for r, row in enumerate(rows.pool_rows.tolist())]
        if not any(trees):
            return None
        if rows.running.temperature.any():
            self._tell_kinds(trees, rows)
        return self._proposal(trees)

    def _candidates(self, r: int, row: int, rows: DecodeRows) -> _Tree:
        request, depth = self._requests.get(row), min(self._depth, int(rows.running.max_depth[r]))
        if request is None or not depth or request.rid != rows.states[r].rid:
            return _Tree()
        self._extend(request, request.unknown(rows.states[r]))  # the first token, from the prefill
        text, tree = request.text, _Tree()
        request.tree = tree
        if text is not None and not request.backlog:
            matches = self._scopes[request.scope].matches(text)[:MAX_MATCHES]
            for k, match in enumerate(matches):
                own = match.text is text
                tokens = match.continuation(depth, own)
                cells = self.rates.cells(match.order, k == 0, own, len(tokens))
                if k:
                    tree.join(tokens, cells, self._nodes)
                else:
                    tree.start(tokens, cells)
        return tree

    def _tell_kinds(self, trees: list[_Tree], rows: DecodeRows) -> None:
        """Moves the nodes of sampled requests to the cells of their kind. A token is drawn at the position of
        its parent."""
        sampled = [r for r in np.flatnonzero(rows.running.temperature > 0).tolist() if trees[r]]
        sizes = [len(trees[r]) for r in sampled]
        kinds = np.full(sum(sizes), UNKNOWN_NOISE)
        if rows.noisy and sampled:
            row = np.repeat(sampled, sizes)
            depth = np.array([d for r in sampled for d in trees[r].depth])
            token = np.array([t for r in sampled for t in trees[r].token])
            u = quantile(rows.keys[row], rows.seq_lens[row] + depth - 1, token)
            kinds = FIRST_QUARTER + (u * (KINDS - FIRST_QUARTER)).astype(np.int64)
        offsets = iter((kinds * PER_KIND).tolist())
        for r in sampled:
            trees[r].cell = [cell + next(offsets) for cell in trees[r].cell]

    def _proposal(self, trees: list[_Tree]) -> Proposal | None:
        """Those that are likely enough."""
        token: list[int] = []
        parent: list[int] = []
        depth: list[int] = []
        logprob: list[float] = []
        column: list[int] = []
        starts, rate = [0], self.rates.rate
        for tree in trees:
            if tree:
                likely = [1.0] * (len(tree) + 1)  # the root's place is the last one
                # The first continuation stands in place in the window, so that accepting it moves nothing.
                columns = [1 + number for number in tree.sort()]
                for i, (above, cell) in enumerate(zip(tree.parent, tree.cell, strict=True)):
                    likely[i] = likely[above] * rate[cell]
                place = {-1: -1}
                for i, f in enumerate(likely[:-1]):
                    if f >= LEAST:
                        place[i] = len(place) - 1
                        token.append(tree.token[i])
                        parent.append(place[tree.parent[i]])
                        depth.append(tree.depth[i])
                        logprob.append(math.log(f))
                        column.append(columns[i])
            starts.append(len(token))
        if not token:
            return None
        proposed = CandidateTrees(
            row_start=np.array(starts),
            token=np.array(token),
            parent=np.array(parent),
            depth=np.array(depth),
            logprob=np.array(logprob),
            source=np.full(len(token), SUFFIX),
        )
        return Proposal(proposed, np.array(column), 1 + max(column))
