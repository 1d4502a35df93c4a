"""Asks a model behind an OpenAI-compatible endpoint: in parallel, at a limited rate, again after errors."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lab.checks import require, require_not_negative, require_positive
from grpo_lab.tasks.cache import cache_root
from grpo_lab.tracking.activity import doing

if TYPE_CHECKING:
    from openai import AsyncOpenAI

IN_CACHE = "shared"  # the name of the file in grpo_lab's own cache
_LONGEST_BODY = 16 << 20  # bytes; no answer needs more, and a server may send without end
# What reading a body as an answer may raise: it is no JSON, no UTF-8, too deep, or of another form.
_NO_ANSWER = (ValueError, RecursionError, LookupError, TypeError, AttributeError)
_warned: set[tuple[str, str]] = set()
logger = logging.getLogger("grpo_lab.tasks")


def warn_once(model: str, kind: str, message: str) -> None:
    """Log why answers of a model are not used, once for each kind of reason in a process."""
    if (model, kind) not in _warned:
        _warned.add((model, kind))
        logger.warning("%s", message)


@dataclass(frozen=True)
class Endpoint:
    """A model on a server that speaks OpenAI's protocol, and how it is asked.

    Every answer is kept under a hash of model, prompt and settings, so a run that is killed and resumed reads the same
    answers. The address is no part of it: a model's name is taken at its word.
    """

    base_url: str  # such as http://127.0.0.1:8000/v1; "" for OPENAI_BASE_URL, else OpenAI's own
    model: str
    key_from: str  # the environment variable with the key; "" for a server that asks for none
    settings: dict[str, Any]  # what else is in the request: temperature, max_tokens, seed, and what the server knows
    structured: bool  # hold the answer to its form by response_format
    parallel: int  # requests at a time
    per_minute: int  # requests, repeated ones included; 0 sets no limit
    seconds: float  # for a whole answer, after which a request is repeated
    retries: int  # of a request, with growing pauses, after that time, 408, 409, 429 or 500 and above
    cache: str  # a file; shared: one in grpo_lab's cache; "": the memory of this process

    def __post_init__(self) -> None:
        require(bool(self.model), "model", "''", "a text", "say which model the server is to ask")
        require(self.parallel >= 1, "parallel", self.parallel, "at least 1", "it is the maximum of concurrent requests")
        require_not_negative(self, "per_minute", "retries")
        require_positive(self, "seconds")

    def check(self) -> None:
        """Raise ValueError with a remedy if the package, the key, the server or the cache is missing."""
        _live(self).reach()

    def ask(self, prompts: Sequence[str], form: Mapping[str, Any]) -> list[str | None]:
        """The answer to each prompt; None where none came. `form` is the JSON schema of an answer.

        Raises ValueError with a remedy if no prompt at all was answered, or if the server refuses key or model.
        """
        return _live(self).ask(list(prompts), form)


_opened: dict[str, _Live] = {}
_opening = threading.Lock()


def _live(endpoint: Endpoint) -> _Live:
    """The pace and cache of an endpoint, one for each in a process."""
    named = json.dumps([os.getpid(), vars(endpoint), _address(endpoint)], sort_keys=True, default=str)
    with _opening:
        if named not in _opened:
            _opened[named] = _Live(endpoint)
        return _opened[named]


def _address(endpoint: Endpoint) -> str:
    return endpoint.base_url or os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1")


class _Live:
    """An endpoint's pace and cache, for all threads of a process."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint, self.address = endpoint, _address(endpoint)
        self.pace = _Pace(endpoint.per_minute)
        self._client()  # raises where package or key are missing
        self.answers = _Answers(endpoint.cache)
        self.error = ""  # of the last request that had no answer

    def _client(self) -> AsyncOpenAI:
        """A client, which belongs to one event loop."""
        endpoint, pace = self.endpoint, self.pace
        try:
            import httpx2  # which openai needs itself
            import openai
        except ImportError as error:
            raise ValueError("a judge is asked through the package openai: pip install 'grpo-lab[judge]'") from error
        key = os.environ.get(endpoint.key_from) if endpoint.key_from else "none"
        if not key:
            raise ValueError(
                f"the environment variable {endpoint.key_from} is empty: put the key of {self.address} into it, or set "
                "key_from='' for a server that asks for none"
            )

        class Bounded(openai.DefaultAsyncHttpxClient):
            """Sends every request, repeated ones too, at the pace, and bounds the time and size of its response."""

            async def send(self, request: Any, **settings: Any) -> Any:
                await pace.wait()
                try:
                    async with asyncio.timeout(endpoint.seconds):
                        response = await super().send(request, **{**settings, "stream": True})
                        body = await _read(response)
                except TimeoutError as error:
                    raise httpx2.ReadTimeout(f"no whole answer in {endpoint.seconds:g} s", request=request) from error
                encoded = ("content-encoding", "content-length", "transfer-encoding")  # what the body no longer is
                headers = {name: value for name, value in response.headers.items() if name not in encoded}
                return httpx2.Response(response.status_code, headers=headers, content=body, request=request)

        async def _read(response: httpx2.Response) -> bytes:
            body = bytearray()
            async with contextlib.aclosing(response):
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > _LONGEST_BODY:
                        raise openai.OpenAIError(f"the body is longer than {_LONGEST_BODY} bytes")
            return bytes(body)

        return openai.AsyncOpenAI(
            api_key=key,
            base_url=self.address,
            timeout=endpoint.seconds,
            max_retries=endpoint.retries,
            http_client=Bounded(timeout=endpoint.seconds),
        )

    def reach(self) -> None:
        """Raise ValueError if the server cannot be reached or refuses the key. Not every server lists its models."""
        import openai

        async def listed() -> None:
            async with self._client() as client:
                await client.models.list()

        try:
            asyncio.run(listed())
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise ValueError(self._refused(error)) from error
        except openai.APIConnectionError as error:
            raise ValueError(
                f"no server answers at {self.address} ({_reason(error)}): start it (vllm serve {self.endpoint.model}), "
                "or correct base_url"
            ) from error
        except openai.APIStatusError:
            pass
        except (openai.OpenAIError, *_NO_ANSWER) as error:
            raise ValueError(
                f"{self.address}/models is no list of models ({_reason(error)}): what answers there does not speak "
                "OpenAI's protocol, such as a web page or a proxy. Correct base_url, which often ends in /v1"
            ) from error

    def ask(self, prompts: list[str], form: Mapping[str, Any]) -> list[str | None]:
        endpoint = self.endpoint
        request = {"model": endpoint.model, **endpoint.settings}
        if endpoint.structured:
            schema = {"name": "answer", "strict": True, "schema": form}
            request["response_format"] = {"type": "json_schema", "json_schema": schema}
        keys = {prompt: _hash([request, prompt]) for prompt in prompts}
        found = {prompt: self.answers.get(key) for prompt, key in keys.items()}
        left = {prompt: keys[prompt] for prompt, answer in found.items() if answer is None}
        if left:
            found |= asyncio.run(self._answers_to(left, request))
        missing = sum(answer is None for answer in found.values())
        if missing and missing == len(found):
            raise ValueError(
                f"{endpoint.model} at {self.address} answered none of {len(found)} requests (the last: {self.error}): "
                "see that the server runs and has that model, that it knows what settings hold, and set "
                "structured=false if it knows no response_format"
            )
        if missing:
            kind = self.error.partition(":")[0]
            message = (
                f"{endpoint.model} at {self.address} gave no answer to {missing} of {len(found)} requests, which are"
            )
            warn_once(
                endpoint.model, kind, f"{message} not graded ({self.error}); the next ones of this kind are not shown"
            )
        return [found[prompt] for prompt in prompts]

    async def _answers_to(self, keys: Mapping[str, str], request: Mapping[str, Any]) -> dict[str, str | None]:
        """The answer to each prompt of `keys`, a few at a time."""
        places = asyncio.Semaphore(self.endpoint.parallel)

        async def one(prompt: str, key: str) -> str | None:
            async with places:
                answer = await self._one(client, prompt, key, request)
                shown.done += 1
                return answer

        with doing(f"asking {self.endpoint.model}", len(keys), "answers") as shown:
            async with self._client() as client:
                return dict(zip(keys, await asyncio.gather(*(one(*each) for each in keys.items()))))

    async def _one(self, client: AsyncOpenAI, prompt: str, key: str, request: Mapping[str, Any]) -> str | None:
        """The answer to one prompt, kept at once; None if none came."""
        import openai

        try:
            text = await client.chat.completions.create(
                model=self.endpoint.model, messages=[{"role": "user", "content": prompt}], extra_body=dict(request)
            )
            answer = text.choices[0].message.content or ""
            if not isinstance(answer, str):
                raise TypeError(f"the content of a message is a text, got {str(answer)[:100]}")
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            raise ValueError(self._refused(error)) from error
        except (openai.OpenAIError, *_NO_ANSWER) as error:
            self.error = _reason(error)
            return None
        return await asyncio.to_thread(self.answers.put, key, answer)

    def _refused(self, error: Exception) -> str:
        key = f"the key in {self.endpoint.key_from}" if self.endpoint.key_from else "key_from, which names no key"
        return f"{self.address} refuses {self.endpoint.model} ({str(error)[:200]!r}): correct base_url, model or {key}"


def _reason(error: BaseException) -> str:
    """The error of a request in one line: the error, and the one that it came from."""
    cause = error.__cause__
    below = "" if cause is None else f" ({type(cause).__name__}: {str(cause)[:100]!r})"
    return f"{type(error).__name__}: {str(error)[:200]!r}{below}"


def _hash(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode("utf-8", "surrogatepass")).hexdigest()


class _Pace:
    """Space requests evenly, at most `per_minute`; 0 sets no limit."""

    def __init__(self, per_minute: int) -> None:
        self.gap, self.free, self.lock = 60 / per_minute if per_minute else 0.0, 0.0, threading.Lock()

    async def wait(self) -> None:
        with self.lock:
            begins = max(self.free, time.monotonic())
            self.free = begins + self.gap
        await asyncio.sleep(max(0.0, begins - time.monotonic()))


class _Answers:
    """Answers by key in a SQLite file, which several processes may share. The first answer to a key stays."""

    def __init__(self, cache: str) -> None:
        place = cache_root() / "judge" / "answers.sqlite" if cache == IN_CACHE else Path(cache).expanduser().absolute()
        self.name = str(place) if cache else ":memory:"
        self.lock = threading.Lock()
        with self._explained():
            if cache:
                place.parent.mkdir(parents=True, exist_ok=True)
            self.connection = sqlite3.connect(self.name, timeout=60, check_same_thread=False)
            with self.connection:
                self.connection.execute(
                    "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)"
                )

    def get(self, key: str) -> str | None:
        with self.lock, self._explained():
            found = self.connection.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if found is None else found[0]

    def put(self, key: str, answer: str) -> str:
        """Keep an answer unless another process was first; returns the one that is kept."""
        kept = answer.encode("utf-8", "replace").decode()  # SQLite takes no lone surrogates
        with self.lock, self._explained(), self.connection:
            self.connection.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, kept))
        return self.get(key) or kept

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise ValueError(
                f"the answers of the judge cannot be kept in {self.name} ({error}): give another file as cache, or "
                "cache='' to keep them in memory"
            ) from error
