"""The options of a command, as its dataclass declares them: the help page, and the parser.

An option is a field. Its help text is the string after the field. `Group` and `Shown` in its annotation say where
and how the help page prints it: `threads: Annotated[int, Group.HARDWARE, Shown(default="by size")]`. `POSITIONAL` marks
an argument that is given by its position, `SHOWN_ONLY` one that the parser does not read.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from t3d.errors import T3DError, nearest, shown

HELP = ("-h", "--help")
POSITIONAL, SHOWN_ONLY = "positional", "shown only"
_UNBROKEN = "\u00a0"


class Group(Enum):
    """The groups of options in `t3d train --help`, in the order printed."""

    COMMON = "Common options"
    RUN = "Run"
    ALGORITHM = "Algorithm"
    NETWORKS = "Networks"
    ENVIRONMENT = "Environment"
    EXPLORATION = "Exploration"
    EVALUATION = "Evaluation"
    SAVING = "Saving"
    HARDWARE = "Hardware"


@dataclass(frozen=True)
class Shown:
    """What the help page prints for an option, where its type and its default do not say it."""

    value: str = ""  # the placeholder of the value
    default: str | None = None  # in place of the default; nothing if empty
    invocation: str = ""  # in place of the name and the placeholder


@dataclass(frozen=True)
class Option:
    """An option of a command, or an argument that is given by its position."""

    field: str
    kind: Any  # int, float, str, Path, bool or a Literal
    many: bool  # takes several values
    positional: bool
    required: bool
    typed: bool  # the parser knows it; the others are only shown
    group: Group | None
    placeholder: str
    invocation: str
    text: str
    default: str  # as printed

    @property
    def name(self) -> str:
        """--batch-size, or ENV."""
        return self.placeholder.split()[0] if self.positional else flag(self.field)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that can be typed."""
        if self.positional or not self.typed:
            return ()
        return (self.name, "--no-" + self.name[2:]) if self.kind is bool else (self.name,)


def flag(field: str) -> str:
    """The name of an option on the command line."""
    return "--" + field.replace("_", "-")


# ------------------------------------------------------------------------------------------ declaration


def options_of(command: type, values: Any = None, group: Group | None = None) -> list[Option]:
    """The options of a command and of the dataclasses inside it.

    `values`, an instance, has the defaults to show. `group` is for the options that declare none.
    """
    hints, texts = get_type_hints(command, include_extras=True), _help_texts(command)
    by_name = {field.name: field for field in fields(command)}
    own = inspect.get_annotations(command)  # an inherited field that is declared again has its place here
    result: list[Option] = []
    for name in [*(name for name in by_name if name not in own), *own]:
        kind, extras = _unwrapped(hints[name])
        where = next((extra for extra in extras if isinstance(extra, Group)), group)
        value = getattr(values, name, MISSING)
        if is_dataclass(kind):
            result += options_of(kind, value, where)  # type: ignore[arg-type]
        else:
            result.append(_option(by_name[name], kind, extras, value, where, texts.get(name, "")))
    return result


def _option(
    field: Field[Any], kind: Any, extras: tuple[Any, ...], value: Any, group: Group | None, text: str
) -> Option:
    """The option that a field declares; `value` is its default, if the command line has another one."""
    many = get_origin(kind) is tuple
    kind = get_args(kind)[0] if many else kind
    positional = POSITIONAL in extras
    look = next((extra for extra in extras if isinstance(extra, Shown)), Shown())
    placeholder = look.value or _placeholder(kind, many)
    invocation = placeholder if positional else f"{flag(field.name)} {placeholder}".rstrip()
    if kind is bool:
        invocation = f"{flag(field.name)}, --no-{flag(field.name)[2:]}"
    default = field.default if value is MISSING else value
    return Option(
        field=field.name,
        kind=kind,
        many=many,
        positional=positional,
        required=field.default is MISSING and field.default_factory is MISSING,
        typed=SHOWN_ONLY not in extras,
        group=group,
        placeholder=placeholder,
        invocation=look.invocation or invocation,
        text=text,
        default=_written(default) if look.default is None or default != field.default else look.default,
    )


def _unwrapped(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type of an option and the rest of its annotation: Annotated[int | None, …] is an int."""
    extras: tuple[Any, ...] = ()
    while True:
        if get_origin(hint) is Annotated:
            hint, extras = get_args(hint)[0], extras + get_args(hint)[1:]
        elif get_origin(hint) in (Union, UnionType):
            hint = next(one for one in get_args(hint) if one is not type(None))
        else:
            return hint, extras


def _help_texts(command: type) -> dict[str, str]:
    """The string after each field, also of the fields that are inherited."""
    texts: dict[str, str] = {}
    for base in reversed(command.__mro__):
        if is_dataclass(base):
            try:
                tree = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            except OSError:  # Python was given no sources
                continue
            for field, text in pairwise(tree.body if isinstance(tree, ast.ClassDef) else []):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    value = text.value if isinstance(text, ast.Expr) else None
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        texts[field.target.id] = " ".join(value.value.split())
    return texts


def _placeholder(kind: Any, many: bool) -> str:
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    if kind is bool:
        return ""
    name = {int: "INT", float: "FLOAT", Path: "PATH"}.get(kind, "TEXT")
    return f"{name} ..." if many else name


def _written(default: Any) -> str:
    """A default as it would be typed; nothing for one that says nothing."""
    if default is MISSING or default is None or default is False or default in ("", ()) or isinstance(default, dict):
        return ""
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    if default is True:
        return "on"
    return f"{default:g}" if isinstance(default, float) else str(default)


# -------------------------------------------------------------------------------------------- help page


def help_page(prog: str, command: type, options: Sequence[Option], width: int) -> Iterator[tuple[str, bool]]:
    """The lines of a command's help, and whether each is a title."""
    usage = [option.placeholder for option in options if option.positional]
    usage += ["[options]"] if any(not option.positional for option in options) else []
    yield " ".join(["usage:", prog, *usage]), False
    yield "", False
    yield from ((line, False) for line in inspect.cleandoc(command.__doc__ or "").splitlines())
    titles = [*(group.value for group in Group), "Arguments", "Options"]
    for title in titles:
        if rows := [option for option in options if _title(option) == title]:
            yield "", False
            yield f"{title}:", True
            for option in rows:
                yield from ((line, False) for line in _row(option.invocation, _explained(option), width))


def _explained(option: Option) -> str:
    """The help text and the default, with a space that does not break inside [step 4] and short defaults."""
    text = re.sub(r"\[.*?\]", lambda found: found[0].replace(" ", _UNBROKEN), option.text)
    default = f"(default: {option.default})" if option.default else ""
    return f"{text} {default.replace(' ', _UNBROKEN) if len(default) < 30 else default}".rstrip()


def _title(option: Option) -> str:
    """The group of an option in the help."""
    if option.group is not None:
        return option.group.value
    return "Arguments" if option.positional else "Options"


def command_list(prog: str, about: str, summaries: dict[str, str], width: int) -> Iterator[tuple[str, bool]]:
    """The lines of the help that lists commands, and whether each is a title."""
    yield f"usage: {prog} COMMAND ...", False
    yield "", False
    yield from ((line, False) for line in textwrap.wrap(about, width))
    yield "", False
    yield "Commands:", True
    for name, summary in summaries.items():
        yield from ((line, False) for line in _row(name, summary, width, indent=13))
    yield "", False
    yield f"Options of a command: {prog} {next(iter(summaries))} --help", False
    yield "Version: t3d --version", False


def _row(invocation: str, text: str, width: int, indent: int = 26) -> list[str]:
    """An option on the left, its text on the right; below it, where the option is long."""
    space = " " * indent
    lines = textwrap.wrap(text, max(width, 50), initial_indent=space, subsequent_indent=space, break_on_hyphens=False)
    lines = [line.replace(_UNBROKEN, " ") for line in lines]
    if lines and len(invocation) + 4 <= indent:
        return [f"  {invocation}".ljust(indent) + lines[0][indent:], *lines[1:]]
    return [f"  {invocation}", *lines]


# ------------------------------------------------------------------------------------------------ parser


def parse(prog: str, options: Sequence[Option], words: Sequence[str]) -> dict[str, Any]:
    """The values that were typed after a command, by field; the first thing that is wrong is refused in a sentence."""
    values: dict[str, Any] = {}
    by_name = {name: option for option in options for name in option.names}
    waiting = [option for option in options if option.positional]
    help_hint = f" All options: {prog} --help"
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--" or not _is_option(word):
            if word == "--":  # what follows is given by position
                positional, rest = rest, []
            else:
                positional = [word, *_taken(rest)]
            _take_positional(prog, waiting, positional, values)
            continue
        name, equals, value = word.partition("=")
        option = by_name.get("--" + name[2:].replace("_", "-")) if name.startswith("--") else None
        if option is None:
            raise T3DError(f'there is no option {name} for "{prog}".{_similar(name, options)}{help_hint}')
        if option.kind is bool:
            if equals:
                raise T3DError(f"{name} takes no value.{help_hint}")
            values[option.field] = not name.startswith("--no-")
            continue
        following = _taken(rest, None if option.many else 0 if equals else 1)
        given = ([value] if equals else []) + following
        if not given:
            raise T3DError(f"{name} needs a value: {takes(option.kind, option.many)}.{help_hint}")
        for number, value in enumerate(given):
            if sentence := _misfit(name, option, value):
                first = number and any(one.name == "ENV" for one in waiting)
                raise T3DError(sentence + (f" Put ENV before {name}." if first else "") + help_hint)
        read = tuple(_READERS.get(option.kind, str)(value) for value in given)
        values[option.field] = read if option.many else read[0]
    if waiting and waiting[0].required:
        raise T3DError(f'"{prog}" needs {waiting[0].name}: {_begun(waiting[0].text)}{help_hint}')
    return values


def fill(command: Any, values: dict[str, Any]) -> Any:
    """A dataclass instance, and those inside it, with some of the fields set."""
    names = {field.name: getattr(command, field.name) for field in fields(command)}
    inner = {name: fill(part, values) for name, part in names.items() if is_dataclass(part)}
    return replace(command, **inner, **{name: values[name] for name in names if name in values})


def _take_positional(prog: str, waiting: list[Option], words: list[str], values: dict[str, Any]) -> None:
    """Read arguments by position; more than the command takes are refused."""
    for word in words:
        if not waiting:
            raise T3DError(f'"{prog}" does not take the argument {shown(word)}. All options: {prog} --help')
        option = waiting[0] if waiting[0].many else waiting.pop(0)
        value = _READERS.get(option.kind, str)(word)
        values[option.field] = (*values.get(option.field, ()), value) if option.many else value


def _is_option(word: str) -> bool:
    """--steps is an option; -1, -.5 and -inf are values."""
    return re.match(r"-+[A-Za-z]", word) is not None and word.lower() not in ("-inf", "-infinity", "-nan")


def _taken(rest: list[str], most: int | None = None) -> list[str]:
    """Take the values in front of the next option."""
    count = 0
    while count < len(rest) and count != most and rest[count] != "--" and not _is_option(rest[count]):
        count += 1
    taken, rest[:count] = rest[:count], []
    return taken


def _similar(name: str, options: Sequence[Option]) -> str:
    """Did you mean …? with options of this command only."""
    word = name.lstrip("-").lower().replace("_", "-")
    for option in options:
        if option.positional and option.name.lower() == word:
            return f" {option.name} is given without {name}."
    if same := same_option(word):
        return same
    inverse = word.startswith("no-")
    names = [name[2:] for option in options for name in option.names if inverse or not name.startswith("--no-")]
    close = get_close_matches(word, names, 1, 0.7)
    parts = [one for one in names if word in one.split("-")]  # --lr: --actor-lr or --critic-lr
    found = close or (parts if len(parts) <= 3 else [])
    return f" Did you mean {' or '.join('--' + one for one in found)}?" if found else ""


# What the paper, the documents and other libraries call an option.
OTHER_NAMES = {
    "steps": ("total-timesteps", "max-timesteps", "num-timesteps", "timesteps", "total-steps"),
    "random-steps": ("learning-starts", "start-timesteps", "start-steps", "warmup-steps"),
    "exploration-noise": ("expl-noise", "action-noise", "act-noise"),
    "target-noise": ("policy-noise", "target-policy-noise"),
    "target-noise-clip": ("noise-clip",),
    "policy-delay": ("policy-freq", "policy-frequency"),
    "actor-lr or --critic-lr": ("lr", "learning-rate"),
    "eval-every": ("eval-freq", "eval-frequency"),
    "gamma": ("discount",),
    "buffer-size": ("memory-size", "replay-size", "max-size"),
    "hidden": ("net-arch", "hidden-sizes", "hidden-dim", "layers"),
    "updates-per-step": ("gradient-steps", "utd", "updates"),
    "num-envs": ("n-envs",),
    "her": ("relabel",),
    "async-eval": ("eval-beside",),
    "train-freq": ("update-after",),
    "worker-timeout": ("stall-seconds",),
}


def same_option(name: str) -> str:
    """The option that has another name elsewhere, as a sentence; or nothing."""
    word = name.lstrip("-").lower().replace("_", "-")
    return next((f" Did you mean --{own}?" for own, others in OTHER_NAMES.items() if word in others), "")


def _misfit(name: str, option: Option, value: str) -> str:
    """What is wrong with a value, or nothing."""
    if get_origin(option.kind) is Literal:
        if value in get_args(option.kind):
            return ""
        hint = nearest(value, get_args(option.kind), 1)
        return f"{name} cannot be {shown(value)}: it takes {takes(option.kind)}.{hint}"
    try:
        _READERS.get(option.kind, str)(value)
    except ValueError:
        return f"{name} cannot be {shown(value)}: it takes {takes(option.kind, option.many)}."
    return ""


def takes(kind: Any, many: bool = False) -> str:
    """What the values of a type are, in words."""
    if get_origin(kind) is Literal:
        *others, last = get_args(kind)
        return f"{', '.join(others)} or {last}"
    if many:
        return {int: "whole numbers, with spaces between them"}.get(kind, "names, with spaces between them")
    words = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
    return words.get(kind, "a text")


def whole_number(word: str) -> int:
    """1000, 1_000 and 1e3 are whole numbers."""
    try:
        return int(word)
    except ValueError:
        number = float(word)
    if not number.is_integer():
        raise ValueError(f"{word} is not a whole number")
    return int(number)


_READERS: dict[Any, Callable[[str], Any]] = {int: whole_number, float: float, Path: Path}


def _begun(text: str) -> str:
    """The text as it continues a sentence."""
    return text[:1].lower() + text[1:]
