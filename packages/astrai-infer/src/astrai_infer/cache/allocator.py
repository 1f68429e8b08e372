"""Which pages are free, used or cached. Plain Python: no torch, no tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class PageAllocator:
    """Hands out page numbers ``first .. first + n_pages - 1`` and counts who uses them.

    A page is free, used (one reference or more), or cached (no reference, but its content is worth keeping). Cached
    pages are evicted, least recently used first, when no free page is left. Always: ``free + cached + used == total``.

    Parameters
    ----------
    on_evict
        Called with a cached page just before it is handed out for something else.
    """

    def __init__(self, n_pages: int, first: int = 0, on_evict: Callable[[int], None] = lambda page: None) -> None:
        self.n_pages = n_pages
        self._first = first
        self._on_evict = on_evict
        self._free = list(range(first + n_pages - 1, first - 1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * n_pages

    @property
    def n_free(self) -> int:
        """Pages without content worth keeping."""
        return len(self._free)

    @property
    def n_cached(self) -> int:
        """Pages that nobody uses and whose content is kept."""
        return len(self._cached)

    @property
    def n_available(self) -> int:
        """Pages that :meth:`alloc` could hand out."""
        return len(self._free) + len(self._cached)

    @property
    def n_used(self) -> int:
        """Pages with a reference."""
        return self.n_pages - self.n_available

    def alloc(self, n: int) -> list[int] | None:
        """Return `n` pages with one reference each, or None if there is no room (nothing is taken then)."""
        if n > self.n_available:
            return None
        pages = []
        for _ in range(n):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self._on_evict(page)
            self._references[page - self._first] = 1
            pages.append(page)
        return pages

    def is_cached(self, page: int) -> bool:
        """Whether the page is cached, so that :meth:`share` takes it from those that can be allocated."""
        return page in self._cached

    def share(self, page: int) -> None:
        """Add a reference to a page that is used or cached."""
        index = page - self._first
        if self._references[index] == 0:
            del self._cached[page]
        self._references[index] += 1

    def release(self, pages: Iterable[int], keep: Callable[[int], bool] = lambda page: False) -> None:
        """Drop one reference of each page, in order; a page that nobody uses any more is cached if `keep` says so.

        Pages released earlier are evicted earlier: pass the pages of a sequence last page first, so that a page is
        always evicted before those it depends on.
        """
        for page in pages:
            index = page - self._first
            assert self._references[index] > 0, f"page {page} was released twice"
            self._references[index] -= 1
            if self._references[index] == 0:
                if keep(page):
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def drop_cached(self) -> None:
        """Turn every cached page into a free one."""
        while self._cached:
            page, _ = self._cached.popitem(last=False)
            self._on_evict(page)
            self._free.append(page)
