"""When two values of a script's variables are the same."""

from ingot.migrate.shell.values import Array, Fragment, identity, unknown

A, B, AB = (Fragment(text, "run.sh:1") for text in ("a", "b", "ab"))
(X,) = unknown("X", "is not set", "run.sh:2")


def test_how_a_value_is_divided_and_where_it_was_set_does_not_matter() -> None:
    assert identity((A, B)) == identity((AB,)) == identity((Fragment("ab", "run.sh:9", quoted=True),))
    assert identity((A, B, X)) == identity((AB, X)) and identity(()) == identity((Fragment("", "run.sh:1"),))


def test_what_is_not_known_counts_where_it_is() -> None:
    values = [(A,), (A, X), (X, A), (X,), (X, X), (A, X, B), (AB, X), (), None, Array(()), Array(((A,), (X,)))]
    assert all(identity(one) != identity(other) for n, one in enumerate(values) for other in values[:n])
    (other,) = unknown("X", "comes from the caller", "run.sh:2")
    assert identity((X,)) != identity((other,))
