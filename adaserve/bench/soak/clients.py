"""One client process: several lanes that each send a call, check its answer and draw the next one.

With aiohttp, which SGLang brings along: its buffers can be small, so that a slow reader holds up the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import aiohttp

from adaserve.bench.soak.answers import Answer, StreamReader, read_whole
from adaserve.bench.soak.calls import Call, Conversation, End
from adaserve.bench.soak.checks import answer_faults, differences, status_faults, turn_faults
from adaserve.bench.soak.mix import Mix
from adaserve.bench.soak.tally import Tally

REPORT_S = 0.5
SLOW_BUFFER, BUFFER = 1 << 12, 1 << 16
_BAD = (KeyError, TypeError, IndexError, ValueError)


@dataclass(frozen=True)
class Role:
    """What a client process is told when it starts."""

    url: str
    seed: int
    lanes: int
    texts: tuple[str, ...]
    references: Mapping[int, tuple[Call, Answer]]  # by number of the case
    vocab: int
    deadline_s: float  # an answer that takes longer is a hang


def client_process(role: Role, pipe: Connection) -> None:
    """Runs until ``pipe`` says stop. Ctrl-C, or what else ends a process group, is for the parent, which then
    stops its clients in order."""
    os.setsid()
    asyncio.run(Client(role, pipe).run())


class _LeftError(Exception):
    """The client went away in the middle, as it was told to."""


class Client:
    """Sends calls on many lanes at once; the parent pauses and stops it."""

    def __init__(self, role: Role, pipe: Connection) -> None:
        self._role, self._pipe = role, pipe
        cases = [call for call, _ in role.references.values()]
        self._mix = Mix(role.seed, role.texts, cases, role.vocab)
        self.tally = Tally()
        self._going = asyncio.Event()
        self._stopping = False
        self._busy = 0

    async def run(self) -> None:
        # Shorter than the server's own patience with idle connections, so that none is reused as it closes.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
        timeout = aiohttp.ClientTimeout(total=self._role.deadline_s)
        async with aiohttp.ClientSession(self._role.url, connector=connector, timeout=timeout) as self._http:
            lanes = [asyncio.create_task(self._lane()) for _ in range(self._role.lanes)]
            await self._obey()
            await asyncio.gather(*lanes)

    async def _obey(self) -> None:
        """Reports to the parent, and does what it says, until it says stop."""
        while not self._stopping:
            while self._pipe.poll():
                word = self._pipe.recv()
                self._stopping = word == "stop"
                self._going.set() if word in ("go", "stop") else self._going.clear()
            idle = self._busy == 0 and not self._going.is_set()
            made, self.tally = self.tally, Tally()
            self._pipe.send((idle, made))
            await asyncio.sleep(REPORT_S)

    async def _lane(self) -> None:
        while True:
            await self._going.wait()
            if self._stopping:
                return
            self._busy += 1
            try:
                plan = self._mix.draw()
                if isinstance(plan, Conversation):
                    await self._converse(plan)
                else:
                    await self.ask(plan)
            finally:
                self._busy -= 1

    # -- one call -----------------------------------------------------------------------------

    async def ask(self, call: Call) -> Answer | None:
        """The checked answer; None when there is none, because it was refused or the client left."""
        start_s = time.monotonic()
        aborting = asyncio.create_task(self._abort(call)) if call.end is End.ABORTED else None
        answer: Answer | None = None
        try:
            exchange = self._exchange(call)
            if call.end is End.LEFT_EARLY:
                exchange = asyncio.wait_for(exchange, max(0.002, call.end_after))  # type: ignore[assignment]
            answer = await exchange
            self._count(call, answer)
        except _LeftError:
            self._left(call)
        except TimeoutError:
            if call.end is not End.LEFT_EARLY or time.monotonic() - start_s >= self._role.deadline_s:
                self._violate("hang", call, f"no full answer within {self._role.deadline_s:.0f} s")
            self._left(call)
        except aiohttp.ClientError as error:
            self._violate("answers", call, f"the connection broke: {error!r}")
            self._left(call)
        except _BAD as error:
            self._violate("answers", call, f"no answer of this route: {error!r}")
            self._left(call)
        if aborting is not None:
            await aborting
        self.tally.requests[call.kind] += 1
        self.tally.streams += call.stream
        self.tally.slowest_s = max(self.tally.slowest_s, time.monotonic() - start_s)
        return answer

    async def _exchange(self, call: Call) -> Answer | None:
        buffer = SLOW_BUFFER if call.pause_s else BUFFER
        async with self._http.post(
            call.path, json=call.body, headers=call.headers, read_bufsize=buffer
        ) as response:
            self.tally.statuses[response.status] += 1
            if response.status == 200 and call.stream and not call.refused:
                return await self._stream(call, response)
            text = await response.text()
        if faults := status_faults(call, response.status, text):
            self._violate("statuses", call, "; ".join(faults))
            return None
        return read_whole(call.path, json.loads(text)) if response.status == 200 else None

    async def _stream(self, call: Call, response: aiohttp.ClientResponse) -> Answer:
        reader, rest = StreamReader(call.path), b""
        async for chunk in response.content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                reader.line(line.decode())
            if call.end is End.LEFT_AMID and reader.events >= call.end_after:
                response.close()
                raise _LeftError
            if call.pause_s:
                await asyncio.sleep(call.pause_s)
        return reader.answer()

    async def _abort(self, call: Call) -> None:
        await asyncio.sleep(call.end_after)
        try:
            async with self._http.post("/abort_request", json={"rid": call.body["rid"]}) as response:
                if response.status != 200:
                    self._violate("statuses", call, f"/abort_request answered {response.status}")
        except (aiohttp.ClientError, TimeoutError) as error:
            self._violate("answers", call, f"/abort_request: {error!r}")

    def _count(self, call: Call, answer: Answer | None) -> None:
        if answer is None:
            return
        if faults := answer_faults(call, answer):
            self._violate("answers", call, "; ".join(faults))
        if call.case is not None:
            self.tally.compared += 1
            if found := differences(answer, self._role.references[call.case][1]):
                self._violate("exact text", call, "; ".join(found))
        whole = [c for c in answer.choices if c.finish in ("stop", "length")]
        self.tally.ends.update(c.finish or "none" for c in answer.choices)
        self.tally.served[call.slo_class] += len(whole)
        if answer.tokens is None:
            self.tally.maybe_tokens[call.slo_class] += call.most_tokens
        elif whole:
            self.tally.served_tokens[call.slo_class] += answer.tokens

    def _left(self, call: Call) -> None:
        self.tally.ends[call.end.value] += 1
        self.tally.maybe[call.slo_class] += call.choices
        self.tally.maybe_tokens[call.slo_class] += call.most_tokens

    def _violate(self, invariant: str, call: Call, text: str) -> None:
        sent = f"{call.kind}: {call.path} {call.headers or ''} {json.dumps(call.body)[:700]}"
        self.tally.violate(invariant, f"{text}\n    {sent}", time.time())

    # -- sessions -----------------------------------------------------------------------------

    async def _converse(self, plan: Conversation) -> None:
        """Opens a session, sends its turns and closes it."""
        name = f"soak-{uuid.uuid4().hex}"
        try:
            await self._control("/open_session", {"capacity_of_str_len": 4000, "session_id": name})
            before: Answer | None = None
            for turn in plan.turns:
                rid = {} if before is None else {"rid": before.choices[0].rid}
                call = replace(turn, body={**turn.body, "session_params": {"id": name, **rid}})
                answer = await self.ask(call)
                if answer is None or not answer.choices:
                    break
                if before is not None and (faults := turn_faults(before, answer)):
                    self._violate("answers", call, "; ".join(faults))
                before = answer
        finally:
            await self._control("/close_session", {"session_id": name})

    async def _control(self, path: str, body: dict[str, Any]) -> None:
        try:
            async with self._http.post(path, json=body) as response:
                if response.status != 200:
                    text = f"{path} answered {response.status}: {await response.text()}"
                    self.tally.violate("statuses", text, time.time())
        except (aiohttp.ClientError, TimeoutError) as error:
            self.tally.violate("answers", f"{path}: {error!r}", time.time())
