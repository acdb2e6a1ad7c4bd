"""OpenAI's SDK for Python; each part registers its checks, in the order of the table."""

from __future__ import annotations

import openai_chats  # noqa: F401
import openai_guided  # noqa: F401
import openai_structured  # noqa: F401
import openai_surface  # noqa: F401
from openai_sdk import checks

checks.run()
