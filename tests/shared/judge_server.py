"""A real HTTP server on this machine that speaks the protocol of OpenAI's chat completions, with a judge by a rule."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def _body(
    body: bytes | str, kind: str = "application/json", **headers: str
) -> Callable[[BaseHTTPRequestHandler], None]:
    """Answers with this body."""
    raw = body.encode() if isinstance(body, str) else body

    def send(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        for name, value in {"content-type": kind, "content-length": str(len(raw)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(raw)

    return send


def _message(content: Any) -> str:
    """A body of the protocol whose message has this content."""
    return json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": content}}]})


def _forever(part: bytes, before: bytes = b"", pause: float = 0.0) -> Callable[[BaseHTTPRequestHandler], None]:
    """Sends a part again and again until the client goes; for at most a minute."""

    def send(handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        handler.wfile.write(before)
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            handler.wfile.write(part)
            handler.wfile.flush()
            time.sleep(pause)

    return send


def _raw(said: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    """Sends bytes that need not be HTTP, and hangs up."""

    def send(handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        handler.wfile.write(said)

    return send


_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
# What a server may do instead of answering. None of it is an answer that has a score.
BEHAVIOURS: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {
    "a web page": _body("<!doctype html><html><body>Sign in</body></html>", "text/html"),
    "a web page that says it is JSON": _body("<html></html>"),
    "an empty body": _body(""),
    "plain text": _body("ok", "text/plain"),
    "bad JSON": _body('{"choices": [{"mess'),
    "bad UTF-8": _body(b'{"choices": [{"message": {"content": "\xff\xfe\x80"}}]}'),
    "a number of 5,000 digits": _body('{"choices": ' + "7" * 5000 + "}"),
    "a score of 5,000 digits": _body(_message('{"score": ' + "7" * 5000 + "}")),
    "deep nesting": _body("[" * 100_000),
    "deeply nested choices": _body('{"choices": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "a deeply nested answer": _body(_message("[" * 100_000)),
    "a fence that never ends": _body(_message("```json" + " " * 100_000 + "x")),
    "no choices": _body('{"choices": []}'),
    "choices that are null": _body('{"choices": null}'),
    "choices that are an object": _body('{"choices": {"a": 1}}'),
    "choices that are a text": _body('{"choices": "none"}'),
    "no message": _body('{"choices": [{"message": null}]}'),
    "a message that is a text": _body('{"choices": [{"message": "0.5"}]}'),
    "a content that is a number": _body(_message(0.5)),
    "a content that is a list": _body(_message([{"type": "text", "text": "0.5"}])),
    "a content that is null": _body(_message(None)),
    "JSON that is a text": _body('"0.5"'),
    "JSON that is null": _body("null"),
    "an error with status 200": _body('{"error": {"message": "overloaded"}}'),
    "a stream of events": _body('data: {"choices": []}\n\ndata: [DONE]\n\n', "text/event-stream"),
    "no gzip": _body("plain", content_encoding="gzip"),
    "a body cut short": _raw(_HEAD + b'content-length: 999\r\n\r\n{"choices"'),
    "chunks that are none": _raw(_HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n"),
    "a closed connection": _raw(b""),
    "no HTTP": _raw(b"\x00\xff" * 50 + b"\r\n\r\n"),
    "a dripping body": _forever(b" ", _HEAD + b"content-length: 99999\r\n\r\n", 0.05),
    "dripping headers": _forever(b"x-more: 1\r\n", _HEAD, 0.05),
    "a body without end": _forever(b" " * 65_536, _HEAD + b"content-length: 99999999999\r\n\r\n"),
}


@dataclass
class JudgeServer:
    """What the server answers, and what it was asked; `answer` gets a prompt and returns the text of a message.

    `faults` are taken first, one a request: an HTTP status, seconds of silence, or a name of BEHAVIOURS. `listing` is
    such a name for the list of models. `key` is the one it accepts.
    """

    answer: Callable[[str], str]
    url: str = ""
    key: str = ""
    pause: float = 0.0  # before every answer
    headers: dict[str, str] = field(default_factory=dict)  # of refusals
    faults: list[int | float | str] = field(default_factory=list)
    listing: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)  # bodies, in the order in which they came
    times: list[float] = field(default_factory=list)
    open_now: int = 0
    most_open: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.asked]


@contextmanager
def judge_server(answer: Callable[[str], str]) -> Iterator[JudgeServer]:
    """A server on a free port, for as long as the context is open."""
    state = JudgeServer(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if state.listing:
                return BEHAVIOURS[state.listing](self)
            refused = bool(state.key) and self.headers["Authorization"] != f"Bearer {state.key}"
            self._send(401 if refused else 200, {"object": "list", "data": []})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                state.asked.append(body)
                state.times.append(time.monotonic())
                state.open_now += 1
                state.most_open = max(state.most_open, state.open_now)
                fault = state.faults.pop(0) if state.faults else None
            time.sleep(fault if isinstance(fault, float) else state.pause)
            with state.lock:
                state.open_now -= 1
            if state.key and self.headers["Authorization"] != f"Bearer {state.key}":
                return self._send(401, {"error": {"message": "wrong key"}})
            if isinstance(fault, str):
                return BEHAVIOURS[fault](self)
            if isinstance(fault, int):
                return self._send(fault, {"error": {"message": f"fault {fault}"}})
            message = {"role": "assistant", "content": state.answer(body["messages"][0]["content"])}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            said = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
            self._send(200, said)

        def _send(self, status: int, content: dict[str, Any]) -> None:
            raw = json.dumps(content).encode()
            self.send_response(status)
            for name, value in (state.headers if status != 200 else {}).items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:  # a client that gave up
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
