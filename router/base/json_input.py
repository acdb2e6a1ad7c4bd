"""What reading JSON that others wrote raises. msgspec's own error is but one of three."""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Not JSON or not as expected; a text in it that is no UTF-8; nested without end."""
