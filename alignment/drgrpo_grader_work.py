"""How much one verdict may cost, counted in operations and not in seconds, so that it is the same on every machine."""

LIMIT = 20_000  # units; each is up to 25 microseconds, so half a second
NUMERIC_COST = 100  # of evaluating two expressions at all points, in units


class TooMuchWork(ValueError):
    """A verdict has used up its units."""


class Work:
    """The units that one verdict has spent: one a comparison of two texts, one a product of two monomials."""

    def __init__(self, limit: int = LIMIT):
        self.left = limit

    def spend(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise TooMuchWork("a comparison of too many parts")
