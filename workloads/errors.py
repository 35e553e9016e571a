"""One error for every bad input: what was wrong, where, what is allowed. The command line prints it and exits 2."""

from collections.abc import Iterable


class InputError(Exception):
    """Bad input by the user; its text is shown as it is."""


def one_of(what: str, value: object, choices: Iterable[str], where: str = "") -> InputError:
    """The error for a value outside a list of choices, naming the nearest ones first."""
    from difflib import get_close_matches

    names = sorted(set(choices), key=lambda name: (int(name) if name.isdecimal() else -1, name))
    near = get_close_matches(str(value), names, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    place = f"{where}: " if where else ""
    return InputError(f"{place}unknown {what} {value!r}{hint}; choose one of: {', '.join(names) or 'none'}")
