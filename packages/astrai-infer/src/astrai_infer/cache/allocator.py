"""Which pages are free. Plain Python: no torch, no tensors."""

from __future__ import annotations


class PageAllocator:
    """Hands out page numbers ``first .. first + n_pages - 1``.

    The invariant that every caller keeps: ``n_free + n_used == n_pages``.
    """

    def __init__(self, n_pages: int, first: int = 0) -> None:
        self.n_pages = n_pages
        self._first = first
        self._free = list(range(first + n_pages - 1, first - 1, -1))
        self._used = bytearray(n_pages)

    @property
    def n_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    @property
    def n_used(self) -> int:
        """Pages in use."""
        return self.n_pages - len(self._free)

    def can_alloc(self, n: int) -> bool:
        """Whether `n` pages are free."""
        return n <= len(self._free)

    def alloc(self, n: int) -> list[int] | None:
        """Return `n` pages, or None if there is no room (nothing is taken then)."""
        if n > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._used[page - self._first] = 1
        return pages

    def free(self, pages: list[int]) -> None:
        """Give pages back."""
        for page in pages:
            assert self._used[page - self._first], f"page {page} was freed twice"
            self._used[page - self._first] = 0
        self._free.extend(reversed(pages))
