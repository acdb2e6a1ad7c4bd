"""One request against the limits of its tenant: from its first header until what it used is counted.

Several choices of one prompt are one request, as OpenAI counts it: each has a stay of its own, for its tokens, and
those behind the first stand under its place.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from router.base.clock import Clock
from router.base.errors import BudgetSpent, RateLimited, Refused
from router.tenants.ledger import Ledger
from router.tenants.quota import Left, Quota
from router.values.usage import SharedPrompt, Usage


class Stay(msgspec.Struct, eq=False):
    """A place of a request under its tenant's limits. `enter` takes it, `leave` gives it back, once.

    Attributes:
        fingerprint: equal for requests that ask for the same.
        again: its client says that it is a retry.
        beside: it is for a further choice, beside the first one of its prompt.
        in_slack: it is run again where it is not answered.
    """

    quota: Quota
    ledger: Ledger
    clock: Clock
    device: str = ""
    again: bool = False
    fingerprint: int = 0
    beside: bool = False
    in_slack: bool = False
    _prompt: SharedPrompt | None = None
    _first: bool = True
    _reserved: int = 0
    _answers: list[Callable[[], tuple[str, Usage]]] = msgspec.field(default_factory=list)
    _counts: bool = True
    _over: bool = False

    def for_another_choice(self) -> Stay:
        """Return the stay of a further choice of the same prompt."""
        return Stay(
            self.quota, self.ledger, self.clock, self.device, beside=True, in_slack=self.in_slack, _counts=False
        )

    def enter(self) -> None:
        """Take the place; see `Quota.enter`. A further choice has that of the first.

        Raises:
            BudgetSpent, RateLimited: the tenant is over one of its limits.
        """
        if not self.beside:
            self.quota.enter(self.clock.now_s())

    def share(self, prompt: SharedPrompt, *, first: bool) -> None:
        """Others answer the same prompt: it counts once, as its caller is told."""
        self._prompt, self._first = prompt, first

    def reserve(self, prompt_tokens: int, answer_tokens: int, *, asked: bool) -> None:
        """Set tokens aside; see `Quota.reserve`. Those of a shared prompt are set aside by the first who share it.

        Raises:
            RateLimited: there are not so many now.
        """
        prompt = prompt_tokens if self._first else 0
        self._reserved += self.quota.reserve(self.clock.now_s(), prompt, answer_tokens, asked=asked)

    def answered(self, told: Callable[[], tuple[str, Usage]]) -> None:
        """An answer has begun; `told` returns, at the end of the stay, which model answered and what that used."""
        self._answers.append(told)

    def unanswered(self) -> None:
        """No reply tells of what it had of an answer: in the slack that is no usage, for it is computed again."""
        if self.in_slack:
            self._answers.clear()

    def left(self) -> tuple[Left | None, Left | None]:
        """What is left of the tenant's requests and tokens a minute."""
        return self.quota.left(self.clock.now_s())

    def refused(self, why: Refused) -> None:
        """The request is told to come back later."""
        self.quota.retries.refused(self.fingerprint, self.clock.now_s())
        self.give_back(why)

    def give_back(self, why: Refused) -> None:
        """What was refused for others or for want of capacity counts for no minute of its tenant."""
        if self._counts and not isinstance(why, RateLimited | BudgetSpent):
            self._counts = False
            self.quota.give_back(self.clock.now_s())

    def leave(self) -> None:
        """The request is over: count what it used."""
        if self._over:
            return
        self._over = True
        if not self.beside:
            self.quota.leave()
        prompt = answer = 0
        for told in self._answers:
            model, used = told()
            requests = 1
            if self._prompt is not None:
                used, requests = self._prompt.part(used, first=self._first), self._prompt.request()
            prompt, answer = prompt + used.prompt_tokens, answer + used.completion_tokens
            self.ledger.add(self.quota.name, self.device, model, used, requests=requests)
        self._answers.clear()
        self.quota.settle(self.clock.now_s(), self._reserved, Usage(prompt, answer))
