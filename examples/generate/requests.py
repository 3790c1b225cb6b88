"""A request: a prompt, the tokens that follow it so far, and the pages that hold their keys."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Request:
    """What is asked for, and how far it has come."""

    prompt: list[int]
    new_tokens: int  # it ends after so many
    arrival: int = 0  # the step in which it comes
    generated: list[int] = field(default_factory=list)
    logits: list[float] = field(default_factory=list)  # of the generated tokens
    pages: list[int] = field(default_factory=list)  # its row of the page table
    cached: int = 0  # how many of its tokens have keys in those pages
    preemptions: int = 0
    ended: int | None = None  # the step in which its last token came

    @property
    def tokens(self) -> list[int]:
        """All that is known: after a preemption, a longer prompt."""
        return self.prompt + self.generated

    @property
    def length(self) -> int:
        """How many tokens are known."""
        return len(self.prompt) + len(self.generated)

    @property
    def longest(self) -> int:
        """How many keys it ever needs: its last token is never read."""
        return len(self.prompt) + self.new_tokens - 1

    @property
    def is_done(self) -> bool:
        """Whether its last token is there."""
        return len(self.generated) == self.new_tokens
