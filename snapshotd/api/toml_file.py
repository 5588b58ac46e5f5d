"""Reads a TOML file into the fields of a msgspec struct: snapshotd.toml and cluster.toml.

Invariant: all problems of a file are reported together, each with its key and what is expected there, so that an operator
need not try again once for each mistake. msgspec.convert of a whole table would stop at the first problem.

Every field is `Annotated[TYPE, Meta(description=…)]`. The description completes the sentence "KEY must be …".
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import Meta

from snapshotd.api.errors import BadConfig


def text(description: str, parse: Callable[[str], str]) -> Meta:
    """Describes a text that `parse` checks and normalises; it raises ValueError."""
    return Meta(description=description, extra={"parse": parse})


def table(description: str, struct: type[msgspec.Struct]) -> Meta:
    """Describes a table with the fields of `struct`, from which an object of the field's own type is made."""
    return Meta(description=description, extra={"table": struct})


def load(path: Path) -> dict[str, Any]:
    """The top table of the file. Raises BadConfig, and FileNotFoundError if there is no such file."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BadConfig(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path} is not valid TOML: {error}") from error


def read(
    struct: type[msgspec.Struct],
    values: Mapping[str, Any],
    prefix: str,
    problems: list[str],
    *,
    without: Collection[str] = (),
) -> dict[str, Any]:
    """The valid values of a table by field, defaults included. What is wrong with the others is added to `problems`.

    `prefix` precedes the keys in messages ("tls."). The fields in `without` are not keys of the file.
    """
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct) if field.name not in without}
    found: dict[str, Any] = {}
    for key, field in fields.items():
        kind, meta = get_args(field.type)
        inner = (meta.extra or {}).get("table")
        if key not in values:
            if field.required:
                problems.append(f"{prefix}{key}: is missing; it must be {meta.description}")
            else:
                made = field.default is msgspec.NODEFAULT  # an empty table is made anew for each file
                found[field.name] = field.default_factory() if made else field.default
        elif inner is not None:
            if not isinstance(values[key], dict):
                problems.append(f"{prefix}{key}: must be {meta.description}, not {values[key]!r}")
                continue
            contents = read(inner, values[key], f"{prefix}{key}.", problems)
            if len(contents) == len(inner.__struct_fields__):
                found[field.name] = kind(**contents)
        else:
            try:
                found[field.name] = _converted(values[key], field.type, meta)
            except ValueError as error:  # msgspec's ValidationError is one
                reason = f"must be {meta.description}, not {values[key]!r}"
                problems.append(f"{prefix}{key}: {reason if isinstance(error, msgspec.ValidationError) else error}")
    for key in sorted(set(values) - set(fields)):  # a misspelt key must not silently become a default
        near = difflib.get_close_matches(key, sorted(set(fields) - set(values)) or fields, n=1)
        problems.append(f"{prefix}{key}: unknown key" + (f"; did you mean {prefix}{near[0]}?" if near else ""))
    return found


def _converted(value: Any, kind: Any, meta: Meta) -> Any:
    """Raises msgspec.ValidationError for another type or range, ValueError for a text that cannot be parsed."""
    parse = (meta.extra or {}).get("parse")
    if parse is None:
        return msgspec.convert(value, kind)
    plain = get_args(kind)[0]
    if plain in (str, Path, Path | None):
        parsed = parse(msgspec.convert(value, str))
        return parsed if plain is str else Path(parsed)
    found, wrong = [], []
    for item in msgspec.convert(value, list[Any]):
        try:
            found.append(parse(msgspec.convert(item, str)))
        except ValueError:
            wrong.append(repr(item))
    if wrong:
        raise ValueError(f"must be {meta.description}; these are not: {', '.join(wrong)}")
    return tuple(found)


def check(problems: list[str], origin: str) -> None:
    """Raises BadConfig with all problems of `origin`, if there are any."""
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise BadConfig("\n  - ".join([f"{origin} has {count}:", *problems]))
