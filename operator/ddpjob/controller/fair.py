"""A line that is fair to groups: many waiting items of one group do not delay those of another."""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Hashable
from itertools import count
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
        self._waiting: dict[Group, deque[Item]] = {}
        self.under_way: Counter[Group] = Counter()
        # The number of each waiting group in the order of the turns, and the waiting groups by how
        # many of their items are under way, each with its number and sorted by it.
        self._numbers: dict[Group, int] = {}
        self._turns: dict[int, list[tuple[int, Group]]] = {}
        self._next_number = count()

    def __bool__(self) -> bool:
        """Return True if an item waits."""
        return bool(self._waiting)

    def add(self, group: Group, item: Item) -> None:
        """Let an item wait behind the others of its group."""
        if group in self._waiting:
            self._waiting[group].append(item)
        else:
            self._stand_behind_all(group, deque([item]))

    def first(self) -> Item:
        """Return the next item in line. It stays there."""
        fewest = self._turns[min(self._turns)]
        _, group = fewest[0]
        return self._waiting[group][0]

    def contains(self, group: Group, item: Item) -> bool:
        return item in self._waiting.get(group, ())

    def remove(self, group: Group, item: Item) -> None:
        """Take an item out of the line. Its group then stands behind the others."""
        self._waiting[group].remove(item)
        self._leave(group)
        rest = self._waiting.pop(group)
        del self._numbers[group]
        if rest:
            self._stand_behind_all(group, rest)

    def begin(self, group: Group) -> None:
        """Count one more item of a group as under way."""
        self._count(group, 1)

    def end(self, group: Group) -> None:
        """Count one item of a group less as under way."""
        self._count(group, -1)
        if not self.under_way[group]:
            del self.under_way[group]

    def _count(self, group: Group, more: int) -> None:
        waits = group in self._waiting
        if waits:
            self._leave(group)
        self.under_way[group] += more
        if waits:
            self._stand(group)

    def _stand_behind_all(self, group: Group, items: deque[Item]) -> None:
        self._waiting[group] = items
        self._numbers[group] = next(self._next_number)
        self._stand(group)

    def _stand(self, group: Group) -> None:
        """Put a waiting group among those with as many items under way."""
        insort(self._turns.setdefault(self.under_way[group], []), (self._numbers[group], group))

    def _leave(self, group: Group) -> None:
        number_under_way = self.under_way[group]
        line = self._turns[number_under_way]
        # No two numbers are equal, so groups are never compared.
        del line[bisect_left(line, (self._numbers[group],))]
        if not line:
            del self._turns[number_under_way]
