"""
A stand-in for a payment provider, with one card that pays and one that does not.

The shop charges inside its transaction to show what a late refusal undoes. With a real provider, whose
charge no rollback can undo, charge in a task of its own.
"""

from decimal import Decimal

GOOD_CARD = "good"
DECLINED_CARD = "declined"
CARDS = [
    (GOOD_CARD, "Test card that pays"),
    (DECLINED_CARD, "Test card that is declined"),
]


class CardDeclined(Exception):
    """The provider refused the charge."""


def charge(card: str, total: Decimal) -> None:
    """Charge *total* euros to *card*, or raise ``CardDeclined``."""
    if card == DECLINED_CARD:
        raise CardDeclined(f"The card was declined for {total} euros.")
