"""Matrix factorisation by alternating least squares."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.errors import ConfigError
from holdfast_lab.workloads.data import Dataset, load_dataset
from holdfast_lab.workloads.iterative.base import State, euclidean


@dataclass(frozen=True, slots=True)
class FactorSide:
    """The ratings grouped by the rows of one factor."""

    others: Tensor
    """int64 (ratings): the row of the other factor."""
    values: Tensor
    """float32 (ratings)."""
    offsets: Tensor
    """int64 (rows): where the ratings of a row start in the two arrays above."""

    def sums(self, table: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return, for each row, the sum of the rows of ``table``, (other rows, width), that its ratings refer to."""
        return F.embedding_bag(self.others, table, self.offsets, mode="sum", per_sample_weights=weights)

    def fit(self, factor: Tensor, penalty: float, known: Tensor | None = None) -> Tensor:
        """Return the rows that minimise the objective of :class:`Factorisation`, given those of the other factor.

        Args:
            factor: The other factor, (other rows, rank).
            penalty: Penalty of the objective.
            known: Bool (other rows): the known rows; ratings of other rows are ignored. None: all are known.

        Returns:
            Shape (rows, rank); 0 where there is no rating.
        """
        known = torch.ones(len(factor), dtype=torch.bool) if known is None else known
        factor = factor.where(known[:, None], 0.0)
        products = (factor[:, :, None] * factor[:, None, :]).flatten(1)
        normal = self.sums(products).unflatten(1, (factor.shape[1], -1))
        counts = self.sums(known[:, None].float())
        normal.diagonal(dim1=1, dim2=2).add_((penalty * counts).where(counts > 0, 1.0))
        return torch.linalg.solve(normal, self.sums(factor, self.values))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Ratings:
    """Ratings as (user, item, value)."""

    users: Tensor
    """int64 (ratings)."""
    items: Tensor
    """int64 (ratings)."""
    values: Tensor
    """float32 (ratings), minus the mean of the training ratings."""

    def errors(self, users: Tensor, items: Tensor) -> Tensor:
        """Return the product of the rows minus the value, for each rating.

        The arguments have the shape (users or items, rank).
        """
        return self.values - (users[self.users] * items[self.items]).sum(1)


class AlsProblem:
    """The data of a factorisation.

    Args:
        dataset: A dataset of the kind ``ratings``.
    """

    def __init__(self, dataset: Dataset) -> None:
        mean = dataset.train[:][2].mean()
        self.train, self.test = (
            Ratings(users, items, values - mean) for users, items, values in (part[:] for part in dataset)
        )
        self.num_users, self.num_items = dataset.shape
        self.of_users = _side(self.train.users, self.train.items, self.train.values, self.num_users)
        self.of_items = _side(self.train.items, self.train.users, self.train.values, self.num_items)
        self.counts = torch.cat(
            [self.train.users.bincount(minlength=self.num_users), self.train.items.bincount(minlength=self.num_items)]
        ).float()
        """Number of training ratings of each row, users before items."""


class Factorisation:
    """User rows and item rows whose products approximate the ratings minus their mean.

    A block is a row: users, then items.

    An iteration solves for the users given the items, then for the items given the users. So the next one reads only
    the item rows, and overwrites the user rows: the items are the live factor. In the other order, the users are. The
    objective is

        sum over ratings of (value - u . v)^2  +  penalty * (sum over users of n |u|^2  +  sum over items of n |v|^2)

    with n the number of a row's ratings. Everything is float32, as usual for such factors: the penalty keeps the normal
    equations well conditioned, and rows of eight bytes per number would exaggerate the saving of quantising to one
    byte.

    Args:
        name: The name of the program.
        seed: Seed of the live factor's initial rows; the other factor starts at 0.
        problem: The data.
        rank: Length of a row, ``>= 1``.
        penalty: Lambda, ``> 0``.
        first: The factor that an iteration solves first, ``users`` or ``items``.

    Raises:
        ConfigError: if a value is out of range.

    Source:
        Y. Zhou, D. Wilkinson, R. Schreiber, R. Pan, "Large-scale parallel collaborative filtering for the Netflix
        prize", AAIM 2008: alternating least squares with weighted-lambda regularisation.
    """

    def __init__(
        self, name: str, seed: int, problem: AlsProblem, *, rank: int, penalty: float, first: str = "users"
    ) -> None:
        if first not in ("users", "items"):
            raise ConfigError(
                f"first must be users or items, got {first!r}; choose the larger factor to have little to save"
            )
        if rank < 1 or not penalty > 0:
            raise ConfigError(f"rank must be at least 1 and penalty above 0, got {rank} and {penalty:g}")
        self.name, self.seed, self.problem = name, seed, problem
        self.rank, self.penalty = rank, penalty
        self.blocks = problem.num_users + problem.num_items
        self.block_bytes = torch.full((self.blocks,), rank * 4)
        self.users_first = first == "users"
        self.live = (torch.arange(self.blocks) >= problem.num_users) == self.users_first

    def start(self) -> State:
        """See :class:`~holdfast_lab.workloads.iterative.base.Program`."""
        state = {"factors": torch.zeros(self.blocks, self.rank)}
        live = self._factors(state)[self.users_first]
        drawn = np.random.default_rng((self.seed, 0)).standard_normal(live.shape, np.float32)
        live.copy_(torch.from_numpy(drawn) / self.rank**0.5)
        return state

    def iterate(self, state: State, iteration: int) -> None:
        """See :class:`~holdfast_lab.workloads.iterative.base.Program`."""
        users, items = self._factors(state)
        if not self.users_first:
            items.copy_(self.problem.of_items.fit(users, self.penalty))
        users.copy_(self.problem.of_users.fit(items, self.penalty))
        if self.users_first:
            items.copy_(self.problem.of_items.fit(users, self.penalty))

    def resolve(self, state: State, lost: Tensor) -> None:
        """Solve for the lost rows from the other factor's surviving rows: recovery without any checkpoint.

        Args:
            state: Changed in place, only in the lost rows; their content does not matter.
            lost: Bool (blocks). A lost row without a rating to a surviving row becomes 0.
        """
        users, items = self._factors(state)
        lost_users, lost_items = lost.split([len(users), len(items)])
        new_users = self.problem.of_users.fit(items, self.penalty, ~lost_items)
        new_items = self.problem.of_items.fit(users, self.penalty, ~lost_users)
        users[lost_users], items[lost_items] = new_users[lost_users], new_items[lost_items]

    def rows(self, state: State) -> tuple[Tensor, ...]:
        """See :class:`~holdfast_lab.workloads.iterative.base.Program`."""
        return (state["factors"],)

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """See :class:`~holdfast_lab.workloads.iterative.base.Program`."""
        return euclidean(a, b)

    def mend(self, state: State, written: Tensor) -> None:
        """Do nothing: no other state depends on the rows."""

    def loss(self, state: State) -> float:
        """Return the objective divided by the number of ratings; except for rounding, it never increases."""
        train = self.problem.train
        size = torch.dot(self.problem.counts, state["factors"].square().sum(1))
        squares = train.errors(*self._factors(state)).square().sum()
        return float(squares + self.penalty * size) / len(train.values)

    def test_rmse(self, state: State) -> float:
        """Return the root mean squared error on the test ratings, in units of a rating."""
        return float(self.problem.test.errors(*self._factors(state)).square().mean().sqrt())

    def _factors(self, state: State) -> tuple[Tensor, Tensor]:
        users, items = state["factors"].split([self.problem.num_users, self.problem.num_items])
        return users, items


def _side(own: Tensor, others: Tensor, values: Tensor, rows: int) -> FactorSide:
    order = own.argsort(stable=True)
    counts = own.bincount(minlength=rows)
    return FactorSide(others[order], values[order], counts.cumsum(0) - counts)


def make(
    name: str,
    data: Path | None,
    seed: int,
    *,
    rank: int | None = None,
    penalty: float | None = None,
    first: str = "users",
) -> Factorisation:
    """Return a :class:`Factorisation` of the dataset that ``name`` ends with.

    None means ``rank`` 10 and ``penalty`` 0.1; for the generated ratings, whose rank is 8, it means 8 and 0.01.
    """
    dataset = name.removeprefix("als-")
    usual_rank, usual_penalty = (8, 0.01) if dataset == "ratings" else (10, 0.1)
    return Factorisation(
        name,
        seed,
        _load(dataset, data),
        rank=usual_rank if rank is None else rank,
        penalty=usual_penalty if penalty is None else penalty,
        first=first,
    )


@cache
def _load(dataset: str, data: Path | None) -> AlsProblem:
    return AlsProblem(load_dataset(dataset, data))
