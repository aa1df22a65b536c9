"""Servers on 127.0.0.1 that answer bytes as they please: each kind is a function of a connection, of which the first
request has been read."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Behaviour = Callable[[socket.socket, int], None]

OK = b"HTTP/1.1 200 OK\r\n"
SCORE = b'{"scores": [1.0]}'


class RawService:
    """Service that takes connections until it is closed; ``behave`` gets each with the number of requests before it."""

    def __init__(self, behave: Behaviour, reads_request: bool = True) -> None:
        self._behave, self._reads = behave, reads_request
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/score"
        self.requests: list[bytes] = []
        self.open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.open.add(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            self.requests.append(read_request(connection) if self._reads else b"")
            self._behave(connection, len(self.requests) - 1)
        self.open.discard(connection)

    def close(self) -> None:
        self._listener.close()
        for connection in list(self.open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving(behave: Behaviour, reads_request: bool = True) -> Iterator[RawService]:
    service = RawService(behave, reads_request)
    try:
        yield service
    finally:
        service.close()


def read_request(connection: socket.socket) -> bytes:
    content = b""
    while b"\r\n\r\n" not in content:
        content += _some(connection)
    head, _, body = content.partition(b"\r\n\r\n")
    length = next(int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-l"))
    while len(body) < length:
        body += _some(connection)
    return head + b"\r\n\r\n" + body


def _some(connection: socket.socket) -> bytes:
    part = connection.recv(65536)
    if not part:
        raise OSError("the client has gone")
    return part


def answer(body: bytes, head: bytes = OK, length: int | None = None) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n" % (len(body) if length is None else length) + body


def sends(content: bytes) -> Behaviour:
    """Send it all and close the connection."""

    def behave(connection: socket.socket, before: int) -> None:
        connection.sendall(content)

    return behave


def then_waits(content: bytes) -> Behaviour:
    """Send it all and keep the connection."""

    def behave(connection: socket.socket, before: int) -> None:
        connection.sendall(content)
        while connection.recv(65536):
            pass

    return behave


def drips(before_it: bytes, dripped: bytes, seconds: float = 0.02) -> Behaviour:
    """Send a beginning at once, and the rest again and again, a byte at a time."""

    def behave(connection: socket.socket, before: int) -> None:
        connection.sendall(before_it)
        while True:
            for place in range(len(dripped)):
                connection.sendall(dripped[place : place + 1])
                time.sleep(seconds)

    return behave


def floods(before_it: bytes, repeated: bytes) -> Behaviour:
    """Send a beginning, and then the same as fast as it can."""

    def behave(connection: socket.socket, before: int) -> None:
        connection.sendall(before_it)
        block = repeated * (1 + 65536 // len(repeated))
        while True:
            connection.sendall(block)

    return behave


def resets(content: bytes) -> Behaviour:
    """Send it and break the connection off."""

    def behave(connection: socket.socket, before: int) -> None:
        connection.sendall(content)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    return behave


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"

# Nothing comes of them, and their connection is open until the client closes it.
ENDLESS: dict[str, Behaviour] = {
    "says nothing": then_waits(b""),
    "headers byte by byte": drips(OK, b"X-Header: value\r\n"),
    "one header without end": drips(OK + b"X-Header: ", b"a"),
    "status line byte by byte": drips(b"HTTP/1.1 200 ", b"O"),
    "blank lines before the answer": drips(b"", b"\r\n"),
    "100 Continue, dripped": drips(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "100 Continue, flooded": floods(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "103 Early Hints, flooded": floods(b"", b"HTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\n"),
    "body byte by byte": drips(OK + b"Content-Length: 100000\r\n\r\n", b" "),
    "body until the end, dripped": drips(OK + b"\r\n", b" "),
    "chunks byte by byte": drips(CHUNKED, b"1\r\na\r\n"),
    "chunk size without end": drips(CHUNKED, b"0"),
    "chunk extension without end": drips(CHUNKED + b"5;", b"a"),
    "trailers without end": drips(CHUNKED + b"0\r\n", b"X-Trailer: a\r\n"),
    "body that stops": then_waits(answer(b'{"scores"', length=17)),
    "chunk that stops": then_waits(CHUNKED + b"11\r\n{"),
    "last chunk that does not come": then_waits(CHUNKED + b"11\r\n" + SCORE + b"\r\n"),
    "error body byte by byte": drips(b"HTTP/1.1 500 Oh\r\nContent-Length: 100000\r\n\r\n", b"a"),
    "error body byte by byte, 401": drips(b"HTTP/1.1 401 No\r\nContent-Length: 100000\r\n\r\n", b"a"),
    "error headers byte by byte": drips(b"HTTP/1.1 503 Oh\r\n", b"X-Header: value\r\n"),
    "redirect, dripped": drips(b"HTTP/1.1 302 Found\r\nLocation: /a\r\n", b"X: a\r\n"),
}

# A connection that ends or bytes that are no answer: another attempt may help.
NO_ANSWER: dict[str, Behaviour] = {
    "closes at once": sends(b""),
    "breaks off at once": resets(b""),
    "breaks off in the headers": resets(OK + b"X: "),
    "closes in the headers": sends(OK + b"X: a"),
    "closes in the body": sends(answer(SCORE[:5], length=17)),
    "breaks off in the body": resets(answer(SCORE[:5], length=17)),
    "closes in a chunk": sends(CHUNKED + b"11\r\n{"),
    "HTTP/0.9": sends(SCORE),
    "HTML without HTTP": sends(b"<html><body>hello</body></html>\r\n\r\n"),
    "bytes of anything": sends(bytes(range(256)) * 4),
    "TLS on a plain port": sends(b"\x15\x03\x01\x00\x02\x02\x28"),
    "SSH": then_waits(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "SMTP": then_waits(b"220 mail.example.org ESMTP\r\n"),
    "HTTP/2 preface": then_waits(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" + b"\x00" * 18),
    "HTTP/3.7": sends(b"HTTP/3.7 200 OK\r\n\r\n"),
    "status of one digit": sends(b"HTTP/1.1 2 OK\r\n\r\n"),
    "status 999999": sends(b"HTTP/1.1 999999 OK\r\n\r\n"),
    "negative status": sends(b"HTTP/1.1 -200 OK\r\n\r\n"),
    "no status": sends(b"HTTP/1.1\r\n\r\n"),
    "header without colon": sends(OK + b"nonsense\r\n\r\n" + SCORE),
    "header with NUL": sends(OK + b"X: a\0b\r\n\r\n" + SCORE),
    "header of 10 MB": sends(OK + b"X: " + b"a" * 10**7 + b"\r\n\r\n" + SCORE),
    "100,000 headers": sends(OK + b"X: a\r\n" * 10**5 + b"\r\n" + SCORE),
    "headers without end, flooded": floods(OK, b"X: a\r\n"),
    "Content-Length -1": sends(OK + b"Content-Length: -1\r\n\r\n" + SCORE),
    "Content-Length x": sends(OK + b"Content-Length: x\r\n\r\n" + SCORE),
    "Content-Length 1e30": sends(OK + b"Content-Length: 1" + b"0" * 30 + b"\r\n\r\n" + SCORE),
    "two Content-Lengths": sends(OK + b"Content-Length: 17\r\nContent-Length: 5\r\n\r\n" + SCORE),
    "chunk size x": sends(CHUNKED + b"x\r\n" + SCORE),
    "chunk size -1": sends(CHUNKED + b"-1\r\n" + SCORE),
    "chunk size of 30 digits": sends(CHUNKED + b"f" * 30 + b"\r\n" + SCORE),
    "unknown transfer encoding": sends(OK + b"Transfer-Encoding: bogus\r\n\r\n" + SCORE),
    "longer than announced, then HTTP": sends(b"HTTP/1.1 100 Continue\r\n\r\n" + b"x" * 200),
}


def _scores(text: str) -> Behaviour:
    return sends(answer(b'{"scores": %s}' % text.encode()))


# Whole answers over HTTP that are not one finite number for the one sample.
WRONG_ANSWER: dict[str, Behaviour] = {
    "nothing": sends(answer(b"")),
    "204": sends(b"HTTP/1.1 204 No Content\r\n\r\n"),
    "205 with a body": sends(answer(b"x", b"HTTP/1.1 205 Reset\r\n")),
    "304": sends(b"HTTP/1.1 304 Not Modified\r\n\r\n"),
    "301 to elsewhere": sends(answer(b"", b"HTTP/1.1 301 Moved\r\nLocation: http://127.0.0.1:1/\r\n")),
    "307 to itself": sends(answer(b"", b"HTTP/1.1 307 Again\r\nLocation: /score\r\n")),
    "308 to a file": sends(answer(b"", b"HTTP/1.1 308 There\r\nLocation: file:///etc/passwd\r\n")),
    "101": then_waits(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"),
    "401 for a login": sends(answer(b"no", b'HTTP/1.1 401 No\r\nWWW-Authenticate: Basic realm="a"\r\n')),
    "407": sends(answer(b"no", b"HTTP/1.1 407 Proxy\r\nProxy-Authenticate: Basic\r\n")),
    "666": sends(answer(b"beast", b"HTTP/1.1 666 Beast\r\n")),
    "reason of control characters": sends(answer(b"\x1b[31mred\x07\r\n\x00", b"HTTP/1.1 404 \xff\xfe caf\xe9\r\n")),
    "error body without end": floods(b"HTTP/1.1 400 Bad\r\n\r\n", b"a\x1b[2Jb\r\n"),
    "error body of UTF-16": sends(answer("grün".encode("utf-16"), b"HTTP/1.1 400 Bad\r\n")),
    "HTML": sends(answer(b"<html>\n<h1>hello\x1b[31m</h1>")),
    "not UTF-8": sends(answer(b'{"scores": ["\xff\xfe"]}')),
    "gzip": sends(answer(gzip.compress(SCORE), OK + b"Content-Encoding: gzip\r\n")),
    "gzip bomb": sends(answer(gzip.compress(b" " * 10**7), OK + b"Content-Encoding: gzip\r\n")),
    "body without end": floods(OK + b"\r\n", b" "),
    "chunks without end": floods(CHUNKED, b"1\r\n \r\n"),
    "deep lists": sends(answer(b"[" * 100_000)),
    "deep lists that end": sends(answer(b"[" * 100_000 + b"]" * 100_000)),
    "deep objects": sends(answer(b'{"scores":' * 50_000 + b"1" + b"}" * 50_000)),
    "deep score": _scores("[" + "[" * 500 + "]" * 500 + "]"),
    "very deep score": _scores("[" + "[" * 5000 + "]" * 5000 + "]"),
    "deep beside the scores": sends(answer(b'{"scores": [1.0], "more": ' + b"[" * 5000 + b"]" * 5000 + b"}")),
    "integer of 10,000 digits": _scores("[1" + "0" * 10_000 + "]"),
    "integer beyond float64": _scores("[1" + "0" * 400 + "]"),
    "NaN": _scores("[NaN]"),
    "Infinity": _scores("[Infinity]"),
    "-Infinity": _scores("[-Infinity]"),
    "1e999": _scores("[1e999]"),
    "null": _scores("[null]"),
    "text": _scores('["1.0"]'),
    "text with line breaks": _scores('["1.0\\n\\u001b[31merror: "]'),
    "list": _scores("[[1.0]]"),
    "object": _scores('[{"score": 1.0}]'),
    "scores are an object": _scores('{"0": 1.0}'),
    "scores are text": _scores('"1\\n"'),
    "scores are a number": _scores("1.0"),
    "scores are null": _scores("null"),
    "no scores": _scores("[]"),
    "two scores": _scores("[1.0, 2.0]"),
    "a million scores": _scores("[" + "0," * 10**6 + "0]"),
    "a list": sends(answer(b"[1.0]")),
    "a number": sends(answer(b"1.0")),
    "null alone": sends(answer(b"null")),
    "text alone": sends(answer(b'"scores"')),
    "score": sends(answer(b'{"score": 1.0}')),
    "Scores": sends(answer(b'{"Scores": [1.0]}')),
    "scores twice": sends(answer(b'{"scores": [1.0], "scores": [0.0]}')),
    "two values": sends(answer(SCORE + b"\n" + SCORE)),
    "JSON lines": sends(answer(b'{"scores": [1.0]}\n{"scores": [0.0]}\n')),
    "a comma too many": _scores("[1.0,]"),
    "single quotes": sends(answer(b"{'scores': [1.0]}")),
    "cut": sends(answer(SCORE[:-1])),
    "longer than its length": sends(answer(SCORE + b"!", length=18)),
    "NUL": sends(answer(b"\0" * 17)),
}

# Odd, and right.
RIGHT_ANSWER: dict[str, Behaviour] = {
    "plain": sends(answer(SCORE)),
    "connection kept": then_waits(answer(SCORE)),
    "chunked": sends(CHUNKED + b"5\r\n" + SCORE[:5] + b"\r\nc;a=b\r\n" + SCORE[5:] + b"\r\n0\r\nX: a\r\n\r\n"),
    "until the end": sends(OK + b"\r\n" + SCORE),
    "HTTP/1.0": sends(b"HTTP/1.0 200 OK\r\n\r\n" + SCORE),
    "no reason": sends(answer(SCORE, b"HTTP/1.1 200\r\n")),
    "201": sends(answer(SCORE, b"HTTP/1.1 201 Created\r\n")),
    "100 Continue before": sends(b"HTTP/1.1 100 Continue\r\n\r\n" * 3 + answer(SCORE)),
    "line feeds alone": sends(b"HTTP/1.1 200 OK\nContent-Length: 17\n\n" + SCORE),
    "the same length twice": sends(answer(SCORE, OK + b"Content-Length: 17\r\n")),
    "surplus": sends(answer(SCORE) + b"surplus"),
    "surplus that is an answer": then_waits(answer(SCORE) + answer(b'{"scores": [9.0]}')),
    "byte order mark": sends(answer(b"\xef\xbb\xbf" + SCORE)),
    "UTF-16": sends(answer(SCORE.decode().encode("utf-16"))),
    "another charset's name": sends(answer(SCORE, OK + b"Content-Type: text/plain; charset=bogus\r\n")),
    "spaces": sends(answer(b" \n\t" + SCORE + b"\r\n ")),
    "more keys": sends(answer(b'{"scores": [1.0], "model": "judge", "usage": {"tokens": [[1]]}}')),
    "whole number": _scores("[1]"),
    "true": _scores("[true]"),
    "exponent": _scores("[10e-1]"),
    "many headers": sends(answer(SCORE, OK + b"".join(b"X-%d: a\r\n" % number for number in range(90)))),
    "large header": sends(answer(SCORE, OK + b"X: " + b"a" * 60_000 + b"\r\n")),
    "header beyond ASCII": sends(answer(SCORE, OK + b"X: caf\xe9 \xff\r\n")),
    "cookies": sends(answer(SCORE, OK + b"Set-Cookie: a=b; Path=/; Domain=127.0.0.1\r\nSet-Cookie: \xff\r\n")),
    "slow, in time": drips(b"", answer(SCORE), 0.001),
}

assert json.loads(SCORE) == {"scores": [1.0]}
