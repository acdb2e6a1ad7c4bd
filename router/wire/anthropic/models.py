"""What is served → Anthropic's list of models, page by page."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

import orjson

from router.base.errors import InvalidRequest
from router.wire.headers import whole_number
from router.wire.names import MAX_FIELDS

_DEFAULT, _MOST = 20, 1000


def encode_page(cards: Sequence[Mapping[str, Any]], query: bytes) -> bytes:
    """Return the page of the list that a query asks for.

    Args:
        cards: as OpenAI's list has them.

    Raises:
        InvalidRequest: naming the parameter at fault.
    """
    asked = _parameters(query)
    limit = whole_number(asked.get("limit", str(_DEFAULT)), _MOST)
    if not limit:
        raise InvalidRequest(f"`limit`: expected a whole number from 1 to {_MOST}", param="limit")
    ids = [str(card["id"]) for card in cards]
    begin, end = 0, len(ids)
    if "after_id" in asked:
        begin = _place(asked["after_id"], ids, "after_id") + 1
    if "before_id" in asked:
        end = _place(asked["before_id"], ids, "before_id")
        begin = max(begin, end - limit)
    more = begin > 0 if "before_id" in asked else end - begin > limit
    shown = cards[begin : min(end, begin + limit)]
    first, last = (str(shown[0]["id"]), str(shown[-1]["id"])) if shown else (None, None)
    page = {"data": [model_of(card) for card in shown], "has_more": more, "first_id": first, "last_id": last}
    return orjson.dumps(page)


def model_of(card: Mapping[str, Any]) -> dict[str, object]:
    """Return one model; its window is that of prompt and answer together."""
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": dt.datetime.fromtimestamp(card["created"], dt.timezone.utc).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
        "overspill": card["overspill"],
    }


def _parameters(query: bytes) -> dict[str, str]:
    try:
        return dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=MAX_FIELDS))
    except ValueError:
        raise InvalidRequest(f"the query has more than {MAX_FIELDS} parameters") from None


def _place(model: str, ids: Sequence[str], param: str) -> int:
    if model not in ids:
        raise InvalidRequest(f"`{param}`: `{model[:80]}` is none of the models", param=param)
    return ids.index(model)
