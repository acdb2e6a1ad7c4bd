"""/tokenize, /detokenize, /tokenizer_info, as vLLM has them: by this tier where it has the tokenizer, else by a server
behind it.
"""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from router.base.errors import InvalidRequest, ModelNotFound, NoTokenizer
from router.gateway.endpoint import Endpoint, RequestContext, json_reply
from router.gateway.errors import Reply
from router.gateway.intake import Intake
from router.gateway.media import plain_body, require_json
from router.gateway.whole import collect_output
from router.values.feature import Feature
from router.values.prompt import IN_THREAD_CHARS, size_chars
from router.values.request import ApiRequest
from router.values.task import Passed, PassedCall, Task
from router.wire.openai.passed import ONE_PIECE, TOKENIZER_PATH, token_call, tokenizer_call
from router.wire.openai.tokens import (
    DetokenizeCall,
    TokenizeCall,
    decode_detokenize,
    decode_tokenize,
    encode_text,
    encode_tokenizer,
    encode_tokens,
    model_of_query,
)


class TokenRoutes:
    """The handlers. They take a place as inference does: encoding a long text takes its time."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._deps = intake.deps

    def routes(self) -> list[BaseRoute]:
        told = Endpoint("tokenizer_info", self._tokenizer, self._intake, admits=True)
        return [
            *(
                Route(path, Endpoint(name, handler, self._intake, admits=True, takes=takes), methods=["POST"])
                for path, name, handler, takes in (
                    ("/tokenize", "tokenize", self._tokenize, TokenizeCall),
                    ("/detokenize", "detokenize", self._detokenize, DetokenizeCall),
                )
            ),
            Route(TOKENIZER_PATH, told, methods=["GET"]),
        ]

    async def _tokenize(self, context: RequestContext) -> Reply:
        require_json(context)
        body = plain_body(context, self._deps.limits.max_body_bytes)
        call, prompt, continuation = decode_tokenize(body)
        model = self._named(context, call.model)
        try:
            tokenizer = self._deps.prompts.tokenizer(model)
        except NoTokenizer:
            return await self._passed(context, model, token_call("/tokenize", body))
        window = self._window(model)

        def written() -> bytes:
            found = tokenizer.tokenize(
                prompt,
                special_tokens=call.add_special_tokens is not False,
                generation_prompt=call.add_generation_prompt,
                continuation=continuation,
            )
            return encode_tokens(found, window, tokenizer.token_texts(found) if call.return_token_strs else None)

        beside, caller = self._intake.beside, context.caller.digest
        return json_reply(await beside.run(caller, size_chars(prompt), written, from_size=IN_THREAD_CHARS))

    async def _detokenize(self, context: RequestContext) -> Reply:
        require_json(context)
        body = plain_body(context, self._deps.limits.max_body_bytes)
        call = decode_detokenize(body)
        model = self._named(context, call.model)
        try:
            tokenizer = self._deps.prompts.tokenizer(model)
        except NoTokenizer:
            return await self._passed(context, model, token_call("/detokenize", body))

        def written() -> bytes:
            return encode_text(tokenizer.decode(call.tokens))

        beside, caller = self._intake.beside, context.caller.digest
        return json_reply(await beside.run(caller, len(body), written, from_size=IN_THREAD_CHARS))

    async def _tokenizer(self, context: RequestContext) -> Reply:
        """The special tokens and the chat template of a model, which `?model=` names where several are served."""
        model = self._named(context, model_of_query(context.query))
        try:
            tokenizer = self._deps.prompts.tokenizer(model)
        except NoTokenizer:
            return await self._passed(context, model, tokenizer_call())
        return json_reply(encode_tokenizer(tokenizer.facts(), self._window(model)))

    def _named(self, context: RequestContext, model: str | None) -> str:
        """Return the model that a request names, or else the only one that it can mean.

        Raises:
            InvalidRequest: it names none of several.
            ModelNotFound, Unavailable: as `Intake.require_model`.
        """
        if model is None:
            model = self._only(context)
        self._intake.require_model(context, model)
        return model

    def _only(self, context: RequestContext) -> str:
        """Return the one family that generates text, or of several the one whose tokens can be told."""
        names: dict[str, str] = {}
        tellable: set[str] = set()
        for info in self._deps.models():
            name = next((name for name in (info.family, info.variant) if context.caller.may_use(name)), None)
            if name is None or Task.GENERATE not in info.tasks:
                continue
            names.setdefault(info.family, name)
            if Feature.TOKENIZE in info.offers:
                tellable.add(info.family)
        if len(names) > 1:
            names = {family: name for family, name in names.items() if family in tellable or self._has_tokenizer(name)}
        if len(names) == 1:
            return names.popitem()[1]
        known = ", ".join(f"`{name[:80]}`" for name in sorted(names.values())[:8]) or "none that generates text"
        raise InvalidRequest(f"`model` is missing, and not one model alone is served here: {known}", param="model")

    def _has_tokenizer(self, model: str) -> bool:
        try:
            self._deps.prompts.tokenizer(model)
        except (NoTokenizer, ModelNotFound):
            return False
        return True

    async def _passed(self, context: RequestContext, model: str, call: PassedCall) -> Reply:
        """Have the server that runs a model answer, where the tokenizer is there alone."""
        answer, size = await self._intake.start(context, ApiRequest(model, call, ONE_PIECE))
        whole, _ = await collect_output(answer.chunks, size, Passed)
        return Reply(whole.data, headers=self._intake.reply_headers(context, answer), media_type=whole.media_type)

    def _window(self, model: str) -> int:
        return max(
            (info.context_tokens for info in self._deps.models() if model in (info.family, info.variant)), default=0
        )
