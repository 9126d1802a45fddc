"""What one client of matrix completion holds: ratings of items by users."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fl_admm_strategies.maths.checks import check_count

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


def check_indices(name: str, values: ArrayLike, below: int) -> NDArray[np.int32]:
    """Return indices below `below` as int32.

    Raises
    ------
    TypeError, ValueError
        If one is none.
    """
    given = np.asarray(values)
    if not np.issubdtype(given.dtype, np.integer):
        raise TypeError(f"{name} has dtype {given.dtype}, expected integers.")
    wrong = np.flatnonzero((given < 0) | (given >= below))
    if len(wrong):
        raise ValueError(
            f"{name}[{wrong[0]}] is {given[wrong[0]]}, expected 0 to {below - 1}; {len(wrong)} "
            "entries are outside. Number users and items from 0 and check how many there are."
        )
    return given.astype(np.int32)


@dataclass(frozen=True, eq=False)
class Ratings:
    """The observed entries of a matrix of ratings, 𝒫_Ω(M), sorted by user and then item.

    What is observed is what is listed: a rating of 0 (after standardisation, say) is an observed
    rating like any other. Arrays given in another order are sorted, and are copied in any case.

    Attributes
    ----------
    users : ndarray of int32, shape (k,)
        Row t of each rating, 0 <= t < num_users.
    items : ndarray of int32, shape (k,)
        Column j of each rating, 0 <= j < num_items.
    values : ndarray of float64, shape (k,)
        M(t, j).
    num_users : int
        Rows of the matrix, m_i. A user may have no rating.
    num_items : int
        Columns, n, the same for all clients. An item may have no rating here.

    Raises
    ------
    TypeError
        If users or items are not integers, or a size is not.
    ValueError
        If the three arrays differ in shape or are empty, an index is out of range, a value is not
        finite, or two ratings are of the same item by the same user.

    Examples
    --------
    >>> stars = np.array([4.0, 3.5])
    >>> Ratings(np.array([1, 0]), np.array([2, 0]), stars, num_users=2, num_items=3).values
    array([3.5, 4. ])
    """

    users: NDArray[np.integer[Any]]
    items: NDArray[np.integer[Any]]
    values: NDArray[np.float64]
    num_users: int
    num_items: int

    def __post_init__(self) -> None:
        check_count("num_users", self.num_users, least=1)
        check_count("num_items", self.num_items, least=1)
        shapes = [np.shape(array) for array in (self.users, self.items, self.values)]
        if len(shapes[0]) != 1 or len(set(shapes)) != 1:
            raise ValueError(
                f"users, items and values have shapes {shapes[0]}, {shapes[1]} and {shapes[2]}, "
                "expected three lists of the same length: one entry per rating."
            )
        if shapes[0] == (0,):
            raise ValueError("There is no rating: expected at least one.")
        users = check_indices("users", self.users, self.num_users)
        items = check_indices("items", self.items, self.num_items)
        values = np.asarray(self.values, dtype=np.float64)
        wrong = np.flatnonzero(~np.isfinite(values))
        if len(wrong):
            raise ValueError(
                f"values[{wrong[0]}] is {values[wrong[0]]}, expected a finite rating; {len(wrong)} "
                "entries are not finite. Leave out what is not rated."
            )
        # Stable: two ratings of the same entry stay in the order in which they were given.
        order = np.lexsort((items, users))
        users, items = users[order], items[order]
        same = np.flatnonzero((users[1:] == users[:-1]) & (items[1:] == items[:-1]))
        if len(same):
            first, second = order[same[0]], order[same[0] + 1]
            raise ValueError(
                f"Entries {first} and {second} are both ratings of item {items[same[0]]} by user "
                f"{users[same[0]]}, expected one at most."
            )
        for name, array in (("users", users), ("items", items), ("values", values[order])):
            object.__setattr__(self, name, array)

    def __len__(self) -> int:
        """Return the number of ratings, |Ω|."""
        return len(self.values)

    def select(self, chosen: NDArray[Any]) -> Ratings:
        """Return some of the ratings, by a mask or by their places."""
        users, items, values = self.users[chosen], self.items[chosen], self.values[chosen]
        return Ratings(users, items, values, self.num_users, self.num_items)

    def split(self, test_fraction: float, rng: np.random.Generator) -> tuple[Ratings, Ratings]:
        """Split at random into ratings to train on and to test with.

        Parameters
        ----------
        test_fraction : float
            Share of the ratings in the test part, between 0 and 1; rounded, and at least one rating
            goes to each part.
        rng : numpy.random.Generator
            Draws the parts.

        Returns
        -------
        train, test : Ratings
            Every rating is in one of the two. A user or an item may lose all of its training
            ratings.

        Raises
        ------
        ValueError
            If `test_fraction` is not between 0 and 1, or there is but one rating.
        """
        if not 0 < test_fraction < 1:
            raise ValueError(f"test_fraction is {test_fraction}, expected 0 < test_fraction < 1.")
        if len(self) < 2:
            raise ValueError("One rating cannot be split into a training and a test part.")
        num_test = min(max(1, round(test_fraction * len(self))), len(self) - 1)
        in_test = np.zeros(len(self), dtype=bool)
        in_test[rng.choice(len(self), num_test, replace=False)] = True
        return self.select(~in_test), self.select(in_test)

    def to_csr(self) -> csr_matrix:
        """Return the ratings as a sparse matrix, shape (num_users, num_items).

        Its ``data`` are `values`, in their order, and ratings of 0 are stored in it: a matrix of
        the same pattern is made by replacing ``data``. Needs SciPy.
        """
        from scipy.sparse import csr_matrix

        per_user = np.bincount(self.users, minlength=self.num_users)
        starts = np.concatenate(([0], np.cumsum(per_user)))
        return csr_matrix((self.values, self.items, starts), (self.num_users, self.num_items))

    def pattern(self, dtype: DTypeLike = np.float64) -> csr_matrix:
        """Return what `to_csr` does with a 1 in the place of every rating."""
        matrix = self.to_csr()
        matrix.data = np.ones(len(self), dtype)
        return matrix
