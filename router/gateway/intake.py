"""From a decoded body to an `InferenceRequest`: the same path for OpenAI and KServe V2."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from router.base.errors import (
    ContextTooLong,
    ModelNotFound,
    OverspillError,
    Refused,
    Shed,
    Unavailable,
)
from router.cache.exact import AnswerCache
from router.cache.meaning import meaning_of
from router.gateway.beside import Beside
from router.gateway.bodies import BodyRoom
from router.gateway.deps import GatewayDeps
from router.gateway.echo import prompt_alone, prompt_used
from router.gateway.endpoint import Handler, RequestContext, draining_or_starting
from router.gateway.links import Links
from router.gateway.metrics import GatewayMetrics
from router.gateway.retries import fingerprint, says_retry
from router.gateway.turns import Turns
from router.values.answer import Answer
from router.values.credits import NOTHING_WANTED, Asker, Want
from router.values.prompt import IN_THREAD_CHARS, ChatPrompt, Input, Message, PromptSize, TextPrompt, size_chars
from router.values.prompt_size import with_media
from router.values.request import LINE_PRIORITY, SLACK_PRIORITY, ApiRequest, InferenceRequest, Objective
from router.values.task import Call, PassedCall, Task
from router.wire import credits as wire_credits
from router.wire import headers as wire_headers
from router.wire import load as wire_load
from router.wire import names as wire_names
from router.wire.names import refuse_query
from router.wire.promise import parse_objective

_ASSUMED_ANSWER_TOKENS = 256  # set aside of a tenant's tokens a minute for an answer without a bound

if TYPE_CHECKING:
    from router.gateway.jobs.deferral import Deferral
    from router.jobs.jobs import Jobs


def _deferral(deps: GatewayDeps, jobs: Jobs) -> Deferral:
    from router.gateway.jobs.deferral import Deferral  # noqa: PLC0415 - only who keeps jobs pays for SQLAlchemy

    return Deferral(jobs, deps.limits.max_body_bytes)


class Intake:
    """Lets requests in, and builds the request that the router sees."""

    def __init__(self, deps: GatewayDeps, metrics: GatewayMetrics) -> None:
        self.deps = deps
        self.metrics = metrics
        self.room = BodyRoom(deps.limits)
        self.turns = Turns()
        self.beside = Beside()
        self._links = Links(deps.media)
        self._in_flight: set[str] = set()
        self._by_caller: Counter[str] = Counter()
        metrics.in_flight.set_function(lambda: len(self._in_flight))
        self._traffic = deps.jobs.slack if deps.jobs is not None else None
        self._deferral = None if deps.jobs is None else _deferral(deps, deps.jobs)

    def deferrable(self, handler: Handler) -> Handler:
        """Return a handler of requests that may be deferred, where the tier keeps them and their caller allows it."""
        return handler if self._deferral is None else self._deferral.around(handler)

    def load(self, context: RequestContext, asker: Asker | None) -> wire_load.LoadReport:
        """Return the tier's load as its caller may know it, and what it may send here if it is an instance that asks.

        Where keys are needed, nothing is told to those without, and of models what a tenant may see.
        """
        want: Want | None = None
        try:
            want = wire_credits.read_want(context.headers)
        except wire_credits.UnreadableCredits:
            self.metrics.credit_headers_unreadable.inc()
            want = NOTHING_WANTED
        report = self._load_for(context, asker)
        if asker is None or want is None:
            return report
        return replace(report, grant=self.deps.dispatcher.admission.grant(asker, want))

    def _load_for(self, context: RequestContext, asker: Asker | None) -> wire_load.LoadReport:
        deps, caller = self.deps, context.caller
        if not (context.known or deps.tenancy.directory.open):
            return wire_load.summarise((), kv_usage=None, waiting=0)
        found = deps.dispatcher.load("" if asker is None else asker.instance)
        seen = [load for load in found if caller.may_use(load.info.variant)]
        return wire_load.summarise(seen, kv_usage=deps.kv_usage(), waiting=deps.dispatcher.waiting)

    def asker(self, context: RequestContext) -> Asker | None:
        """Return which tier below asks, None where it does not say, or has no key where one is needed."""
        if not context.known:
            return None
        try:
            instance = wire_credits.read_instance(context.headers)
        except wire_credits.UnreadableCredits:
            self.metrics.credit_headers_unreadable.inc()
            return None
        caller = context.caller
        return Asker(caller.digest, instance, caller.max_priority > 0) if instance is not None else None

    def admit(self, context: RequestContext) -> None:
        """Take a place for this request before anything of its body is read, decoded or tokenized.

        Two requests may carry one id (a retry, a continuation while the broken stream is still being torn down): the
        later one gets a suffix, so that everything behind the gateway may rely on ids in flight being unique.

        Raises:
            Unavailable: the tier is starting or draining.
            Shed: the gateway is full, its caller has its part of it, or a limit of the caller's tenant is reached.
        """
        refusal = draining_or_starting(self.deps)
        if refusal is not None:
            raise refusal
        caller = context.caller.digest
        self._require_place(caller)
        if context.stay is None:  # a further choice has one
            context.stay = self.deps.tenancy.stay(
                context.caller, again=says_retry(context.headers), in_slack=context.in_slack
            )
        context.stay.enter()
        context.closers.append(context.stay.leave)
        request_id = given = context.request_id or ""
        attempt = 1
        while request_id in self._in_flight:
            attempt += 1
            mark = f"~{attempt}"
            request_id = f"{given[: wire_headers.MAX_REQUEST_ID_CHARS - len(mark)]}{mark}"
        context.request_id = request_id
        self._in_flight.add(request_id)
        self._by_caller[caller] += 1
        context.closers.append(lambda: self._leave(request_id, caller))
        if self._traffic is not None and not context.in_slack:
            self._traffic.came()
            context.computed = left = _once(self._traffic.left)
            context.closers.append(left)

    def arrived(self, context: RequestContext) -> None:
        """See whether a complete request is a retry that has to stand back.

        Raises:
            RateLimited: it is, and others wait.
        """
        if context.stay is not None and not context.in_slack:
            crowded = self.deps.dispatcher.waiting > 0
            self.deps.tenancy.arrived(context.stay, fingerprint(context.headers, context.body), crowded=crowded)

    @property
    def in_flight(self) -> int:
        """Inference requests inside the gateway."""
        return len(self._in_flight)

    def _require_place(self, caller: str) -> None:
        """Refuse a request for which there is no place; one of several tenants leaves a tenth of them to the others.

        Raises:
            Shed: the gateway is full, or one of several tenants has nine tenths of it.
        """
        limits = self.deps.limits
        if len(self._in_flight) >= limits.max_requests:
            raise Shed(
                f"{limits.max_requests} requests are in flight here, the limit of this gateway: send it again later",
                retry_after_s=limits.retry_after_s,
            )
        most = limits.max_requests - limits.max_requests // 10
        if self._by_caller[caller] >= most and len(self.deps.tenancy.directory.tenants) > 1:
            raise Shed(
                f"{most} requests of yours are in flight here, the most of one tenant: send it again later",
                retry_after_s=limits.retry_after_s,
            )

    def _leave(self, request_id: str, caller: str) -> None:
        self._in_flight.discard(request_id)
        left = self._by_caller[caller] - 1
        if left:
            self._by_caller[caller] = left
        else:
            del self._by_caller[caller]

    def require_model(self, context: RequestContext, model: str, task: Task = Task.GENERATE) -> None:
        """Check that the model is known, once for each request; the dispatcher decides who serves it.

        Raises:
            ModelNotFound: nobody serves it, or it does something else.
            Unavailable: an upstream that might serve it was never reached, or no model is known yet.
        """
        known = self.deps.dispatcher.known_models()
        if model in known and context.caller.may_use(model):
            if task is not Task.GENERATE:  # a prompt for a model that generates nothing is the dispatcher's to refuse
                self._require_task(context, model, task)
            return
        if not known and not self._unreached(context):
            # Nothing was found yet, which says nothing about the model: the caller shall come back.
            raise Unavailable(
                "no model is known here yet: none is loaded, and no upstream was reached",
                retry_after_s=self.deps.limits.retry_after_s,
            )
        raise self.not_served(context, model, known)

    def _require_task(self, context: RequestContext, model: str, task: Task) -> None:
        """Refuse a model that does something else than what its path asks for; name those that do it."""
        infos = self.deps.models()
        tasks = {one for info in infos if model in (info.family, info.variant) for one in info.tasks}
        if not tasks or task in tasks:
            return
        may_use = context.caller.may_use
        able = sorted({info.family for info in infos if task in info.tasks and may_use(info.family)})
        does = " and ".join(sorted(one.value for one in tasks))
        which = ", ".join(able) or f'none; a backend has one where its entry says `tasks = ["{task.value}"]`'
        raise ModelNotFound(
            f"`model`: `{model}` is there to {does}, not to {task.value}; models here that {task.value}: {which}",
            param="model",
        )

    async def start(self, context: RequestContext, api_request: ApiRequest) -> tuple[Answer, int]:
        """Count, build the request, dispatch it; returns the answer and the prompt's tokens with the first chunk ready.

        Raises:
            OverspillError: any of the tree.
        """
        self._links.check(api_request.prompt)
        objective = self._objective(context, api_request)
        passed_on = wire_headers.passed_on(context.headers)
        attempts_left = wire_headers.attempts_left(context.headers)
        began = time.perf_counter()
        size = await self.count(context, api_request)
        counted = time.perf_counter()
        context.timings_ms.append(("tokenize", (counted - began) * 1000))
        if context.stay is not None:
            most = api_request.sampling.max_tokens
            context.stay.reserve(size.tokens, _ASSUMED_ANSWER_TOKENS if most is None else most, asked=most is not None)
        request = InferenceRequest(
            request_id=context.request_id or "",
            caller=context.caller.digest,
            cache_salt=wire_headers.cache_salt(context.headers) or api_request.cache_salt,
            model=api_request.model,
            prompt=api_request.prompt,
            sampling=api_request.sampling,
            objective=objective,
            prompt_tokens=size.tokens,
            prompt_slack=size.slack,
            window_tokens=size.window,
            accepted_at_s=context.accepted_at_s,
            prompt_bytes=len(context.body),
            continuation=api_request.continuation,
            headers=passed_on,
            encoded=size.encoded,
            attempts_left=attempts_left,
            cache=wire_headers.cache_use(context.headers),
        )
        if isinstance(api_request.prompt, PassedCall):
            context.body = b""  # the call holds it, and its room, until it is answered
        else:
            context.drop_body()
        kept = self.deps.cache
        answer = await (self._dispatched(context, request) if kept is None else self._answered(context, request, kept))
        if api_request.unanswered:
            answer.chunks = prompt_alone(answer.chunks)
        if api_request.unanswered or isinstance(api_request.prompt, Call):  # the one value of a call is no token
            answer.used = prompt_used(answer.used)
        context.chunks = answer.chunks
        if context.stay is not None:
            context.stay.answered(lambda: (answer.route.variant, answer.used()))
        first_token_s = time.perf_counter() - counted
        context.timings_ms.append(("first-token", first_token_s * 1000))
        if self._traffic is not None and not context.in_slack:
            self._traffic.first_token(first_token_s)
        if context.computed is not None:  # whoever reads it slowly keeps no line waiting
            answer.when_computed(context.computed)
        return answer, size.tokens

    async def _answered(self, context: RequestContext, request: InferenceRequest, cache: AnswerCache) -> Answer:
        """Give an answer again that is kept, or have the request answered and perhaps keep that."""
        meaning = None
        answer = cache.find(request)
        if answer is None and self.deps.embed is not None:
            meaning = await meaning_of(request, self.deps.embed)
            answer = None if meaning is None else cache.find_like(request, meaning)
        if answer is not None:
            return answer
        return cache.keep(request, await self._dispatched(context, request), meaning)

    async def _dispatched(self, context: RequestContext, request: InferenceRequest) -> Answer:
        """Have a request answered by a replica; a credit of its instance pays for it, unless it is refused."""
        asker = self.asker(context)
        give_back = self.deps.dispatcher.admission.charge(asker) if asker is not None else None
        try:
            return await self.deps.dispatcher.start(request)
        except Refused:
            if give_back is not None:
                give_back()
            raise

    def not_served(self, context: RequestContext, model: str, known: Iterable[str]) -> OverspillError:
        """Return the error for a model that nobody serves who is known here, or that is not for this caller to know."""
        served = [name for name in known if context.caller.may_use(name)]
        tenant = context.caller.tenant
        patterns = () if tenant is None else tenant.limits.models
        return self._perhaps_later(ModelNotFound.of(model, served, patterns), self._unreached(context))

    def _unreached(self, context: RequestContext) -> str:
        anything = Objective(deadline_s=math.inf)  # the deadline of a late value may stand in the body
        return self.deps.dispatcher.unreached(parse_objective(context.headers, anything).locality)

    def _perhaps_later(self, error: OverspillError, unreached: str) -> OverspillError:
        """Nothing is final while an upstream that might serve the request was never reached."""
        if not unreached:
            return error
        retry_after_s = self.deps.limits.retry_after_s
        return Unavailable(
            f"no replica can take the request now ({unreached}); {error.message}", retry_after_s=retry_after_s
        )

    def _objective(self, context: RequestContext, api_request: ApiRequest) -> Objective:
        refuse_query(context.query)
        if context.in_slack:
            return replace(parse_objective(context.headers, Objective()), priority=LINE_PRIORITY)
        default = Objective()
        if api_request.priority is not None:
            default = replace(default, priority=max(api_request.priority, SLACK_PRIORITY))
        if api_request.deadline_s is not None:
            default = replace(default, deadline_s=api_request.deadline_s)
        objective = parse_objective(context.headers, default)
        ceiling = context.caller.max_priority
        if objective.priority <= ceiling:
            return objective
        context.told.append((wire_names.PRIORITY, str(ceiling)))
        self.metrics.priorities_lowered.inc()
        return replace(objective, priority=ceiling)

    async def count(self, context: RequestContext, api_request: ApiRequest) -> PromptSize:
        """Return how long its prompt is.

        Raises:
            Unavailable: it fits no window that is known, and an upstream that may have a longer one was never reached.
            InvalidRequest, ModelNotFound: as `PromptCounter.count`.
        """
        try:
            return await self._counted(context, api_request)
        except ContextTooLong as error:
            raise self._perhaps_later(error, self._unreached(context)) from error

    async def _counted(self, context: RequestContext, api_request: ApiRequest) -> PromptSize:
        prompts = _with_continuation(api_request.prompt, api_request.continuation)
        size = sum(map(size_chars, prompts))
        counted = partial(self._count_all, api_request.model, prompts)
        return await self.beside.run(context.caller.digest, size, counted, from_size=IN_THREAD_CHARS)

    def _count_all(self, model: str, prompts: list[Input]) -> PromptSize:
        first, *others = [self.deps.prompts.count(model, prompt) for prompt in prompts]
        whole = first if not others else sum(others, start=first)
        prompt = prompts[0]
        return with_media(whole, prompt) if isinstance(prompt, ChatPrompt) and prompt.media else whole

    def reply_headers(self, context: RequestContext, answer: Answer) -> list[tuple[str, str]]:
        """Say who answers and why, how long it took, and, to callers that ask for it, the tier's load."""
        lines = wire_headers.route_headers(answer.route)
        if answer.cache:
            lines.append((wire_names.CACHE, answer.cache))
        lines.append(("server-timing", ", ".join([f"{name};dur={ms:.2f}" for name, ms in context.timings_ms])))
        if wire_load.FORMAT_HEADER in context.headers:
            lines.append((wire_load.HEADER, wire_load.encode_orca(self.load(context, self.asker(context)))))
        return lines


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """Return what calls it the first time that it is called itself."""
    calls = [call]
    return lambda: calls.pop()() if calls else None


def _with_continuation(prompt: Input, continuation: str) -> list[Input]:
    """What to count: the prompt as the replica will see it, and a few template tokens too many."""
    if not continuation or isinstance(prompt, Call):
        return [prompt]
    if isinstance(prompt, ChatPrompt):
        return [replace(prompt, messages=(*prompt.messages, Message("assistant", continuation)))]
    if isinstance(prompt, TextPrompt):
        return [TextPrompt(prompt.text + continuation)]
    return [prompt, TextPrompt(continuation)]
