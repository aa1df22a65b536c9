"""HTML of the page from its templates: everything of a run is escaped, and no script runs but the page's own."""

from __future__ import annotations

import base64
import functools
import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from rlhf_megatron.monitor.kept_files import Token
from rlhf_megatron.monitor.numbers import number, signed

TEMPLATES = Path(__file__).with_name("templates")
# Differences of a token's logprobs that are shaded, weakly to strongly.
SHADES = (0.02, 0.1, 0.5)


def render(body: str, title: str, live: bool, **values: Any) -> str:
    """Return the whole page around the template ``body``."""
    script = Markup(_static("page.js"))
    return _encodable(
        _templates()
        .get_template("page.html.j2")
        .render(
            body=body,
            title=title,
            live=live,
            style=Markup(_static("page.css")),
            script=script,
            policy=policy(),
            made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            **values,
        )
    )


def render_part(body: str, **values: Any) -> str:
    """Return the page's content alone, which a live page puts in the place of what it shows."""
    return _encodable(_templates().get_template(body).render(live=True, **values))


@functools.cache
def policy() -> str:
    """Return the Content-Security-Policy: nothing from elsewhere, and of scripts only the page's, by its digest."""
    digest = base64.b64encode(hashlib.sha256(_static("page.js").encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'"
    )


def shade(token: Token) -> str:
    """Return the class of a token's colour: m1 to m3 where the trainer thinks it less likely, p1 to p3 where more."""
    size = sum(abs(token.difference or 0.0) >= limit for limit in SHADES)
    return f"{'m' if (token.difference or 0.0) < 0 else 'p'}{size}" if size else "near"


def numbers_of(token: Token) -> str:
    """Return what is known of a token, in a line each."""
    named = {
        "rollout logprob": token.rollout,
        "trainer logprob": token.trainer,
        "difference": token.difference,
        "advantage": token.advantage,
    }
    return "\n".join(f"{name} {value:.4g}" for name, value in named.items() if value is not None)


@functools.cache
def _templates() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(number=number, signed=signed, shade=shade, numbers=numbers_of)
    return made


@functools.cache
def _static(name: str) -> str:
    return _templates().get_template(name).render()


def _encodable(text: str) -> str:
    """Return text without half pairs of UTF-16, which JSON can hold but UTF-8 cannot."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
