"""The one exception that is meant for people.

Its text is a sentence: what was wrong, where, and what to do. The command line prints it without a
traceback and exits with 2; in Python it is an ordinary exception to catch.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class T3DError(ValueError):
    """Something the user can put right."""


def nearest(word: str, words: Iterable[str], count: int = 3) -> str:
    """Did you mean …? — or nothing, where no word is near."""
    by_lower = {candidate.lower(): candidate for candidate in words}
    close = [by_lower[match] for match in get_close_matches(word.lower(), by_lower, count, 0.6)]
    return f" Did you mean {' or '.join(close)}?" if close else ""
