"""The process that renders a chat template, and that may die of it. The other end is chat_template.py.

A template comes with a model, so from a stranger. Jinja's sandbox keeps it from Python's objects, but not from endless
loops, nor from texts that double until the memory is full; some of that happens inside of C code, or while Jinja folds
constants. Only the limits of a process bound all of it.

Questions and answers are JSON, each behind its length.
"""

from __future__ import annotations

import json
import os
import resource
import signal
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from rlhf_megatron.data.chat_template import frame, read_frame


class Generation(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}`` marks the assistant's text; here it is only written."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        """Return what stands between the tags, in a scope of its own, as with transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Any) -> Any:
        return caller()


def compile_template(text: str) -> jinja2.Template:
    """Compile a chat template in the sandbox and with the names that transformers gives it. Raises jinja2's errors."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    # Every rank is to make the same text of a conversation.
    del environment.filters["random"], environment.globals["lipsum"]
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _time_now}
    return environment.from_string(text)


def main(seconds: float, most_bytes: int, most_added: int) -> None:
    """Compile the template that comes first, and render conversations until the pipe closes.

    Args:
        seconds: of this processor for a compilation, or one conversation; then the process dies of SIGPROF.
        most_bytes: of memory, beyond what the process has now.
        most_added: characters of a text, beyond four for each of the conversation's.
    """
    answers, asked = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    # A scheduler's warnings reach every process of a job; the rank goes on for a while, and this process with it.
    for warning in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(warning, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + most_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    template: jinja2.Template | None = None
    while (question := read_frame(asked)) is not None:
        reply: Any
        signal.setitimer(signal.ITIMER_PROF, seconds)
        if template is None:
            template, reply = _compiled(question)
        else:
            reply = []
            for conversation in question["conversations"]:
                signal.setitimer(signal.ITIMER_PROF, seconds)
                reply.append(_rendered(template, conversation, question["names"], most_added))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        answers.write(frame(reply))
        answers.flush()


def _compiled(text: str) -> tuple[jinja2.Template | None, dict[str, str]]:
    """Return a template, or what is wrong with it."""
    try:
        return compile_template(text), {}
    except Exception as error:
        return None, {"error": _reason(error)}


def _rendered(template: jinja2.Template, conversation: Any, names: dict[str, Any], most_added: int) -> dict[str, str]:
    """Return a conversation's text; or why it is refused, or what makes the template unusable."""
    try:
        text = template.render(messages=conversation, **names)
        text.encode()
    except MemoryError:
        return {"unusable": "needs too much memory"}
    except UnicodeError:
        return {"unusable": "writes text that is not Unicode"}
    except Exception as error:
        return {"error": _reason(error)}
    if len(text) > most_added and len(text) > most_added + 4 * len(json.dumps(conversation, ensure_ascii=False)):
        return {"unusable": f"writes {len(text):,} characters around the messages"}
    return {"text": text}


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    lines = str(error).strip().splitlines()
    return lines[0][:500] if lines else type(error).__name__


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(message)


def _time_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Do what Jinja's own filter of this name does, but for escaping characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
