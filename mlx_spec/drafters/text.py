"""The text of one request, and where its end has occurred before.

A suffix automaton that grows token by token (Blumer et al. 1985, doi 10.1016/0304-3975(85)90157-4):
each state stands for the substrings that end at the same places, and the link of the state of the
whole text leads to the longest suffix that also ends somewhere else. A token costs constant time,
amortised, whatever the length of the text.
"""

from array import array
from typing import Any

ROOT = 0


class Text:
    """Tokens, and for each of their beginnings the longest suffix that occurred before.

    It stands among the caches of a request, so it has what the loop asks of a cache.

    Attributes:
        tokens: all of them.
        work: transitions that were written so far.
    """

    state: tuple = ()  # nothing for the device

    def __init__(self, tokens: list[int] | None = None):
        self.tokens: list[int] = []
        self.work = 0
        # By state. Most have one transition, which stands in an array; others are in a dict.
        self._length = array("i", [0])
        self._link = array("i", [-1])
        self._token = array("i", [-1])
        self._target = array("i", [-1])
        self._branches: dict[int, dict[int, int]] = {}
        self._end = array("i", [-1])  # a place at which the state's substrings end, the last seen
        self._states = array("i")  # of the beginnings of the text
        self._end_before = array("i")  # by token: of the state that the link led to, before it
        self._cloned: dict[int, int] = {}  # clone -> the state that it was made of
        self.extend(tokens or [])

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """About so many."""
        return 24 * len(self._length) + 300 * len(self._branches) + 16 * len(self.tokens)

    @property
    def match(self) -> int:
        """The length of the longest suffix that occurred before, perhaps overlapping itself."""
        return self._length[self._link[self._states[-1]]] if self.tokens else 0

    def continuation(self, n: int) -> list[int]:
        """The n tokens that followed the last known earlier occurrence of that suffix. Where these
        reach the end of the text, they go on as if it went on so."""
        begin = self._end_before[-1] + 1
        period = len(self.tokens) - begin
        return [self.tokens[begin + k % period] for k in range(n)]

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            self._append(token)

    def become(self, tokens: list[int]) -> None:
        """Hold just these."""
        pairs = zip(tokens, self.tokens, strict=False)
        self.cut(next((at for at, (a, b) in enumerate(pairs) if a != b), len(tokens)))
        self.extend(tokens[len(self.tokens) :])

    def cut(self, length: int) -> None:
        """Back to the first `length` tokens."""
        while len(self.tokens) > length:
            self._drop()

    def _append(self, token: int) -> None:
        state = self._states[-1] if self.tokens else ROOT
        new = self._add_state(self._length[state] + 1)
        while state != -1 and (old := self._step(state, token)) == -1:
            self._set_step(state, token, new)
            state = self._link[state]
        if state == -1:
            self._link[new] = ROOT
        elif self._length[old] == self._length[state] + 1:
            self._link[new] = old
        else:
            self._link[new] = self._link[old] = self._clone(old, state, token)
        suffix = self._link[new]
        self._end_before.append(self._end[suffix])
        self._end[suffix] = self._end[new] = len(self.tokens)
        self._states.append(new)
        self.tokens.append(token)

    def _clone(self, old: int, state: int, token: int) -> int:
        """Split the substrings up to the length of `state` and the token off `old`."""
        clone = self._add_state(self._length[state] + 1)
        self._link[clone], self._end[clone] = self._link[old], self._end[old]
        self._token[clone], self._target[clone] = self._token[old], self._target[old]
        self.work += 1
        if old in self._branches:
            self._branches[clone] = dict(self._branches[old])
            self.work += len(self._branches[old])
        self._cloned[clone] = old
        while state != -1 and self._step(state, token) == old:
            self._set_step(state, token, clone)
            state = self._link[state]
        return clone

    def _drop(self) -> None:
        """Undo the newest `_append`, in reverse order."""
        token, new = self.tokens.pop(), self._states.pop()
        self._end[self._link[new]] = self._end_before.pop()
        state = self._states[-1] if self.tokens else ROOT
        while state != -1 and self._step(state, token) == new:
            self._remove_step(state, token)
            state = self._link[state]
        clone = new + 1
        if clone in self._cloned:
            old = self._cloned.pop(clone)
            self._link[old] = self._link[clone]
            while state != -1 and self._step(state, token) == clone:
                self._set_step(state, token, old)
                state = self._link[state]
            self._branches.pop(clone, None)
        for column in (self._length, self._link, self._token, self._target, self._end):
            del column[new:]

    def _add_state(self, length: int) -> int:
        for column in (self._link, self._token, self._target, self._end):
            column.append(-1)
        self._length.append(length)
        return len(self._length) - 1

    def _step(self, state: int, token: int) -> int:
        """Where the token leads from a state; -1: nowhere."""
        if self._token[state] == token:
            return self._target[state]
        branches = self._branches.get(state)
        return -1 if branches is None else branches.get(token, -1)

    def _set_step(self, state: int, token: int, target: int) -> None:
        self.work += 1
        if self._token[state] in (-1, token):
            self._token[state], self._target[state] = token, target
        else:
            self._branches.setdefault(state, {})[token] = target

    def _remove_step(self, state: int, token: int) -> None:
        if self._token[state] == token:
            self._token[state] = self._target[state] = -1
            return
        del self._branches[state][token]
        if not self._branches[state]:
            del self._branches[state]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Text":
        copy = Text.__new__(Text)
        for name, value in vars(self).items():
            setattr(copy, name, value[:] if isinstance(value, array | list) else value)
        copy._branches = {state: dict(steps) for state, steps in self._branches.items()}
        copy._cloned = dict(self._cloned)
        return copy
