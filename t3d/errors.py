"""T3DError, T3DWarning, and functions that make untrusted text safe to print.

The message of a T3DError is a sentence: what was wrong, where, and what to do. The command line prints it
without a traceback and exits with status 2.
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

# Control characters, lone surrogates, and characters that are invisible or reverse or break a line in a terminal.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\ud800-\udfff\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)


class T3DError(ValueError):
    """An error that the user can fix. The message is escaped, so untrusted names cannot control the terminal."""

    def __init__(self, sentence: str) -> None:
        super().__init__(plain(shortened(sentence)))


class T3DWarning(UserWarning):
    """A problem that T3D handled."""


def warn(sentence: str) -> None:
    """Warn in one sentence, without control characters."""
    warnings.warn(plain(sentence), T3DWarning, stacklevel=3)


def command(*words: object) -> str:
    """Return `t3d WORDS…` for a shell; it works without activating the virtual environment."""
    active = Path(shutil.which("t3d") or "").parent == Path(sys.executable).parent
    program = "t3d" if active else f"{shlex.quote(os.path.relpath(sys.executable))} -m t3d"
    return " ".join([program, *(shlex.quote(str(word)) for word in words)])


def plain(text: str) -> str:
    r"""Escape control characters, as in \x1b, so that the text cannot control a terminal."""

    def escaped(found: re.Match[str]) -> str:
        code = ord(found[0])
        return f"\\x{code:02x}" if code < 2**8 else f"\\u{code:04x}" if code < 2**16 else f"\\U{code:08x}"

    return _UNPRINTABLE.sub(escaped, text)


def shortened(text: str, most: int = 2000) -> str:
    """Cut the middle out of a long text: the problem is at its start, and the next command at its end."""
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def plain_lines(text: str) -> str:
    """`plain` for a text of several lines."""
    return "\n".join(plain(line) for line in text.split("\n"))


def shown(value: object) -> str:
    """The repr of an untrusted value, cut off if it is long."""
    try:
        text = str.__str__(repr(value))
    except KeyboardInterrupt:
        raise
    except BaseException:  # for example from its own __repr__
        text = f"a {class_name(value)}"
    return text if len(text) <= 80 else text[:77] + "..."


def class_name(value: object) -> str:
    """The name of a value's class, also if its metaclass defines another `__name__`."""
    return str(type.__dict__["__name__"].__get__(type(value)))


def nearest(word: str, words: Iterable[str], count: int = 3) -> str:
    """Return " Did you mean …?" with similar words, or ""."""
    by_lower = {candidate.lower(): candidate for candidate in words}
    close = [by_lower[match] for match in get_close_matches(word.lower(), by_lower, count, 0.6)]
    return f" Did you mean {' or '.join(close)}?" if close else ""
