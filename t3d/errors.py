"""The one exception that is meant for people, and text from files and environments made safe to print.

Its text is a sentence: what was wrong, where, and what to do. The command line prints it without a
traceback and exits with 2; in Python it is an ordinary exception to catch.
"""

import os
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

# Control characters, lone surrogates, and what reverses or breaks a line in a terminal.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


class T3DError(ValueError):
    """Something the user can put right. Names from files and environments cannot reach the terminal with it."""

    def __init__(self, sentence: str) -> None:
        super().__init__(plain(shortened(sentence)))


class T3DWarning(UserWarning):
    """Something that went wrong and was dealt with."""


def warn(sentence: str) -> None:
    """Warn in one sentence, without control characters."""
    warnings.warn(plain(sentence), T3DWarning, stacklevel=3)


def command(*words: object) -> str:
    """`t3d WORDS…` as it can be pasted into a shell, also where the virtual environment is not activated."""
    active = Path(shutil.which("t3d") or "").parent == Path(sys.executable).parent
    program = "t3d" if active else f"{shlex.quote(os.path.relpath(sys.executable))} -m t3d"
    return " ".join([program, *(shlex.quote(str(word)) for word in words)])


def plain(text: str) -> str:
    r"""The text with every control character escaped, as in \x1b: nothing in it can steer a terminal."""

    def escaped(found: re.Match[str]) -> str:
        code = ord(found[0])
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"

    return _UNPRINTABLE.sub(escaped, text)


def shortened(text: str, most: int = 2000) -> str:
    """The text without its middle, where it is long: what went wrong is in front, and what to type next behind."""
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def plain_lines(text: str) -> str:
    """The same for a text of several lines."""
    return "\n".join(plain(line) for line in text.split("\n"))


def shown(value: object) -> str:
    """A value of unknown origin as Python writes it, cut off where it is long."""
    try:
        text = str.__str__(repr(value))
    except KeyboardInterrupt:
        raise
    except BaseException:  # its own __repr__, say, which may do anything
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def nearest(word: str, words: Iterable[str], count: int = 3) -> str:
    """Did you mean …? — or nothing, where no word is near."""
    by_lower = {candidate.lower(): candidate for candidate in words}
    close = [by_lower[match] for match in get_close_matches(word.lower(), by_lower, count, 0.6)]
    return f" Did you mean {' or '.join(close)}?" if close else ""
