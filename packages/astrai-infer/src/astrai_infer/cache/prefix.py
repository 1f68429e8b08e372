"""Which page holds the keys and values of which tokens: the prefix index. No torch here."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

Key = tuple[Hashable, tuple[int, ...]]
"""(parent node, or the namespace for a first page; the page's tokens)."""


@dataclass(frozen=True)
class _Node:
    page: int
    number: int
    """Names this page as the parent of those that follow."""


class PrefixIndex:
    """Finds pages by the tokens they hold and everything before them.

    Tokens are compared in full, so two prefixes never collide. The namespace is (weight version, adapter): what other
    weights computed is never found. Only pages that the pool keeps are in the index, so the pool bounds it.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._nodes: dict[Key, _Node] = {}
        self._keys: dict[int, Key] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def match(self, namespace: Hashable, token_ids: Sequence[int]) -> tuple[list[int], Hashable]:
        """Find the longest known prefix; the last token is never part of it, since it must be fed.

        Returns
        -------
        (its pages, the parent under which the next page is to be inserted)
        """
        pages: list[int] = []
        parent = namespace
        for start in range(0, len(token_ids) - self.page_size, self.page_size):
            node = self._nodes.get((parent, tuple(token_ids[start : start + self.page_size])))
            if node is None:
                break
            pages.append(node.page)
            parent = node.number
        return pages, parent

    def insert(self, parent: Hashable, token_ids: Sequence[int], page: int) -> Hashable:
        """Add a full page, unless another page is known to hold the same prefix.

        Parameters
        ----------
        parent
            What :meth:`match` or the insertion of the page before returned.
        token_ids
            The page's own tokens.

        Returns
        -------
        The parent of the next page.
        """
        assert len(token_ids) == self.page_size, "only full pages are indexed"
        key = (parent, tuple(token_ids))
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = _Node(page, next(self._numbers))
            self._keys[page] = key
        return node.number

    def remove(self, page: int) -> None:
        """Forget a page; pages that follow it can no longer be found and go when their own turn comes."""
        del self._nodes[self._keys.pop(page)]
