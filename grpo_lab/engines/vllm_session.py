# pyright: reportMissingImports=false
# vLLM is an installation of its own, and not there where types are checked.
"""A live vLLM in another process: what was asked of it, what has come of each, and the weights it has.

The front end of vLLM's `AsyncLLM` runs on an event loop in its own thread. Methods with `in_loop` in their names run
there, all others in the caller's thread.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import queue
import shutil
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lab.distributed import ranks
from grpo_lab.engines.base import EngineFailure, EngineSession, Stream, all_ended, already_ended, check_names
from grpo_lab.engines.vllm_common import Growing, failure, last_error, vllm_params
from grpo_lab.engines.vllm_weights import Transfer
from grpo_lab.tracking.activity import sampling
from grpo_lab.types import Completion, OnFinish, Request, StopReason, Tensor

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

_LOOK_SECONDS = 0.2  # how often a waiting thread checks that the engine is alive


@dataclass(eq=False)
class _InFlight:
    """One response in flight."""

    key: int
    grown: Growing
    by_token: bool
    ended: queue.SimpleQueue  # its stream's queue of (key, completion) or (key, exception)
    name: str = ""  # vLLM's name of its current request
    outputs: RequestOutputCollector | None = None
    following: asyncio.Task | None = None
    ending: asyncio.Task | None = None
    reason: StopReason | None = None  # why it ended

    def settle(self, reason: StopReason) -> None:
        self.reason = reason
        self.ended.put((self.key, self.grown.completion(reason)))

    def leave(self) -> None:
        """Cancel the task that follows the request, unless it is that task which calls."""
        if self.following is not None and self.following is not asyncio.current_task():
            self.following.cancel()


class VllmProcessSession(EngineSession):
    """The other process and the thread that talks to it."""

    transfer: Transfer

    def __init__(self, engine: AsyncLLM, stop_ids: frozenset[int], names: frozenset[str], shared: Path) -> None:
        self.engine, self.stop_ids, self.names, self.shared = engine, stop_ids, names, shared
        self.version = 0
        self.broken: str | None = None
        self.rows: dict[str, _InFlight] = {}  # in flight, by vLLM's names, in the order requested
        self.numbers = count()
        (self.process,) = engine.engine_core.resources.engine_manager.processes
        self.loop = asyncio.new_event_loop()
        self.turn = asyncio.Lock()  # serialises requests and weight swaps, in the order of calls
        self.thread = threading.Thread(target=self.loop.run_forever, name="vllm-front", daemon=True)
        self.thread.start()
        atexit.register(self.close)  # else the interpreter would wait forever for the other process
        self.call(self._in_loop_begin())

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.swap(weights, version, keeps_cache=False)

    def generate(self, requests: Sequence[Request], on_finish: OnFinish | None = None) -> list[Completion]:
        results = [already_ended(request, self.stop_ids) for request in requests]
        stream = VllmStream(self, by_token=on_finish is not None)
        left = {index for index, ended in enumerate(results) if ended is None}
        aborted: set[int] = set()
        try:
            stream.add_together({index: requests[index] for index in sorted(left)})
            with sampling([request.params.max_tokens - len(request.prefix) for request in requests]) as shown:
                while left:
                    for index, completion in stream.take(wait=True):
                        left.discard(index)
                        shown.end(index)
                        if index in aborted:  # it may have ended on its own in the meantime
                            results[index] = replace(completion, stop=StopReason.ABORTED)
                            continue
                        results[index] = completion
                        if on_finish is not None:
                            others = left.intersection(on_finish(index, completion)) - aborted
                            stream.abort(others & stream.rows.keys())
                            aborted |= others
        finally:
            if stream.rows and self.broken is None:  # an error, or Ctrl-C
                with contextlib.suppress(EngineFailure):  # Ctrl-C may have reached the other process, too
                    stream.drain()  # or the engine would draw them beside the next call's
        return all_ended(results)

    def open_stream(self) -> VllmStream:
        return VllmStream(self, by_token=True)

    def close(self) -> None:
        atexit.unregister(self.close)
        if self.loop.is_closed():
            return
        if hasattr(self, "transfer"):
            self.transfer.close()
        self.engine.shutdown(timeout=0)  # it has nothing to save
        asyncio.run_coroutine_threadsafe(self._in_loop_end(), self.loop)
        self.thread.join()
        self.loop.close()
        self.engine.shutdown = lambda: None  # else its __del__ would run it again during interpreter shutdown
        del self.engine
        shutil.rmtree(self.shared, ignore_errors=True)

    def swap(self, weights: Iterable[tuple[str, Tensor]], version: int, keeps_cache: bool) -> None:
        """Swap the weights while responses are in flight, as in `Stream.update_weights`.

        Even with `keeps_cache`, vLLM recomputes a response that it had preempted because the cache was full.
        """
        # With one rank no tensor is copied; of several each gets one whole tensor at a time, and the host has room.
        given = dict(weights) if ranks.number() == 1 else {name: tensor.cpu() for name, tensor in weights}
        check_names(self.names - given.keys())
        try:
            self.call(self._in_loop_pause(keeps_cache))
            self.transfer.send(given)
            self.call(self._in_loop_resume(version))
        except BaseException as error:
            self.broken = self.broken or f"it did not take over new weights whole ({error})"
            raise

    def remote(self, method: str, arguments: dict[str, Any]) -> None:
        """Call a method of the worker in the other process and wait until it returns."""
        self.call(self.engine.collective_rpc(method, kwargs=arguments))

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run on the loop and wait. Raises EngineFailure if the engine dies; some of vLLM's calls never notice that."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        while not wait([future], timeout=_LOOK_SECONDS).done:
            try:
                self.check_alive()
            except BaseException:
                future.cancel()
                raise
        try:
            return future.result()
        except Exception as error:
            self.check_alive()
            raise failure(f"{type(error).__name__}: {error}") from error

    def check_alive(self) -> None:
        """Raise EngineFailure if the other process cannot continue."""
        if self.broken is None and (not self.process.is_alive() or self.engine.errored):
            self.broken = self._why()
        if self.broken is not None:
            raise failure(self.broken)

    def _why(self) -> str:
        self.process.join(timeout=1)
        code = self.process.exitcode
        how = f"its process was ended by signal {-code}" if code is not None and code < 0 else "its process ended"
        return f"{how} ({error})" if (error := last_error(self.shared)) else how

    async def _in_loop_begin(self) -> None:
        """Do the front end's one-time work now, so that later requests enter the queue without being suspended."""
        await self.engine.get_supported_tasks()
        self.engine._run_output_handler()

    async def _in_loop_end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self.loop.stop()

    async def in_loop_ask(self, row: _InFlight) -> None:
        """Send a request to vLLM; if the request is invalid, `take` raises its error."""
        async with self.turn:
            await self._in_loop_try(row)

    async def in_loop_ask_together(self, rows: Sequence[_InFlight]) -> None:
        """Send requests that all start in the same engine step.

        Then their batches, and so the last bits of their log-probs, do not depend on how fast requests arrive.
        """
        async with self.turn:
            await self.engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
            for row in rows:
                await self._in_loop_try(row)
            await self.engine.resume_generation()

    async def _in_loop_try(self, row: _InFlight) -> None:
        try:
            await self._in_loop_hand_over(row)
        except Exception as error:
            row.ended.put((row.key, error))

    async def _in_loop_hand_over(self, row: _InFlight) -> None:
        from vllm.inputs import tokens_input

        request = row.grown.request
        # The salt separates vLLM's prompt cache by weight version.
        prompt = tokens_input(list(request.prompt + request.prefix), cache_salt=f"weights {self.version}")
        row.name = str(next(self.numbers))
        row.outputs = await self.engine.add_request(row.name, prompt, vllm_params(request, self.stop_ids, row.by_token))
        self.rows[row.name] = row
        row.following = asyncio.create_task(self._in_loop_follow(row))

    async def _in_loop_follow(self, row: _InFlight) -> None:
        assert row.outputs is not None, "it was handed over"
        try:
            while row.name in self.rows:
                self._in_loop_grow(row, await row.outputs.get())
        except Exception as error:  # most often because the engine is dead
            row.ended.put((row.key, error))

    def _in_loop_grow(self, row: _InFlight, output: RequestOutput) -> None:
        reason = row.grown.grow(output, self.version)
        if reason is None:
            return
        if not output.finished:
            row.ending = asyncio.create_task(self.engine.abort(row.name))
        del self.rows[row.name]
        row.leave()
        row.settle(reason)

    async def _in_loop_collect(self) -> None:
        """Process every token that the engine has sent; vLLM's front end may lag behind what it has received."""
        import vllm.envs as envs

        while not self.engine.engine_core.outputs_queue.empty():
            await asyncio.sleep(0)
        # The front end yields to other tasks between chunks of the outputs that it processes.
        for _ in range(1 + math.ceil(len(self.rows) / envs.VLLM_V1_OUTPUT_PROC_CHUNK_SIZE)):
            await asyncio.sleep(0)
        for row in list(self.rows.values()):
            if row.outputs is not None and (output := row.outputs.get_nowait()) is not None:
                self._in_loop_grow(row, output)

    async def _in_loop_pause(self, keeps_cache: bool) -> None:
        """Pause all responses between two tokens; without `keeps_cache` they are prefilled again on resuming."""
        await self.turn.acquire()
        await self.engine.pause_generation(mode="keep", clear_cache=not keeps_cache)
        await self._in_loop_collect()

    async def _in_loop_resume(self, version: int) -> None:
        self.version = version
        # A response without tokens must not start from a prompt prefilled by old weights: request it again, in order.
        unbegun = [row for row in self.rows.values() if not row.grown.tokens]
        await self._in_loop_stop(unbegun)
        for row in unbegun:
            await self._in_loop_hand_over(row)
        await self.engine.resume_generation()
        self.turn.release()

    async def _in_loop_stop(self, rows: Sequence[_InFlight]) -> None:
        for row in rows:
            row.leave()
            del self.rows[row.name]
        await self.engine.abort([row.name for row in rows])

    async def in_loop_abort(self, rows: Sequence[_InFlight]) -> None:
        """End these responses with the tokens they have."""
        async with self.turn:
            await self._in_loop_collect()
            running = [row for row in rows if row.name in self.rows]
            await self._in_loop_stop(running)
            for row in running:
                row.settle(StopReason.ABORTED)

    async def in_loop_partial(self, rows: Sequence[_InFlight]) -> dict[int, Completion]:
        async with self.turn:
            await self._in_loop_collect()
            return {row.key: row.grown.completion(row.reason or StopReason.ABORTED) for row in rows}


class VllmStream(Stream):
    """Responses of one caller. A key is in `rows` from `add` until its response is taken."""

    def __init__(self, session: VllmProcessSession, by_token: bool) -> None:
        self.session, self.by_token = session, by_token
        self.ended: queue.SimpleQueue = queue.SimpleQueue()
        self.rows: dict[int, _InFlight] = {}

    def add(self, key: int, request: Request) -> None:
        session = self.session
        session.check_alive()
        row = self._row(key, request)
        if (ended := already_ended(request, session.stop_ids)) is not None:
            row.settle(ended.stop)
        else:
            asyncio.run_coroutine_threadsafe(session.in_loop_ask(row), session.loop)

    def add_together(self, requests: Mapping[int, Request]) -> None:
        """Add requests that start in one batch; none of their prefixes may have ended."""
        self.session.call(
            self.session.in_loop_ask_together([self._row(key, request) for key, request in requests.items()])
        )

    def _row(self, key: int, request: Request) -> _InFlight:
        assert key not in self.rows, f"key {key} is in use"
        by_token = self.by_token or request.params.stop_when_sure is not None
        self.rows[key] = _InFlight(key, Growing(request, self.session.stop_ids), by_token, self.ended)
        return self.rows[key]

    def take(self, wait: bool) -> list[tuple[int, Completion]]:
        if wait and not self.rows:
            raise ValueError("nothing is being drawn: add a request before waiting for one")
        self.session.check_alive()
        taken = self._taken()
        while wait and not taken:
            taken = self._taken(_LOOK_SECONDS)
            self.session.check_alive()
        return taken

    def _taken(self, seconds: float = 0.0) -> list[tuple[int, Completion]]:
        """The ended responses, waiting at most `seconds` for the first. Raises the error of an invalid request."""
        taken = []
        try:
            taken.append(self.ended.get(timeout=seconds) if seconds else self.ended.get_nowait())
            while True:
                taken.append(self.ended.get_nowait())
        except queue.Empty:
            pass
        for key, came in taken:
            del self.rows[key]
            if isinstance(came, Exception):
                self.session.check_alive()
                raise failure(f"{type(came).__name__}: {came}") from came
        return taken

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, keeps_cache: bool) -> None:
        self.session.swap(weights, version, keeps_cache)

    def partial(self) -> dict[int, Completion]:
        return self.session.call(self.session.in_loop_partial(list(self.rows.values())))

    def drain(self) -> dict[int, Completion]:
        self.abort(self.rows)
        return dict(self._taken())

    def abort(self, keys: Iterable[int]) -> None:
        """End these responses. `take` returns them with their tokens, marked ABORTED unless they ended on their own."""
        if rows := [self.rows[key] for key in keys]:
            self.session.call(self.session.in_loop_abort(rows))
