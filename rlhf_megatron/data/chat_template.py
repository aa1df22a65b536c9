"""Chat templates: conversations to text, in a process that has limits of time and memory (template_process.py)."""

from __future__ import annotations

import contextlib
import copy
import json
import signal
import struct
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from rlhf_megatron.child_python import child_command
from rlhf_megatron.errors import DataError
from rlhf_megatron.untrusted import read_text, shown

Message = Mapping[str, Any]
Item = TypeVar("Item")

# Of a template file; those of published models have up to 20 kB.
MOST_TEMPLATE_BYTES = 2**20
# Of a conversation, all texts together. A million tokens have about four million.
MOST_CHARACTERS = 16 * 2**20
# What a template may write around the messages, the descriptions of tools with it.
MOST_ADDED_CHARACTERS = 2**20
# Of one conversation or the compilation. A template needs 0.1 ms and a few kilobytes for an ordinary prompt.
MOST_SECONDS = 5.0
MOST_BYTES = 2**30

_HEADER = struct.Struct(">Q")
_BOOTSTRAP = "from rlhf_megatron.data import template_process; template_process.main(*json.loads(sys.argv[2]))"
# Questions of which a template is to make different texts, and what may have been said before.
_PROBES = ("first probe", "second probe")
_BEFORE: Sequence[list[Message]] = (
    [],
    [{"role": "system", "content": "x"}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
)


class UnusableTemplate(DataError):
    """A template that is bad whatever the messages."""


class ChatTemplate:
    """A Jinja template that makes a text of a conversation. Safe to share between threads."""

    def __init__(self, text: Any, origin: str, names: Mapping[str, Any]) -> None:
        """Compile the template, and try it.

        Args:
            text: the template.
            origin: where it comes from, for messages.
            names: what it can read beside ``messages`` and ``add_generation_prompt``.

        Raises:
            UnusableTemplate: it is no text or no Jinja, takes too much time or memory, or ignores the messages.
        """
        if not isinstance(text, str):
            raise UnusableTemplate(f"{origin} is {type(text).__name__} instead of text; give a Jinja template")
        if len(text) > MOST_TEMPLATE_BYTES:
            raise UnusableTemplate(f"{origin} has {len(text):,} characters; at most {MOST_TEMPLATE_BYTES:,} are read")
        self._text, self._origin, self._names = text, origin, dict(names)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._try()

    @property
    def names(self) -> Mapping[str, Any]:
        """Variables that it can read beside ``messages`` and ``add_generation_prompt``."""
        return self._names

    def with_names(self, names: Mapping[str, Any]) -> ChatTemplate:
        """Return the same template, in the same process, with these names to read beside its own."""
        other = copy.copy(self)
        other._names = {**self._names, **names}
        return other

    def render_each(
        self, conversations: Sequence[Sequence[Message]], add_generation_prompt: bool = True
    ) -> list[str | DataError]:
        """Return the text of each conversation, or why there is none."""
        names = {**self._names, "add_generation_prompt": add_generation_prompt}
        texts: list[str | DataError] = []
        with self._lock:
            for part in in_parts(conversations, characters_of, MOST_CHARACTERS):
                replies = self._ask(part, names)
                if len(part) > 1 and any(isinstance(reply, DataError) for reply in replies):
                    replies = self._ask_one_by_one(part, names)
                texts += [reply if isinstance(reply, DataError) else self._text_of(reply) for reply in replies]
        return texts

    def _text_of(self, reply: dict[str, str]) -> str | DataError:
        if "unusable" in reply:
            return UnusableTemplate(f"{self._origin} {shown(reply['unusable'])}; fix it, or give another")
        if "error" in reply:
            return DataError(f"the chat template refuses these messages: {shown(reply['error'])}")
        return reply["text"]

    def _ask(self, conversations: list[Sequence[Message]], names: dict[str, Any]) -> list[Any]:
        """Return what the process says of each conversation; if it dies of one, the same error for all."""
        if len(conversations) == 1 and (length := characters_of(conversations[0])) > MOST_CHARACTERS:
            return [DataError(f"has {length:,} characters; at most {MOST_CHARACTERS:,} are read")]
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
            plain = [[dict(message) for message in messages] for messages in conversations]
            replies: list[Any] = self._exchange({"conversations": plain, "names": names})
        except UnusableTemplate as error:
            return [error] * len(conversations)
        return replies

    def _ask_one_by_one(self, conversations: list[Sequence[Message]], names: dict[str, Any]) -> list[Any]:
        """Do so, to find the one that the process dies of; those behind it get the same error."""
        replies: list[Any] = []
        for conversation in conversations:
            replies += self._ask([conversation], names)
            if isinstance(replies[-1], UnusableTemplate):
                replies += replies[-1:] * (len(conversations) - len(replies))
                break
        return replies

    def _start(self) -> None:
        """Start a process with the template compiled. Raises UnusableTemplate."""
        limits = (MOST_SECONDS, MOST_BYTES, MOST_ADDED_CHARACTERS)
        self._process = subprocess.Popen(
            child_command(_BOOTSTRAP, json.dumps(limits)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        weakref.finalize(self, _end, self._process)
        reply = self._exchange(self._text)
        if "error" in reply:
            _end(self._process)
            raise UnusableTemplate(
                f"{self._origin} is not valid Jinja: {shown(reply['error'])}; fix it, or give another"
            )

    def _exchange(self, question: Any) -> Any:
        """Send a question and return the answer. Raises UnusableTemplate where the process dies of it."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # its end is reported below
            process.stdin.write(frame(question))
            process.stdin.flush()
        reply = read_frame(process.stdout)
        if reply is not None:
            return reply
        _end(process)
        code = process.returncode
        if code == -signal.SIGPROF:
            why = f"takes more than {MOST_SECONDS:g} seconds"
        elif code < 0:
            why = f"ends its process by {signal.Signals(-code).name}"
        else:
            why = f"ends its process (status {code})"
        raise UnusableTemplate(f"{self._origin} {why}; it has an endless loop, or is not made for these messages")

    def _try(self) -> None:
        """Raise UnusableTemplate for a template that is bad whatever the messages, or that does not read them.

        It may refuse these conversations, as some do that want a system message or none.
        """
        with self._lock:
            self._start()
        for before in _BEFORE:
            texts = []
            for probe in _PROBES:
                texts += self.render_each([[*before, {"role": "user", "content": probe}]])
                if isinstance(texts[-1], UnusableTemplate):
                    raise texts[-1]
            if isinstance(texts[0], str) and texts[0] == texts[1]:
                raise UnusableTemplate(
                    f"{self._origin} ignores the messages: different questions become the same text; fix it, or give "
                    "another by data.chat_template"
                )
            for probe, text in zip(_PROBES, texts, strict=True):
                if isinstance(text, str) and probe not in text:
                    raise UnusableTemplate(
                        f"{self._origin} changes the question: {probe!r} is not in the text that it makes; fix it, or "
                        "give another by data.chat_template"
                    )


def read_template(path: str | Path) -> str:
    """Return the text of a Jinja file.

    Raises:
        DataError: it cannot be read, is no text in UTF-8, or too long.
    """
    try:
        return read_text(path, DataError, MOST_TEMPLATE_BYTES)
    except DataError as error:
        why = str(error).removeprefix(f"{shown(path)}: ")
        raise DataError(f"data.chat_template: {shown(path)} cannot be read ({why}); give a Jinja file") from error


def characters_of(messages: Sequence[Message]) -> int:
    """Return how many characters the contents of a conversation have."""
    return sum(len(message["content"] or "") for message in messages)


def in_parts(items: Sequence[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Yield items in their order, in lists whose sizes add up to ``most``; an item beyond that is alone."""
    part: list[Item] = []
    total = 0
    for item in items:
        if part and total + size(item) > most:
            yield part
            part, total = [], 0
        part.append(item)
        total += size(item)
    if part:
        yield part


def frame(value: Any) -> bytes:
    """Return a JSON value behind its length; what JSON has no form for, such as a date, becomes text."""
    content = json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")
    return _HEADER.pack(len(content)) + content


def read_frame(stream: IO[bytes]) -> Any:
    """Return the next value, or None at the end of the stream."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    length = _HEADER.unpack(header)[0]
    content = stream.read(length)
    return json.loads(content.decode("utf-8", "surrogatepass")) if len(content) == length else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and close its pipes."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # of what was still to be written
            pipe.close()
    process.wait()
