"""The page allocator: which pages of the pool are free.

A sequence's keys need not lie side by side: its row of the page table lists its pages, so that any
free page is as good as another and nothing is ever moved.
"""

from __future__ import annotations


class Pages:
    """The free pages of a pool of `count`, each with room for `page_size` keys."""

    def __init__(self, count: int, page_size: int) -> None:
        self.count, self.page_size = count, page_size
        self._free = list(range(count))

    @property
    def free(self) -> int:
        """How many pages no sequence holds."""
        return len(self._free)

    def needed(self, length: int) -> int:
        """How many pages `length` keys fill."""
        return -(-length // self.page_size)

    def extend(self, row: list[int], length: int) -> bool:
        """Adds pages to a row of the page table until it has room for `length` keys; False, and
        nothing is added, where too few are free.
        """
        missing = self.needed(length) - len(row)
        if missing > self.free:
            return False
        row.extend(self._free.pop() for _ in range(missing))
        return True

    def release(self, row: list[int]) -> None:
        """Takes a row's pages back; what they hold stays, and is written over."""
        self._free.extend(row)
        row.clear()
