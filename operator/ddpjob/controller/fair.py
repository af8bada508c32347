"""A line that is fair to groups: many waiting items of one group do not delay those of another."""

from collections import Counter, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")

# What items have in common, such as a namespace.
Group = Hashable


class FairLine(Generic[Item]):
    """Waiting items, and how many items of each group are under way.

    The next in line is the first item of the group with the fewest items under way. Groups with
    equal numbers take turns.
    """

    def __init__(self) -> None:
        # The order of the keys is the order of the turns.
        self._waiting: dict[Group, deque[Item]] = {}
        self.under_way: Counter[Group] = Counter()

    def __bool__(self) -> bool:
        """Return True if an item waits."""
        return bool(self._waiting)

    def add(self, group: Group, item: Item) -> None:
        """Let an item wait behind the others of its group."""
        self._waiting.setdefault(group, deque()).append(item)

    def first(self) -> Item:
        """Return the next item in line. It stays there."""
        group = min(self._waiting, key=self.under_way.__getitem__)
        return self._waiting[group][0]

    def contains(self, group: Group, item: Item) -> bool:
        return item in self._waiting.get(group, ())

    def remove(self, group: Group, item: Item) -> None:
        """Take an item out of the line. Its group then stands behind the others."""
        rest = self._waiting.pop(group)
        rest.remove(item)
        if rest:
            self._waiting[group] = rest

    def begin(self, group: Group) -> None:
        """Count one more item of a group as under way."""
        self.under_way[group] += 1

    def end(self, group: Group) -> None:
        """Count one item of a group less as under way."""
        self.under_way[group] -= 1
        if not self.under_way[group]:
            del self.under_way[group]
