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


@dataclass
class JudgeServer:
    """What the server answers, and what it was asked; `answer` gets a prompt and returns the text of a message.

    `faults` are taken first, one a request: an HTTP status, or seconds of silence. `key` is the one it accepts.
    """

    answer: Callable[[str], str]
    url: str = ""
    key: str = ""
    pause: float = 0.0  # before every answer
    headers: dict[str, str] = field(default_factory=dict)  # of refusals
    faults: list[int | float] = field(default_factory=list)
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
