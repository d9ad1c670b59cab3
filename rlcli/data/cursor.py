"""The place in an endless, seeded walk over a data set's rows: what a checkpoint saves so that no prompt is lost or repeated."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rlcli.errors import UserError

_FORMAT = 1


def epoch_order(n_rows: int, seed: int, epoch: int, shuffle: bool) -> npt.NDArray[np.int64]:
    """Row numbers of one epoch, [n_rows].

    Shuffling sorts by the raw 64-bit output of PCG64, a stream that numpy guarantees to stay as it is
    (its `permutation` may change between releases, which would break a resumed run).
    """
    if not shuffle:
        return np.arange(n_rows)
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n_rows)
    return np.argsort(keys, kind="stable")


class Cursor:
    """Hands out row numbers, each exactly once an epoch, and can say and restore its place.

    Epoch e has its own order, made of `seed` and e alone, so a place is two numbers: the epoch and the position in it.
    """

    def __init__(self, n_rows: int, seed: int = 0, shuffle: bool = True) -> None:
        """`n_rows` of the data set, at least 1; raises UserError for an empty set."""
        if n_rows < 1:
            raise UserError("the data set has no rows to train on")
        self.n_rows = n_rows
        self.seed = seed
        self.shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order: npt.NDArray[np.int64] | None = None

    @property
    def epoch(self) -> int:
        """Epochs finished so far."""
        return self._epoch

    @property
    def position(self) -> int:
        """Rows handed out in the present epoch; below `n_rows`."""
        return self._position

    @property
    def taken(self) -> int:
        """Rows handed out since the beginning, over all epochs."""
        return self._epoch * self.n_rows + self._position

    def take(self, k: int) -> list[int]:
        """The next `k` row numbers. Goes on into the next epoch where this one ends; `k` may exceed `n_rows`."""
        if k < 0:
            raise ValueError(f"cannot take {k} rows")
        rows: list[int] = []
        while len(rows) < k:
            if self._order is None:
                self._order = epoch_order(self.n_rows, self.seed, self._epoch, self.shuffle)
            part = self._order[self._position : self._position + k - len(rows)]
            rows.extend(part.tolist())
            self._advance(len(part))
        return rows

    def _advance(self, n: int) -> None:
        self._position += n
        if self._position == self.n_rows:
            self._epoch, self._position, self._order = self._epoch + 1, 0, None

    def state(self) -> dict[str, Any]:
        """The place, as plain JSON values, for a checkpoint."""
        return {
            "format": _FORMAT, "n_rows": self.n_rows, "seed": self.seed, "shuffle": self.shuffle,
            "epoch": self._epoch, "position": self._position,
        }

    @classmethod
    def restore(cls, state: dict[str, Any], n_rows: int | None = None) -> Cursor:
        """The cursor at a saved place. With `n_rows` given, raises UserError where the data set has another number of rows."""
        if n_rows is not None and n_rows != state["n_rows"]:
            raise UserError(
                f"the checkpoint was made with a data set of {state['n_rows']} rows, this one has {n_rows}: "
                "resume with the same data and length limits, or start a new run"
            )
        if state["format"] != _FORMAT or not 0 <= state["position"] < state["n_rows"] or state["epoch"] < 0:
            raise UserError(f"the checkpoint's data cursor is damaged: {state}")
        cursor = cls(state["n_rows"], state["seed"], state["shuffle"])
        cursor._epoch, cursor._position = state["epoch"], state["position"]
        return cursor
