"""A self-test: one token of a prompt of our own, asked of a replica on which several requests have failed.

What a request holds may be what a replica fails on, and no number of such requests says that the replica is broken. So
failed requests only raise a suspicion, and this tells: if the replica answers, it was their content.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import structlog

from router.base.alarms import Alarms
from router.base.clock import Clock
from router.base.errors import InvalidRequest, OverspillError, Refused
from router.base.timers import end
from router.dispatch.attempts.stream import AttemptStream, Elapsed, Unaccounted
from router.dispatch.records.telemetry import Telemetry
from router.signals.breaker import Breaker
from router.values.prompt import ChatPrompt, Input, Message, TextPrompt
from router.values.replica import Replica
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.settings import RouterSettings
from router.values.task import EmbedCall, PassedCall, TensorCall
from router.values.tensors import NamedTensor
from router.wire.openai.passed import shortest_like

log = structlog.get_logger("router")

_WORD = "Hello"
_PROMPT_TOKENS = 16  # with the template around it, at most
_LEAST_S = 2.0  # a busy replica may let one word wait that long


class SelfTests:
    """The self-tests of a tier; each runs as a task of its own, and `close` ends them.

    Args:
        told: called after each, when its breaker knows the result.

    Attributes:
        settings: of the tier; its `first_token_timeout_ms` bounds a test too.
    """

    def __init__(
        self, settings: RouterSettings, clock: Clock, alarms: Alarms, telemetry: Telemetry, told: Callable[[], None]
    ) -> None:
        self.settings = settings
        self._clock = clock
        self._alarms = alarms
        self._telemetry = telemetry
        self._told = told
        self._tasks: set[asyncio.Task[None]] = set()
        self._ids = count(1)
        self._stopped = False

    def begin(
        self, replica: Replica, breaker: Breaker, like: Input, silent_s: float, passed: Callable[[], None]
    ) -> None:
        """Test `replica`, and tell its suspected `breaker`; does nothing after `stop`.

        Args:
            like: a prompt of the kind that failed: chat, text or a call.
            silent_s: silence beyond that is a failure, within the bounds of what any replica gets.
            passed: called when the replica has answered.
        """
        if self._stopped:
            return
        limit_s = min(max(silent_s, _LEAST_S), self.settings.first_token_timeout_ms / 1e3)
        name = f"self-test of {replica.info.replica_id}"
        task = asyncio.create_task(self._run(replica, breaker, like, limit_s, passed), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """Begin none from now on; those that run go on until `close`."""
        self._stopped = True

    async def close(self) -> None:
        await end(*self._tasks)

    async def _run(
        self, replica: Replica, breaker: Breaker, like: Input, limit_s: float, passed: Callable[[], None]
    ) -> None:
        result, why = "untold", "it was given up"
        try:
            result, why = await self._ask(replica, self._request(replica, like), limit_s)
        finally:
            endpoint = breaker.endpoint
            self._telemetry.self_tests.labels(endpoint, result).inc()
            log.info("self-test", endpoint=endpoint, replica=replica.info.replica_id, result=result, why=why)
            if result == "passed":
                breaker.self_test_passed()
                passed()
            elif result == "failed":
                breaker.self_test_failed(why)
            else:
                breaker.self_test_untold()
            self._told()

    async def _ask(self, replica: Replica, request: InferenceRequest, limit_s: float) -> tuple[str, str]:
        due_s = self._clock.now_s() + limit_s
        name = replica.info.replica_id
        try:
            async with AttemptStream(Unaccounted(replica), request, self._clock, self._alarms) as stream:
                while True:
                    chunk = await stream.next(due_s)
                    if chunk.tokens or chunk.text or chunk.finish_reason is not None:
                        return "passed", "it answers"
        except (Refused, InvalidRequest) as error:  # it is there, and says nothing of generating
            return "untold", error.message
        except OverspillError as error:
            return "failed", error.message
        except Elapsed:
            return "failed", f"{name}: silent for {limit_s:.3g} s, to a prompt of one word too"
        except StopAsyncIteration:
            return "failed", f"{name}: ended without an answer, to a prompt of one word too"
        except Exception as error:
            log.exception("replica crashed", replica=name, request_id=request.request_id)
            return "failed", f"{name}: crashed with {type(error).__name__}, on a prompt of one word too"

    def _request(self, replica: Replica, like: Input) -> InferenceRequest:
        return InferenceRequest(
            request_id=f"self-test-{next(self._ids)}",
            model=replica.info.variant,
            prompt=_one_word(like),
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            objective=Objective(),
            prompt_tokens=_PROMPT_TOKENS,
            prompt_bytes=len(_WORD),
            accepted_at_s=self._clock.now_s(),
            attempts_left=1,
        )


def _one_word(like: Input) -> Input:
    """Return the shortest prompt of that kind."""
    if isinstance(like, EmbedCall):
        return EmbedCall((_WORD,))
    if isinstance(like, PassedCall):
        return shortest_like(like)
    if isinstance(like, TensorCall):  # one input of nothing: a pipeline that is there computes or refuses it
        return TensorCall(tuple(_nothing(tensor) for tensor in like.tensors))
    return ChatPrompt((Message("user", _WORD),)) if isinstance(like, ChatPrompt) else TextPrompt(_WORD)


def _nothing(tensor: NamedTensor) -> NamedTensor:
    """Return one row of zeros, or of empty strings, whose lengths take 4 bytes each."""
    size = 4 * math.prod(tensor.shape[1:]) if tensor.datatype == "BYTES" else len(tensor.data) // tensor.shape[0]
    return replace(tensor, shape=(1, *tensor.shape[1:]), data=bytes(size))
