"""Tools that the model calls: functions in files, and MCP servers. A worker process (worker.py) holds a trajectory's.

A server is started or connected to when the model first calls what no function is named like, and keeps its state until
the trajectory ends. Calls that the model got wrong do not come here (generation/tool_turns.py).
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from rlhf_megatron.rewards import user_function
from rlhf_megatron.rewards.user_environment import Reply, TimedOut, _limited
from rlhf_megatron.rewards.user_function import FunctionFailure, FunctionUnusable, Interface

INTERFACE = Interface("rollout.multi_turn.tools", "tool", None, "return a text that says so")
# What is asked of tools.
DESCRIBE, CALL, CLOSE = "describe", "call", "close"
# Of the package mcp, whose client is a class since then.
MCP_NEEDED = "mcp>=2"
MOST_PAGES = 100
# A server's own time is up before the alarm that interrupts functions.
_SECONDS_TO_INTERRUPT = 1.0
_SECONDS_TO_END = 5.0


class _Process:
    """Of this process: functions by specification, and servers that are connected, by their place among the tools."""

    functions: ClassVar[dict[str, Callable[..., Any]]] = {}
    servers: ClassVar[dict[int, _Server]] = {}


class _Server:
    """One connection to an MCP server, opened and closed by a task of its own, as the client wants it."""

    def __init__(self, section: Mapping[str, Any], seconds: float) -> None:
        """Connect. Raises FunctionFailure where that cannot be done, and TimedOut."""
        self.name = section["url"] or " ".join(section["command"])
        self._ended, self._ready = asyncio.Event(), asyncio.Event()
        self._task = user_function.event_loop().create_task(self._hold(section))
        ready = user_function.event_loop().create_task(self._ready.wait())
        _run(asyncio.wait({self._task, ready}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED))
        if not self._ready.is_set():
            failed = self._task.done()
            error = self._task.exception() if failed else None
            self.close()
            ready.cancel()
            if not failed:
                raise TimedOut
            raise FunctionFailure(f"the MCP server {self.name} cannot be reached: {_innermost(error)}")

    async def _hold(self, section: Mapping[str, Any]) -> None:
        client, parameters = _mcp()
        command = section["command"]
        target = section["url"] or parameters(command=command[0], args=list(command[1:]))
        async with client(target) as self.client:
            self.tools = await _listed(self.client)
            self._ready.set()
            await self._ended.wait()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of a tool's result. Raises FunctionFailure where the server says that it failed."""
        result = await self.client.call_tool(name, dict(arguments))
        parts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
        if not parts and result.structured_content is not None:
            parts = [json.dumps(result.structured_content, ensure_ascii=False)]
        if result.is_error:
            raise FunctionFailure(" ".join(parts) or f"{name} failed")
        return "\n".join(parts)

    def close(self) -> None:
        """End the connection, and the server if it was started here."""
        self._ended.set()
        if not self._ready.is_set():
            self._task.cancel()
        _run(asyncio.wait({self._task}, timeout=_SECONDS_TO_END))


def load(job: Mapping[str, Any]) -> None:
    """Run the files of the functions.

    Raises:
        FunctionUnusable: one is missing, fails when it is run, or lacks its function; or there is no MCP client.
    """
    for specification in job["functions"]:
        if specification not in _Process.functions:
            _Process.functions[specification] = _loaded(specification)
    if job["servers"]:
        _mcp()
    if job.get("call") == DESCRIBE:
        _schema_of(_nothing)  # imports torch, among others: before the clock starts


def call(job: dict[str, Any]) -> Reply:
    """Do what a job asks of the tools, within its time.

    Returns:
        Descriptions, each as JSON in a message, or the text of a call's result as one.

    Raises:
        FunctionUnusable: a function cannot be described to the model, or two tools have one name.
        FunctionFailure: the tool failed.
        TimedOut: it took too long.
    """
    if job["call"] == DESCRIBE:
        texts = [json.dumps(each, ensure_ascii=False) for each in _described(job)]
        if max(map(len, texts), default=0) > job["most"]:
            raise FunctionUnusable(f"a tool's description has more than {job['most']:,} characters; shorten it")
        return Reply([{"role": "tool", "content": text} for text in texts])
    if job["call"] == CALL:
        with _limited(job["timeout_seconds"] + _SECONDS_TO_INTERRUPT):
            text = _text(_called(job))
        return Reply([{"role": "tool", "content": str.encode(text, "utf-8", "replace").decode()}])
    while _Process.servers:
        _Process.servers.popitem()[1].close()
    return Reply([])


def _loaded(specification: str) -> Callable[..., Any]:
    """Return a function; those of one file share what the file defines."""
    path, name = user_function.split_specification(specification, INTERFACE.default_name)
    for other, function in _Process.functions.items():
        if user_function.split_specification(other, INTERFACE.default_name)[0] == path:
            other_function = getattr(sys.modules.get(function.__module__), name, None)
            if callable(other_function):
                return other_function
    return user_function.load(specification, INTERFACE)


def _name_of(specification: str) -> str:
    return user_function.split_specification(specification, INTERFACE.default_name)[1]


def _described(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools as chat templates describe them."""
    described = [_schema(specification) for specification in job["functions"]]
    try:
        for index in range(len(job["servers"])):
            described += _server(job, index).tools
    except (FunctionFailure, TimedOut) as error:
        raise FunctionUnusable(str(error) or f"the MCP server {index} of the tools does not answer") from error
    names = [each["function"]["name"] for each in described]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated:
        raise FunctionUnusable(f"two tools have the name {repeated!r}; leave one out")
    return described


def _nothing(text: str) -> None:
    """Do nothing.

    Args:
        text: Of any kind.
    """


def _schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    schema: dict[str, Any] = get_json_schema(function)
    return schema


def _schema(specification: str) -> dict[str, Any]:
    try:
        schema = _schema_of(_Process.functions[specification])
    except Exception as error:
        raise FunctionUnusable(
            f"{specification} cannot be described to the model: {user_function.text_of(error)}; give each argument a "
            "type, and a line under Args: in the docstring"
        ) from error
    return {"type": "function", "function": schema["function"] | {"name": _name_of(specification)}}


def _called(job: dict[str, Any]) -> Any:
    name, arguments = job["name"], job["arguments"]
    for specification in job["functions"]:
        if _name_of(specification) == name:
            return _returned(specification, arguments)
    for index in range(len(job["servers"])):
        server = _server(job, index)
        if any(tool["function"]["name"] == name for tool in server.tools):
            return _within(server.call(name, arguments), job["timeout_seconds"])
    raise FunctionFailure(f"there is no tool {name}")


def _returned(specification: str, arguments: Mapping[str, Any]) -> Any:
    """Return what a function returns, awaited where it is to be."""
    try:
        result = _Process.functions[specification](**arguments)
        return user_function.event_loop().run_until_complete(result) if inspect.isawaitable(result) else result
    except TimedOut:
        raise
    except BaseException as error:
        raise FunctionFailure(user_function.describe(error)) from error


def _text(result: Any) -> str:
    if isinstance(result, str):
        return str(result)
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return user_function.shown_value(result)


def _server(job: Mapping[str, Any], index: int) -> _Server:
    if index not in _Process.servers:
        _Process.servers[index] = _Server(job["servers"][index], job["timeout_seconds"])
    return _Process.servers[index]


def _within(awaitable: Any, seconds: float) -> Any:
    """Return the result of a server's call. Raises TimedOut, and FunctionFailure where it has none."""
    try:
        return _run(asyncio.wait_for(awaitable, seconds))
    except (FunctionFailure, TimedOut):
        raise
    except TimeoutError as error:
        raise TimedOut from error
    except Exception as error:
        raise FunctionFailure(_innermost(error)) from error


def _run(awaitable: Any) -> Any:
    return user_function.event_loop().run_until_complete(awaitable)


async def _listed(client: Any) -> list[dict[str, Any]]:
    """Return the server's own list, in the form of chat templates."""
    tools: Sequence[Any] = []
    cursor = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools, cursor = [*tools, *page.tools], page.next_cursor
        if not cursor:
            break
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
        }
        for tool in tools
    ]


def _mcp() -> tuple[Any, Any]:
    """Return the client of the package mcp, and what it wants to know of a server that it is to start."""
    try:
        package, module = importlib.import_module("mcp"), importlib.import_module("mcp.client.client")
    except ImportError as error:
        raise FunctionUnusable(
            f"MCP servers need the package mcp ({user_function.text_of(error)}); pip install '{MCP_NEEDED}'"
        ) from error
    return module.Client, package.StdioServerParameters


def _innermost(error: BaseException | None) -> str:
    """Return the first of the errors that a group of tasks had."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return user_function.describe(error) if error else "it ended"
