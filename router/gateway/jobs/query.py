"""The query of a request for a list."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from urllib.parse import parse_qsl

from router.base.errors import InvalidRequest
from router.gateway.endpoint import RequestContext

_MOST_PARAMETERS = 16


def query_of(context: RequestContext, known: AbstractSet[str]) -> dict[str, str]:
    """Read it; parameters that are not known are somebody else's, and pass.

    Raises:
        InvalidRequest: a known parameter stands there twice, or there are too many.
    """
    try:
        pairs = parse_qsl(context.query.decode("latin-1"), keep_blank_values=True, max_num_fields=_MOST_PARAMETERS)
    except ValueError:
        raise InvalidRequest(f"the query has more than {_MOST_PARAMETERS} parameters") from None
    found: dict[str, str] = {}
    for name, value in pairs:
        if name in known and found.setdefault(name, value) != value:
            raise InvalidRequest(f"the query names `{name}` twice", param=name)
    return found
