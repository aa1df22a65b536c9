"""The HTTP server of a rank that leads a replica: programs ask it for completions, with one key per trajectory.

It runs in a thread and never touches the engine: requests become turns of trajectories (trajectory.py), which the
thread of the engine takes.
"""

from __future__ import annotations

import asyncio
import hashlib
import queue
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

from aiohttp import web

from rlhf_megatron.agents import chat_completions, responses
from rlhf_megatron.agents.protocol import Answer, Question, Refusal
from rlhf_megatron.agents.trajectory import AgentTrajectory
from rlhf_megatron.errors import UserError
from rlhf_megatron.untrusted import parse_json

LOOPBACK = "127.0.0.1"
# Of a request: a conversation of a million tokens has about four million characters.
MOST_BODY_BYTES = 64 * 2**20
_MODEL = "policy"
_SECONDS_TO_END = 10.0

Handler = Callable[[web.Request], Any]


class BadBody(UserError):
    """A body that is no JSON."""


class Endpoint:
    """An OpenAI-compatible server on a free port of the loopback interface.

    Attributes:
        base_url: what clients call so.
    """

    def __init__(self) -> None:
        """Start the thread and listen."""
        self._by_key: dict[str, AgentTrajectory] = {}
        self._loop = asyncio.new_event_loop()
        started: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(started,), name="agent endpoint", daemon=True)
        self._thread.start()
        port = started.get()
        if isinstance(port, BaseException):
            raise port
        self.base_url = f"http://{LOOPBACK}:{port}/v1"

    def open(self, trajectory: AgentTrajectory) -> str:
        """Return a new key, with which a program's requests are that trajectory's."""
        key = secrets.token_urlsafe(24)
        self._by_key[key] = trajectory
        return key

    def close_trajectory(self, key: str) -> None:
        """Forget a key; later requests with it are refused."""
        self._by_key.pop(key, None)

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have the endpoint's thread call a function."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """End the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_SECONDS_TO_END)

    def _run(self, started: queue.SimpleQueue[int | BaseException]) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=MOST_BODY_BYTES)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._guarded(self._chat_completion))
        app.router.add_post("/v1/responses", self._guarded(self._response))
        runner = web.AppRunner(app, access_log=None)
        try:
            self._loop.run_until_complete(runner.setup())
            site = web.TCPSite(runner, LOOPBACK, 0)
            self._loop.run_until_complete(site.start())
            server = cast(asyncio.Server, site._server)
            started.put(server.sockets[0].getsockname()[1])
        except BaseException as error:
            started.put(error)
            return
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                response: web.StreamResponse = await handler(request)
                return response
            except Refusal as refusal:
                return web.json_response(refusal.body(), status=refusal.status)
            except (web.HTTPException, ConnectionError, asyncio.CancelledError):
                raise
            except Exception as error:  # a bug of ours: the program hears of it, and the log has one line
                print(f"agent endpoint: {type(error).__name__}: {error}"[:500], file=sys.stderr, flush=True)
                own = Refusal("the endpoint failed on this request; the rank's log says why", 400, "endpoint_error")
                return web.json_response(own.body(), status=own.status)

        return guarded

    def _trajectory(self, request: web.Request) -> AgentTrajectory:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        trajectory = self._by_key.get(key.strip()) if scheme.lower() == "bearer" else None
        if trajectory is None:
            raise Refusal("this key is of no trajectory that is under way", 401, "invalid_api_key")
        return trajectory

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": _MODEL, "object": "model", "created": 0, "owned_by": "rlhf_megatron"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat_completion(self, request: web.Request) -> web.StreamResponse:
        trajectory, body, digest = await self._read(request)
        answer = await self._answer(request, trajectory, chat_completions.question_of(body), digest)
        identity = trajectory.identity(answer.number)
        if body.get("stream"):
            return await _streamed(request, chat_completions.chunks_of(answer, identity, body))
        return web.json_response(chat_completions.completion_of(answer, identity, body))

    async def _response(self, request: web.Request) -> web.StreamResponse:
        trajectory, body, digest = await self._read(request)
        previous = body.get("previous_response_id")
        question = responses.question_of(body, trajectory.conversation(str(previous)) if previous else ())
        answer = await self._answer(request, trajectory, question, digest)
        identity = trajectory.identity(answer.number)
        trajectory.note_response(f"resp_{identity}", question, answer)
        if body.get("stream"):
            return await _streamed(request, responses.events_of(answer, identity, body))
        return web.json_response(responses.response_of(answer, identity, body))

    async def _read(self, request: web.Request) -> tuple[AgentTrajectory, dict[str, Any], str]:
        """Return the trajectory of a request's key, its body, and a digest of that."""
        trajectory = self._trajectory(request)
        try:
            content = await request.read()
            body = parse_json(content, "the body", BadBody)
        except BadBody as error:
            raise Refusal(str(error)) from error
        except web.HTTPRequestEntityTooLarge as error:
            raise Refusal(f"the body has more than {MOST_BODY_BYTES:,} bytes", 413, "too_large") from error
        if not isinstance(body, dict):
            raise Refusal("the body must be a JSON object")
        return trajectory, body, hashlib.blake2b(content, digest_size=16).hexdigest()

    async def _answer(
        self, request: web.Request, trajectory: AgentTrajectory, question: Question, digest: str
    ) -> Answer:
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        return await trajectory.ask(question, digest, is_retry)


async def _streamed(request: web.Request, events: Iterator[tuple[str, str]]) -> web.StreamResponse:
    """Send an answer as server-sent events, of which some have a name."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for name, data in events:
        head = f"event: {name}\n" if name else ""
        await response.write(f"{head}data: {data}\n\n".encode())
    await response.write_eof()
    return response
