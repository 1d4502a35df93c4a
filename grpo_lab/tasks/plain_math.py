"""Answers compared as what they are: choices, dates, times, lists, intervals, quantities, texts, then expressions.

This is the reading of `PlainMath`, the verifier of evaluation. It shares no code with `grader_worker.py`, which asks
math-verify. An expression is computed at a few fixed points, exactly as long as it is rational. Steps on a whole
answer are linear in it; an answer of more than `LONGEST_ANSWER` characters is not read.
"""

from __future__ import annotations

import cmath
import math
import re
import unicodedata
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

LONGEST_ANSWER = 1_000
_MOST_DIGITS = 200  # of a number that is written in digits
_MOST_BITS = 50_000  # of a number on the way
_DEEPEST = 30  # brackets within brackets


def same_answer(gold: str, answer: str) -> bool:
    """True if an answer means what the right one means."""
    if max(len(gold), len(answer)) > LONGEST_ANSWER:
        return False
    gold, answer = _undressed(gold), _undressed(answer)
    if _key(gold) == _key(answer) != "":
        return True
    for same in (_same_choice, _same_date, _same_time):
        if (verdict := same(gold, answer)) is not None:
            return verdict
    return any(_equal(right, read) for right in _readings(gold) for read in _readings(answer))


# Formatting: LaTeX and Unicode that change the looks of an answer and not its meaning

_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|[0-9]+|[a-zA-Z]+|\s+|.", re.DOTALL)
_SIGNS = "−–×÷·⋅π∞≤≥≠∪∩√∅∈±¬°€£¢"  # noqa: RUF001
_COMMANDS = r"- - \times \div \cdot \cdot \pi \infty \le \ge \ne \cup \cap \sqrt \emptyset \in \pm \neg \degree"
_LOOKS = {sign: name if name == "-" else f"{name} " for sign, name in zip(_SIGNS, _COMMANDS.split())}
_TEXTS = "text textbf textit textrm textsf texttt textnormal textup textsc mbox hbox mathrm operatorname emph SI qty"
_DRESS = (
    "left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr displaystyle textstyle limits boldsymbol"
    " bm pmb mathbf mathit mathsf mathtt mathcal mathord mathop underline ensuremath boxed fbox bf rm it sf tt large"
    " Large LARGE huge Huge normalsize small num therefore implies Rightarrow checkmark blacksquare square qed"
    " ! ( ) [ ]"
)
_HIDDEN = "textcolor color colorbox hspace vspace phantom hphantom vphantom tag label cancel xcancel pmod bmod mod pod"
_SPACES = ", ; : > quad qquad enspace thinspace medspace thickspace colon"
_RENAMED = (
    "dfrac frac tfrac frac cfrac frac dbinom binom tbinom binom leq le leqslant le geq ge geqslant ge neq ne"
    " varnothing emptyset infin infty lbrace { rbrace } degree circ euro € pounds £ lvert | rvert | vert | cents ¢"
)
_ROLES = {
    **dict.fromkeys(_TEXTS.split(), "text"),
    **dict.fromkeys(_DRESS.split(), "dress"),
    **dict.fromkeys(_HIDDEN.split(), "hidden"),
    **dict.fromkeys([*_SPACES.split(), " "], "space"),
}
_SPELLED = {
    **dict(zip(_RENAMED.split()[::2], (f"\\{name} " for name in _RENAMED.split()[1::2]))),
    **{"lt": "<", "gt": ">", "equiv": "=", "sim": "=", "imath": "i", "%": "%", "$": "¤", "#": "#"},
    **{"lbrace": "\\{", "rbrace": "\\}", "lvert": "|", "rvert": "|", "vert": "|", "to": ",", "cents": "¢", "&": "&"},
    **{"euro": "€", "pounds": "£", "circ": "°", "degree": "°", "_": "_"},
}
_JOINED = re.compile(r"(?<=[0-9])(?:,? ?\\! ?|\{,\}|\\,|\\ |\\;|\\:|~)(?=[0-9]{3}(?![0-9]))")
_DEGREES = re.compile(r"\^\s*(?:°|\{\s*°\s*\})")
_QUOTES = re.compile(r"([\"'`*_]{1,3})([^\"'`*]*)\1")
_LEAD = re.compile(
    r"\W{0,9}(?:(?:the )?(?:final |correct )?(?:answer|option|choice)(?: is| was)?\b\W{0,3}|(?:about|approximately"
    r"|roughly|exactly|approx\.?|in the year|the year|year)\s(?=\W?[0-9])|(?:=|\\approx)\s*)\s*(?=\S)",
    re.IGNORECASE,
)


def _undressed(text: str) -> str:
    """The text in one spelling of each sign, without commands that only change its looks."""
    text = _JOINED.sub("", text).replace("...", "\\ldots ")
    if "matrix" not in text:
        text = re.sub(r"\\\\(?=[a-zA-Z]{2})", r"\\", text)  # a command whose backslash was escaped
    for pair, sign in (("<=", "\\le "), (">=", "\\ge "), ("!=", "\\ne ")):
        text = text.replace(pair, sign)
    signs = []
    for sign in text:
        plain = unicodedata.normalize("NFKC", sign)
        if sign in _LOOKS:
            signs.append(_LOOKS[sign])
        elif "\u2044" in plain[1:]:  # ½ becomes 1, a fraction slash and 2
            signs.append(" " + plain.replace("\u2044", "/"))
        elif unicodedata.decomposition(sign).startswith("<super>"):
            signs.append("^" + plain)
        elif unicodedata.category(sign) != "Cf":  # marks of direction and width zero show nothing
            signs.append("/" if sign == "\u2044" else plain)
    text = "".join(signs)
    if text.count("$") - text.count("\\$") != 1:  # one alone is a dollar, a pair holds a formula
        text = re.sub(r"(?<!\\)\$", " ", text)
    tokens, shown, braces, place = _TOKEN.findall(text), [], [], 0
    while place < len(tokens):
        token = tokens[place]
        place += 1
        role = _ROLES.get(token[1:]) if token.startswith("\\") else None
        if token[1:] in ("begin", "end") and token.startswith("\\"):
            after = _after_argument(tokens, place)
            name = "".join(tokens[place:after]).strip("{} ")
            if name.endswith("matrix"):
                shown.append(f"{token}{{{name}}}")
            elif name == "array" and token == "\\begin":
                after = _after_argument(tokens, after)
            place = after
        elif role == "hidden":
            place = _after_argument(tokens, place)
        elif role == "text" and "".join(tokens[place : place + 2]).lstrip().startswith("{"):
            place = tokens.index("{", place) + 1
            braces.append(" ")
            shown.append(" ")
        elif role in ("dress", "text"):
            if token in ("\\left", "\\right") and place < len(tokens) and tokens[place] == ".":
                place += 1
        elif role == "space" or token in ("~", "\\"):
            shown.append(" ")
        elif token.startswith("\\"):
            shown.append(_SPELLED.get(token[1:], f"{token} " if token[1:].isalpha() else token))
        elif token == "{":
            braces.append("}")
            shown.append(token)
        elif token == "}":
            shown.append(braces.pop() if braces else token)
        else:
            shown.append("¤" if token == "$" else token)
    shown_text = _DEGREES.sub("°", "".join(shown))
    return _JOINED.sub("", " ".join(shown_text.split()))


def _after_argument(tokens: Sequence[str], place: int) -> int:
    """The place behind the argument that begins at `place`: a group in braces, or one token."""
    while place < len(tokens) and tokens[place].isspace():
        place += 1
    depth = 0
    for end in range(place, len(tokens)):
        depth += {"{": 1, "}": -1}.get(tokens[end], 0)
        if depth <= 0:
            return end + 1
    return len(tokens)


def _trimmed(text: str) -> str:
    """The text without quotes, lead-ins, braces around all of it and punctuation at its end."""
    before = None
    while text != before:
        before = text
        text = text.strip().strip("*").rstrip(".,;:!? " if text.endswith("?") else ".,;: ").strip()
        if quoted := _QUOTES.fullmatch(text):
            text = quoted[2]
        text = _LEAD.sub("", text, count=1) if _LEAD.match(text) else text
        opening, inner, closing = _unbracketed(text, "{", "}")
        if opening and closing:
            text = inner
    return text


def _key(text: str) -> str:
    """A text as it is compared: words by letters and digits in one case, anything else sign by sign."""
    bare = re.sub(r"(?<![0-9])\s+|\s+(?![0-9])|[{}]", "", text)  # 7 2 is not 72
    return re.sub(r"[\W_]", "", bare).casefold() if _is_words(text) else bare.rstrip(".,;:")


def _is_words(text: str) -> bool:
    """True if a text has a word of two letters or more and no sign of mathematics."""
    return re.search("[^\\W\\d_]{2}", text) is not None and not re.search(r"[\\^_=<>+*/|°%¤]", text)


# Choices, dates and times of day: None where the right answer and the answer are neither

_CHOICE = re.compile(r"\((?P<round>[A-J])\)[.:]?\s*(?P<said>.*)|(?P<bare>[A-J])(?:[.:)]\s*(?P<tail>.*))?", re.DOTALL)
_MONTHS = "january february march april may june july august september october november december"
_MONTH = {form: number for number, name in enumerate(_MONTHS.split(), 1) for form in (name, name[:3], name[:4])}
_NAME = "(?P<month>[a-z]{3,9})"
_DAY = r"(?P<day>[0-9]{1,2})\s?(?:\^?\s?\{?\s?(?:st|nd|rd|th)\s?\}?)?"
_YEAR = "(?P<year>[0-9]{4})"
_DATES = tuple(
    re.compile(form)
    for form in (
        rf"{_YEAR}-(?P<number>[0-9]{{1,2}})-(?P<day>[0-9]{{1,2}})",
        rf"(?P<number>[0-9]{{1,2}})/(?P<day>[0-9]{{1,2}})/{_YEAR}",  # as Americans write it
        rf"(?:[a-z]{{3,9}},? )?{_NAME}\.? (?:the )?{_DAY}(?:,? {_YEAR})?",
        rf"(?:[a-z]{{3,9}},? )?(?:the )?{_DAY} (?:of )?{_NAME}\.?(?:,? {_YEAR})?",
        rf"{_NAME}\.?,? {_YEAR}",
    )
)
_TIME = re.compile(
    r"(?P<hour>[0-9]{1,2}) ?(?:: ?(?P<minute>[0-5][0-9])(?: ?: ?(?P<second>[0-5][0-9]))?)? ?(?P<half>[ap]\.? ?m\.?)?"
)


def _choice(text: str, any_case: bool) -> tuple[str, str] | None:
    """The letter of a choice, and what is said of it; None for anything else."""
    text = _trimmed(text)
    found = _CHOICE.fullmatch(text[:2].upper() + text[2:] if any_case else text)
    if not found or re.match(r"(?:or|and|,|/|&)", found["said"] or found["tail"] or ""):
        return None
    return found["round"] or found["bare"], (found["said"] or found["tail"] or "").strip()


def _same_choice(gold: str, answer: str) -> bool | None:
    right = _choice(gold, any_case=False)
    if right is None:
        return None
    chosen = _choice(answer, any_case=True)
    letter, text = chosen or (right[0], answer)
    agree = not text or not right[1] or _equal(_read(right[1]), _read(text))
    return letter == right[0] and agree and bool(chosen or right[1])


def _date(text: str) -> tuple[int | None, int | None, int | None] | None:
    """Year, month and day, None for what is not said."""
    text = _trimmed(text).replace("{", "").replace("}", "").casefold()
    for form in _DATES:
        if found := form.fullmatch(text):
            parts = found.groupdict()
            month = _MONTH.get(parts["month"] or "") if "month" in parts else int(parts["number"])
            if month is None or not 1 <= month <= 12:
                return None
            year, day = (int(parts[name]) if parts.get(name) else None for name in ("year", "day"))
            return year, month, day
    return None


def _same_date(gold: str, answer: str) -> bool | None:
    right, read = _date(gold), _date(answer)
    if right is None or read is None:
        return None if right is read else False
    return all(part is None or part == other for part, other in zip(right, read))


def _time(text: str) -> tuple[int, str] | None:
    """Seconds of a day, and a or p; "" for a clock of 24 hours, or where it is not said."""
    text = _trimmed(text).replace("{", "").replace("}", "").casefold()
    text = {"noon": "12:00pm", "midnight": "12:00am"}.get(text, text)
    found = _TIME.fullmatch(text)
    if not found or not (found["minute"] or found["half"]) or int(found["hour"]) > 24:
        return None
    half, hour = (found["half"] or "")[:1], int(found["hour"])
    if half:
        if hour > 12:
            return None
        hour = hour % 12 + 12 * (half == "p")
    return 3600 * hour + 60 * int(found["minute"] or 0) + int(found["second"] or 0), half


def _same_time(gold: str, answer: str) -> bool | None:
    right, read = _time(gold), _time(answer)
    if right is None or read is None:
        return None if right is read or (right is None and ":" in gold) else False
    if read[1] and not right[1]:
        return right[0] % 43200 == read[0] % 43200
    # Without a.m. or p.m. an hour after 12 is plain, an earlier one is not.
    return right[0] == read[0] and (right[1] == "" or read[1] != "" or read[0] >= 13 * 3600)


# Values

_LIST, _UNION = "{}", "\\cup"
_ORDERED = {"(": ")", "[": "]"}


@dataclass(frozen=True)
class _Words:
    key: str


@dataclass(frozen=True)
class _Quantity:
    """A number or an expression: its value at each point, and exactly if it is written as a number."""

    exact: Fraction | None
    values: tuple[Fraction | complex | None, ...]
    constant: bool
    measure: str = ""  # cm^2, dollar, %
    nouns: frozenset[str] = frozenset()
    key: str = ""


@dataclass(frozen=True)
class _Several:
    """A list: `{}` without order, or with the brackets of a tuple, an interval, a row or a column; or a union."""

    brackets: str
    items: tuple[_Value, ...]


@dataclass(frozen=True)
class _Named:
    name: str
    value: _Value


@dataclass(frozen=True)
class _Relation:
    """`difference` of both sides `sign` 0."""

    sign: str
    difference: tuple[Fraction | complex | None, ...]


_Value = _Words | _Quantity | _Several | _Named | _Relation


def _equal(gold: _Value, answer: _Value) -> bool:
    """True if two values are equal; names count where both have one."""
    if isinstance(gold, _Named) or isinstance(answer, _Named):
        return _equal_named(gold, answer)
    gold, answer = _alone(gold), _alone(answer)
    if isinstance(gold, _Several) and isinstance(answer, _Several):
        return _equal_several(gold, answer)
    if isinstance(gold, _Quantity) and isinstance(answer, _Quantity):
        return _equal_quantities(gold, answer)
    if isinstance(gold, _Relation) and isinstance(answer, _Relation):
        return gold.sign == answer.sign and _proportional(gold.difference, answer.difference, gold.sign in "<\\le")
    return isinstance(gold, _Words) and gold == answer


def _equal_several(gold: _Several, answer: _Several) -> bool:
    if gold.brackets in (_LIST, _UNION):  # as sets: each has its equal on the other side
        found = [[_equal(right, read) for read in answer.items] for right in gold.items]
        return (
            gold.brackets == answer.brackets
            and bool(gold.items) == bool(answer.items)
            and all(map(any, [*found, *zip(*found)]))
        )
    alike = gold.brackets == answer.brackets or {gold.brackets, answer.brackets} == {"()", "column"}
    return alike and len(gold.items) == len(answer.items) and all(map(_equal, gold.items, answer.items))


def _equal_named(gold: _Value, answer: _Value) -> bool:
    names, values = [], []
    for value in (gold, answer):
        names.append(value.name if isinstance(value, _Named) else "")
        values.append(value.value if isinstance(value, _Named) else value)
    if "" not in names:
        return names[0] == names[1] and _equal(*values)
    named, other = (values[0], values[1]) if names[0] else (values[1], values[0])
    tuple_of = re.fullmatch(r"\(([^()]*)\)", names[0] or names[1])
    if tuple_of and isinstance(other, _Several) and other.brackets == _LIST and isinstance(named, _Several):
        each = zip(tuple_of[1].split(","), named.items)
        return _equal(other, _Several(_LIST, tuple(_Named(name, item) for name, item in each)))
    return _equal(*values)


def _alone(value: _Value) -> _Value:
    """The element of a set of one, unless it is a set."""
    if isinstance(value, _Several) and value.brackets == _LIST and len(value.items) == 1:
        return value if isinstance(value.items[0], _Several) else value.items[0]
    return value


def _equal_quantities(gold: _Quantity, answer: _Quantity) -> bool:
    if {gold.measure, answer.measure} == {"%", ""} and gold.exact is not None and answer.exact is not None:
        hundred = Fraction(100) if gold.measure else Fraction(1, 100)
        return answer.exact in (gold.exact, gold.exact / hundred)
    both = (gold.measure or gold.nouns) and (answer.measure or answer.nouns)
    if both and (gold.measure != answer.measure or not (gold.measure or gold.nouns & answer.nouns)):
        return False
    if gold.exact is not None:  # the work must be done: no 37 * 43 for 1591
        return gold.exact == answer.exact
    if answer.exact is not None and isinstance(gold.values[0], complex) and answer.exact.denominator > 1_000:
        return False  # a rounded root
    return gold.key == answer.key or _alike(gold.values, answer.values, gold.constant and answer.constant)


# Reading

_RELATIONS = {"<": "<", ">": ">", "\\le": "\\le", "\\ge": "\\ge", "\\ne": "\\ne"}
_TURNED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne", "=": "="}
_EMPTY = _Several(_LIST, ())
_THOUSANDS = re.compile(r"[-+]?[¤]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_MATRIX = re.compile(r"\\begin\{[bp]?matrix\}(.*)\\end\{[bp]?matrix\}", re.DOTALL)


def _readings(text: str) -> list[_Value]:
    """A text as a value; `100,200` is a number or two."""
    text = _trimmed(text)
    exact, about, _ = text.partition("\\approx")
    readings = [_read(text.replace("\\approx", "="))]
    if about and re.search("[0-9]", exact):  # 1/3, about 0.333
        readings.append(_read(exact))
    parts = text.split(",")
    if _THOUSANDS.fullmatch(text) and not any(part.startswith("0") for part in parts):
        readings.append(_Several(_LIST, tuple(_read(part) for part in parts)))
    return readings


def _read(text: str, depth: int = 0) -> _Value:
    """A text as a value; words if it is nothing else."""
    text = _trimmed(text)
    if depth > _DEEPEST or not text:
        return _Words(_key(text))
    deeper = depth + 1
    if (quantity := _number_with_unit(text)) is not None:
        return quantity
    parts, separators = _split(text, ("and", "or", ",", ";"))
    if sum(map(bool, parts)) > 1:
        listed = [part for part in parts if part]
        equations = [len(_split(part, ("=", "\\in"))[0]) > 1 for part in listed]
        if equations[0] and not any(equations[1:]):  # n = 2, 3, 4
            name, value = re.split(r"=|\\in(?![a-zA-Z])", text, maxsplit=1)
            return _Named(_name(name), _read(value, deeper))
        items = tuple(item for part in listed for item in _signed(_read(part, deeper), part))
        ranges = all(isinstance(item, _Several) and item.brackets not in (_LIST, _UNION, "column") for item in items)
        inequalities = all(len(_split(part, tuple(_RELATIONS))[0]) > 1 for part in listed)
        return _Several(_UNION if ranges and inequalities and "or" in separators else _LIST, items)
    parts, _ = _split(text, ("\\cup",))
    if len(parts) > 1:
        return _Several(_UNION, tuple(_read(part, deeper) for part in parts))
    parts, _ = _split(text, ("=", "\\in"))
    if len(parts) > 1 and all(parts):
        return _equation(parts, deeper)
    parts, signs = _split(text, tuple(_RELATIONS))
    if len(parts) > 1 and all(parts):
        return _inequality(parts, signs, deeper) or _Words(_key(text))
    if text in ("\\emptyset", "empty set", "the empty set"):
        return _EMPTY
    if text in ("all real numbers", "all reals"):
        return _read("(-\\infty,\\infty)")
    if (bracketed := _bracketed(text, deeper)) is not None:
        return bracketed
    if "\\pm" in text or "\\mp" in text:
        both = (text.replace("\\pm", "+").replace("\\mp", "-"), text.replace("\\pm", "-").replace("\\mp", "+"))
        return _Several(_LIST, tuple(_read(one.lstrip("+ "), deeper) for one in both))
    return (None if _is_words(text) and not re.search("[0-9]", text) else _quantity(text)) or _Words(_key(text))


def _signed(value: _Value, text: str) -> tuple[_Value, ...]:
    """Both values of one that is written with plus or minus."""
    several = ("\\pm" in text or "\\mp" in text) and isinstance(value, _Several)
    return value.items if several and isinstance(value, _Several) else (value,)


def _equation(parts: Sequence[str], depth: int) -> _Value:
    """`x=5`, `m+n = 8+1 = 9` and `2+3=5` are what stands last, the first two with a name; or else a relation."""
    name = re.sub(r"_\s*(?:\{[^{}]*\}|[0-9a-zA-Z])", "", parts[0])
    if re.search("[a-zA-Z]", name) and not re.search("[0-9]", name):
        return _Named(_name(parts[0]), _read(parts[-1], depth))
    sides = [_quantity(part) for part in parts]
    if all(side is not None and side.constant for side in sides):
        return _read(parts[-1], depth)
    return _relation("=", sides[0], sides[-1]) or _Words(_key("=".join(parts)))


def _inequality(parts: Sequence[str], signs: Sequence[str], depth: int) -> _Value | None:
    """An interval if a variable stands alone between constants, or else a relation."""
    sides = [_quantity(part) for part in parts]
    if None in sides or len(parts) > 3:
        return None
    constant = [(side is not None and side.constant) or "\\infty" in part for side, part in zip(sides, parts)]
    if signs[0] in (">", "\\ge"):
        parts, sides, constant = parts[::-1], sides[::-1], constant[::-1]
        signs = [_TURNED[sign] for sign in signs[::-1]]
    closed = ["\\le" in sign for sign in signs]
    if constant == [True, False, True] and all(sign in ("<", "\\le") for sign in signs) and _is_name(parts[1]):
        return _interval(parts[0], parts[2], closed, depth)
    if len(parts) != 2:
        return None
    if sum(constant) == 1 and _is_name(parts[constant.index(False)]):
        bound = parts[constant.index(True)]
        if signs[0] == "\\ne":
            ends = (("-\\infty", bound), (bound, "\\infty"))
            return _Several(_UNION, tuple(_interval(*end, [False, False], depth) for end in ends))
        if constant[0]:
            return _interval(bound, "\\infty", [closed[0], False], depth)
        return _interval("-\\infty", bound, [False, closed[0]], depth)
    return _relation(signs[0], *sides)


def _interval(low: str, high: str, closed: Sequence[bool], depth: int) -> _Several:
    brackets = ("[" if closed[0] else "(") + ("]" if closed[1] else ")")
    return _Several(brackets, (_read(low, depth), _read(high, depth)))


def _relation(sign: str, left: _Quantity | None, right: _Quantity | None) -> _Relation | None:
    if left is None or right is None:
        return None
    differences = [
        None if one is None or other is None else _add(one, _times(Fraction(-1), other))
        for one, other in zip(left.values, right.values)
    ]
    return _Relation(sign, tuple(differences))


def _bracketed(text: str, depth: int) -> _Value | None:
    """The kind of a text by the brackets around all of it: a set, a tuple, an interval, a matrix, or nothing."""
    if found := _MATRIX.fullmatch(text):
        rows = [_split(row, ("&",))[0] for row in _split(found[1], ("\\\\",))[0] if row]
        if all(len(row) == 1 for row in rows):
            return _Several("column", tuple(_read(row[0], depth) for row in rows))
        return _Several("matrix", tuple(_Several("row", tuple(_read(cell, depth) for cell in row)) for row in rows))
    opening, inner, closing = _unbracketed(text, "\\{", "\\}")
    if opening and closing:
        condition, _ = _split(inner, ("|", "\\mid", ":"))
        if len(condition) == 2 and _is_name(condition[0]):
            return _read(condition[1], depth)
        if not inner.strip():
            return _EMPTY
        parts = [part for part in _split(inner, (",", ";"))[0] if part]
        return _Several(_LIST, tuple(item for part in parts for item in _signed(_read(part, depth), part)))
    for start in _ORDERED:
        for end in _ORDERED.values():
            opening, inner, closing = _unbracketed(text, start, end)
            if opening and closing:
                parts = [part for part in _split(inner, (",", ";"))[0] if part]
                if len(parts) > 1:
                    return _Several(start + end, tuple(_read(part, depth) for part in parts))
                if start + end == "()" and parts:
                    return _read(parts[0], depth)
    return None


def _name(text: str) -> str:
    return re.sub(r"[\s{}]", "", text)


def _is_name(text: str) -> bool:
    """True if a text is one variable, with an index perhaps, or a function of one such as `f(x)`."""
    return re.fullmatch(r"\\?[a-zA-Z]+(?:_\{?[0-9a-zA-Z]{1,3}\}?)?(?:\([a-z]\))?", _name(text)) is not None


def _unbracketed(text: str, opening: str, closing: str) -> tuple[str, str, str]:
    """These brackets if they enclose the whole text, and what is in them; else no brackets and the text."""
    if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
        inner = text[len(opening) : len(text) - len(closing)]
        depth = lowest = 0
        for token in _TOKEN.findall(inner):
            depth += (token in _OPENING) - (token in _CLOSING)
            lowest = min(lowest, depth)
        if lowest == 0 == depth and not (closing == "}" and inner.endswith("\\")):
            return opening, inner, closing
    return "", text, ""


_OPENING, _CLOSING = ("(", "[", "{", "\\{"), (")", "]", "}", "\\}")


def _split(text: str, separators: Sequence[str]) -> tuple[list[str], list[str]]:
    """The parts of a text between separators that no bracket encloses, and these separators."""
    parts, found, depth = [""], [], 0
    for token in _TOKEN.findall(text):
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0 and token in separators:
            found.append(token)
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts], found


# Numbers and units

_DECIMAL = re.compile(r"(?:[0-9]{1,3}(?:(?:, ?| )[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar) ?\{ ?([0-9]+) ?\}")
_ENDLESS = re.compile(r"([0-9]{0,99})\.([0-9]{0,99}?)([0-9])\3{2,99} ?\\l?dots")  # bounded: the time stays linear
_POWER_OF_TEN = re.compile(
    r"(?:([0-9.,/ ]{1,60}?) ?(?:\\times|\\cdot|\*) )?10\^ ?\{? ?([-+]?[0-9]{1,3}) ?\}?"
    r"|([0-9.,]{1,60})[eE]([-+]?[0-9]{1,3})"
)
_OVER = re.compile(r"(?:([0-9]+) )?([0-9.,]+) ?[/:] ?([0-9.,]+)")
_FRAC = re.compile(r"([0-9]*) ?\\frac ?(?:\{([^{}]*)\}|([0-9]))? ?(?:\{([^{}]*)\}|([0-9]))")
_ORDINAL = re.compile(r"([0-9]{1,40}) ?(?:\^ ?)?\{? ?(?:st|nd|rd|th) ?\}?")
_BASE = re.compile(r"([0-9]{1,40}) ?_ ?\{? ?([0-9]+) ?\}?")
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_COUNTS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen"
)
_COUNT = {
    **{word: Fraction(number) for number, word in enumerate(_COUNTS.split())},
    **{word: Fraction(10 * number) for number, word in enumerate(_TENS.split(), 2)},
}
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_MEASURES = """
mm millimeter millimetre|cm centimeter centimetre|dm decimeter decimetre|m meter metre|km kilometer kilometre|in inch
inches|ft foot feet|yd yard|mi mile|mg milligram|g gram gm|kg kilogram kilo|t ton tonne|oz ounce|lb pound lbs|ml mL
milliliter millilitre|l L liter litre|gal gallon|s sec second|min minute|h hr hour|day|week|month|year yr|% percent
percentage pct|° degree deg|rad radian|C celsius|F fahrenheit|K kelvin|¤ dollar usd|€ euro eur|£ gbp|¢ cent|rs rupee
inr|yen jpy|yuan rmb cny|N newton|J joule|W watt|V volt|A ampere amp|Hz hertz|Pa pascal|mol mole|cal calorie|acre|ha
hectare|unit units
"""
_MEASURE = {form: group.split()[0] for group in " ".join(_MEASURES.split()).split("|") for form in group.split()}
_COMBINED = {"mph": "mi/h", "kmh": "km/h", "kph": "km/h", "kmph": "km/h", "cc": "cm^3", "rpm": "revolution/min"}
_QUALIFIERS = "exactly approximately approx about total each in rounded altogether exact of the a an"
_SHORT_NOUNS = (
    "men man egg car pie toy cup bag box boxe pen hat dog cat bus cow pig hen kid boy way job set row jar can"
)
_NO_NOUNS = (
    "not no never nor or and to than least most between except minus plus times less more fewer greater under over"
    " below above if when where for all any is are mod infinity infty sqrt frac with without from only but"
)


def _number(text: str) -> Fraction | None:
    """The exact value of what is written as a number: decimal, fraction, mixed, repeating, with a power of ten."""
    text = text.strip()
    sign = Fraction(1)
    for word in ("-", "+", "minus ", "negative "):
        if text.startswith(word):
            sign, text = Fraction(-1 if word != "+" else 1), text[len(word) :].strip()
            break
    opening, inner, closing = _unbracketed(text, "(", ")")
    text = inner.strip() if opening and closing else text
    if len(text) > _MOST_DIGITS:
        return None
    if (count := _COUNT.get(text.casefold())) is not None:
        return sign * count
    if _DECIMAL.fullmatch(text):
        return sign * _fraction(text)
    if ordinal := _ORDINAL.fullmatch(text):
        return sign * Fraction(ordinal[1])
    if repeating := _REPEATING.fullmatch(text):
        whole, fixed, again = repeating.groups()
        shift = 10 ** len(fixed)
        tail = Fraction(int(again), shift * (10 ** len(again) - 1))
        return sign * (Fraction(int(whole or 0)) + Fraction(int(fixed or 0), shift) + tail)
    if endless := _ENDLESS.fullmatch(text):
        whole, fixed, again = endless.groups()
        shift = 10 ** len(fixed)
        return sign * (Fraction(int(whole or 0)) + Fraction(int(fixed or 0), shift) + Fraction(int(again), 9 * shift))
    if power := _POWER_OF_TEN.fullmatch(text):
        mantissa = _number(power[1] or power[3]) if power[1] or power[3] else Fraction(1)
        return None if mantissa is None else sign * mantissa * Fraction(10) ** int(power[2] or power[4])
    if over := _OVER.fullmatch(text):
        whole, above, below = over.groups()
    elif frac := _FRAC.fullmatch(text):
        whole, above, below = frac[1], frac[2] or frac[3] or "", frac[4] or frac[5] or ""
    else:
        return None
    parts = []
    for part in (above.strip(), below.strip()):
        negative = part.startswith("-")
        part = part.lstrip("-").strip()
        if not _DECIMAL.fullmatch(part):
            return None
        parts.append(_fraction(part) * (-1 if negative else 1))
    return None if parts[1] == 0 else sign * (Fraction(whole or 0) + parts[0] / parts[1])


def _fraction(decimal: str) -> Fraction:
    return Fraction(decimal.replace(",", "").replace(" ", ""))


def _number_with_unit(text: str) -> _Quantity | None:
    """A quantity whose value is written as a number."""
    return _quantity(text, _numeric)


def _numeric(text: str) -> _Quantity | None:
    if based := _BASE.fullmatch(text):
        return _Quantity(Fraction(based[1]), (Fraction(based[1]),), True, measure=f"base {based[2]}", key=text)
    value = _number(text) if not _LISTED.fullmatch(text) else None
    return None if value is None else _Quantity(value, (value,) * _POINTS, True, key=_key(text))


_LISTED = re.compile(r"[-+]?[0-9]{1,3}(?:, [1-9][0-9]{2})+")  # `100, 200` are two numbers, `1, 000` is one


def _quantity(text: str, value: Callable[[str], _Quantity | None] | None = None) -> _Quantity | None:
    """A value and what it counts: `5 apples`, `$5`, `12\\pi cm`; None if the text is no such thing."""
    value = _computed if value is None else value
    text, before = text.strip(), ""
    if prefix := re.match(r"(-?) ?(?:([¤€£])|([A-Za-z]+)\.? )\s*(?=[-0-9.\\])", text):
        unit = _MEASURE.get(prefix[2] or prefix[3].casefold(), "")
        if unit:
            before, text = unit, prefix[1] + text[prefix.end() :]
    tokens = _TOKEN.findall(text)
    for place in range(1, len(tokens)):
        opens = tokens[place] in ("(", "{") and "".join(tokens[place + 1 : place + 2]).isalpha()
        if not (tokens[place].isalpha() or tokens[place] in "°%¤€£¢" or opens):
            continue
        head = "".join(tokens[:place])
        apart = head.endswith((" ", "}", ")", "°")) or len(tokens[place]) > 1 or not tokens[place].isalpha()
        unit = _unit("".join(tokens[place:])) if apart else None
        if unit is not None and (found := value(head.strip())) is not None:
            measure, nouns, scale = unit
            if (before and measure and before != measure) or not (found.constant or len(tokens[place]) > 1):
                return None
            return _with_unit(found, before or measure, nouns, scale)
    plain = value(text)
    return None if plain is None else _with_unit(plain, before, frozenset(), Fraction(1))


def _with_unit(value: _Quantity, measure: str, nouns: frozenset[str], scale: Fraction) -> _Quantity:
    exact = None if value.exact is None else value.exact * scale
    values = tuple(None if one is None else _times(one, scale) for one in value.values)
    return _Quantity(exact, values, value.constant, measure or value.measure, nouns, value.key)


def _unit(text: str) -> tuple[str, frozenset[str], Fraction] | None:
    """Measure, nouns and scale of a unit such as `cm^2`, `miles per hour`, `(apples)` or `million`."""
    text = re.sub(r"\^ *([23])", r"^\1", re.sub(r"[(){}]", " ", text))
    text = re.sub(
        r"(?<![a-zA-Z])(?:sq|square)\.? ", "square ", re.sub(r"(?<![a-zA-Z])(?:cu|cubic)\.? ", "cubic ", text)
    )
    sides, nouns, scale = [], set(), Fraction(1)
    for side in re.split(r"/|(?<![a-zA-Z])per(?![a-zA-Z])", text.replace("%", " % ").replace("°", " ° ")):
        measures, power = [], ""
        for word in side.split():
            word, _, written = word.partition("^")
            word = word.strip(".,;:-")
            power = f"^{written}" if written else power
            small = word if len(word) == 1 else word.casefold()
            singular = small[:-2] if small.endswith("ches") else small.rstrip("s") if len(small) > 2 else small
            if small in ("square", "cubic"):
                power = "^2" if small == "square" else "^3"
            elif small in _SCALES or singular in _SCALES:
                scale *= _SCALES.get(small) or _SCALES[singular]
            elif found := _MEASURE.get(word) or _MEASURE.get(small) or _MEASURE.get(singular) or _COMBINED.get(small):
                measures.append(found)
            elif small in _NO_NOUNS.split():
                return None
            elif small in _QUALIFIERS.split() or not small:
                continue
            elif small.isalpha() and len(small) > 2:
                nouns.add(singular)
            else:
                return None
        sides.append(" ".join(measures) + (power if measures else ""))
    if nouns and not any(len(noun) > 3 or noun in _SHORT_NOUNS.split() for noun in nouns):
        return None
    measure = "/".join(sides) if any(sides) else ""
    generic = measure.split("^")[0] == "unit"
    return "" if generic else measure, frozenset(nouns), scale


# Expressions, computed at a few points

_POINTS = 4
_Number = Fraction | complex
_Computed = Callable[[int], _Number]
_FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp"
_WORD_TOKENS = {*_FUNCTIONS.split(), "sqrt", "pi", "infty"}
_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu xi rho sigma tau phi varphi"
    " chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell hbar"
)
_LEXEME = re.compile(r"\\[a-zA-Z]+|\\.|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|[a-zA-Z]+|[^\s]")


def _computed(text: str) -> _Quantity | None:
    """An expression by its values; None if it cannot be read, or has no value anywhere."""
    try:
        parser = _Parser(text)
        compute = parser.whole()
    except (ValueError, IndexError, RecursionError):
        return None
    values: list[_Number | None] = []
    for point in range(_POINTS):
        try:
            value = compute(point)
            finite = isinstance(value, Fraction) or cmath.isfinite(value)
            values.append(value if finite else None)
        except (ArithmeticError, ValueError):
            values.append(None)
    if all(value is None for value in values):
        return None
    return _Quantity(None, tuple(values), not parser.names, key=_key(text))


_PARTNERS = {"(": ")", "[": "]", "{": "}", "|": "|", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}


class _Parser:
    """Turns LaTeX into a function of the point at which its variables are taken."""

    def __init__(self, text: str) -> None:
        self.names: set[str] = set()
        self._place = self._depth = 0
        self._lexemes: list[str] = []
        for lexeme in _LEXEME.findall(text):
            if lexeme.isalpha() and lexeme not in _WORD_TOKENS:
                self._lexemes.extend(lexeme)
            else:
                self._lexemes.append(f"\\{lexeme}" if lexeme.isalpha() and len(lexeme) > 1 else lexeme)

    def whole(self) -> _Computed:
        result = self._sum()
        if self._take("\\over"):
            result = _both(_over, result, self._sum())
        if self._place < len(self._lexemes):
            raise ValueError
        return result

    @property
    def _next(self) -> str:
        return self._lexemes[self._place] if self._place < len(self._lexemes) else ""

    def _take(self, *tokens: str) -> str:
        if self._next in tokens:
            self._place += 1
            return tokens[0]
        return ""

    def _expect(self, lexeme: str) -> None:
        if not self._take(lexeme):
            raise ValueError

    def _sum(self) -> _Computed:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError
        total = self._product()
        while self._next in ("+", "-"):
            sign = Fraction(1 if self._take("+") else -1)
            if sign < 0:
                self._place += 1
            total = _both(_add, total, _both(_times, _constant(sign), self._product()))
        self._depth -= 1
        return total

    def _product(self) -> _Computed:
        if self._take("-"):
            return _both(_times, _constant(Fraction(-1)), self._product())
        self._take("+")
        digits = self._next[:1].isdigit()
        result = self._power()
        while self._next:
            if self._take("/", "\\div"):
                result = _both(_over, result, self._signed())
            elif self._take("*", "\\cdot", "\\times"):
                result = _both(_times, result, self._signed())
            elif digits and self._next == "\\frac" and (mixed := self._mixed()):
                result = _both(_add, result, mixed)
            elif self._next in _STOPS or (digits and self._next[0] in "0123456789."):
                break
            else:
                digits = self._next[0].isdigit()
                result = _both(_times, result, self._power())
                continue
            digits = False
        return result

    def _signed(self) -> _Computed:
        return _both(_times, _constant(Fraction(-1)), self._power()) if self._take("-") else self._power()

    def _mixed(self) -> _Computed | None:
        """The fraction of a mixed number such as `3\\frac{1}{2}`."""
        place = self._place
        ahead = "".join(self._lexemes[place + 1 : place + 7])
        if re.match(r"\{[0-9]+\}\{[0-9]+\}|[0-9]\{[0-9]+\}|[0-9]{2}|\{[0-9]+\}[0-9]", ahead):
            return self._power()
        return None

    def _power(self) -> _Computed:
        base = self._atom()
        while True:
            if self._take("!"):
                base = _both(lambda one, _: _factorial(one), base, base)
            elif self._take("^"):
                base = _both(_raised, base, self._argument())
            else:
                return base

    def _argument(self) -> _Computed:
        """The argument of a command or of `^`: a group, a command with its own arguments, or one digit or letter."""
        lexeme = self._next
        if lexeme[:1].isdigit() and len(lexeme) > 1:
            self._lexemes[self._place : self._place + 1] = [lexeme[0], lexeme[1:]]
        if self._take("-"):
            return _both(_times, _constant(Fraction(-1)), self._argument())
        return self._atom()

    def _atom(self) -> _Computed:
        lexeme = self._next
        if not lexeme:
            raise ValueError
        self._place += 1
        if closing := _PARTNERS.get(lexeme):
            inner = self._sum()
            if self._take("\\over"):
                inner = _both(_over, inner, self._sum())
            self._expect(closing)
            rounded = {"|": _absolute, "\\lfloor": _floor, "\\lceil": _ceiling}.get(lexeme)
            return inner if rounded is None else _both(lambda one, _: rounded(one), inner, inner)
        if lexeme[0].isdigit() or (lexeme[0] == "." and len(lexeme) > 1):
            if len(lexeme) > _MOST_DIGITS:
                raise ValueError
            return _constant(Fraction(lexeme))
        name = lexeme.lstrip("\\")
        if name == "frac":
            above, below = self._argument(), self._argument()
            return _both(_over, above, below)
        if name == "binom":
            above, below = self._argument(), self._argument()
            return _both(_binomial, above, below)
        if name == "sqrt":
            degree = _constant(Fraction(2))
            if self._take("["):
                degree = self._sum()
                self._expect("]")
            return _both(_root, self._argument(), degree)
        if name in _FUNCTIONS.split():
            return self._function(name)
        if name in ("pi", "e", "i"):
            return _constant({"pi": complex(math.pi), "e": complex(math.e), "i": 1j}[name])
        if (len(lexeme) == 1 and lexeme.isalpha()) or name in _GREEK.split() or name == "infty":
            return self._variable(name)
        raise ValueError

    def _variable(self, name: str) -> _Computed:
        if self._take("_"):
            start = self._place
            self._argument_of_index()
            name += "_" + "".join(self._lexemes[start : self._place]).strip("{}")
        self.names.add(name)
        return lambda point: _place_of(name, point)

    def _argument_of_index(self) -> None:
        if self._take("{"):
            while self._next and self._next not in "{}":
                self._place += 1
            self._expect("}")
        else:
            self._place += 1

    def _function(self, name: str) -> _Computed:
        base = power = None
        if name == "log" and self._take("_"):
            base = self._argument()
        if self._take("^"):
            power = self._argument()
        if self._next in ("(", "{", "[", "|"):
            inner = self._power() if self._next == "|" else self._atom()
        else:
            inner = self._power()
            while self._next and self._next not in _STOPS and self._next.lstrip("\\") not in _FUNCTIONS.split():
                inner = _both(_times, inner, self._power())
        if base is not None:
            result = _both(lambda one, other: _over(_applied("ln", one), _applied("ln", other)), inner, base)
        else:
            result = _both(lambda one, _: _applied(name, one), inner, inner)
        return result if power is None else _both(_raised, result, power)


_STOPS = {*"+-)]}|*/,", "", "\\rfloor", "\\rceil", "\\cdot", "\\times", "\\div", "\\over"}


def _constant(value: _Number) -> _Computed:
    return lambda point: value


def _both(operation: Callable[[_Number, _Number], _Number], left: _Computed, right: _Computed) -> _Computed:
    return lambda point: operation(left(point), right(point))


def _place_of(name: str, point: int) -> Fraction:
    """The value of a variable at a point; of every second point it is negative."""
    noise = zlib.crc32(f"{name} {point}".encode())
    return Fraction(noise % 89 + 7, (noise >> 8) % 41 + 11) * (-1) ** point


def _checked(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > _MOST_BITS:
        raise OverflowError
    return value


def _add(left: _Number, right: _Number) -> _Number:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return _checked(left + right)
    return complex(left) + complex(right)


def _times(left: _Number, right: _Number) -> _Number:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return _checked(left * right)
    return complex(left) * complex(right)


def _over(left: _Number, right: _Number) -> _Number:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left / right
    return complex(left) / complex(right)


def _raised(base: _Number, power: _Number) -> _Number:
    if isinstance(base, Fraction) and isinstance(power, Fraction):
        bits = base.numerator.bit_length() + base.denominator.bit_length()
        if power.denominator == 1:
            if bits * abs(power) > _MOST_BITS:
                raise OverflowError
            return base ** int(power)
        return _root(_raised(base, Fraction(power.numerator)), Fraction(power.denominator))
    return complex(base) ** complex(power)


def _root(value: _Number, degree: _Number) -> _Number:
    """The real root where there is one; exact where it is rational."""
    if isinstance(value, Fraction) and isinstance(degree, Fraction) and degree.denominator == 1 and 1 < degree <= 64:
        order, negative = int(degree), value < 0
        if not negative or order % 2:
            parts = [_whole_root(abs(value.numerator), order), _whole_root(value.denominator, order)]
            if None not in parts:
                return Fraction(*parts) * (-1 if negative else 1)  # pyright: ignore
            return complex(abs(value) ** (1 / order) * (-1 if negative else 1))
    return complex(value) ** (1 / complex(degree))


def _whole_root(value: int, order: int) -> int | None:
    if value.bit_length() > 500:
        return None
    near = round(value ** (1 / order))
    return next((root for root in (near - 1, near, near + 1) if root >= 0 and root**order == value), None)


def _factorial(value: _Number) -> _Number:
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= 2_100:
        raise ValueError
    return Fraction(math.factorial(int(value)))


def _binomial(above: _Number, below: _Number) -> _Number:
    """`above` over `below`; for a variable above a small number by its product."""
    if (
        not isinstance(above, Fraction)
        or not isinstance(below, Fraction)
        or below.denominator != 1
        or not 0 <= below <= 200
    ):
        raise ValueError
    result = Fraction(1)
    for step in range(int(below)):
        result = _checked(result * (above - step) / (step + 1))
    return result


def _absolute(value: _Number) -> _Number:
    return abs(value) if isinstance(value, Fraction) else complex(abs(value))


def _floor(value: _Number) -> _Number:
    return Fraction(math.floor(_real(value)))


def _ceiling(value: _Number) -> _Number:
    return Fraction(math.ceil(_real(value)))


def _real(value: _Number) -> Fraction | float:
    if isinstance(value, complex) and abs(value.imag) > 1e-12 * abs(value):
        raise ValueError
    return value.real if isinstance(value, complex) else value


def _applied(name: str, value: _Number) -> _Number:
    given = complex(value)
    if name in ("ln", "log", "lg"):
        return cmath.log(given) / (1 if name == "ln" else math.log(10))
    if name in ("cot", "sec", "csc"):
        return 1 / {"cot": cmath.tan, "sec": cmath.cos, "csc": cmath.sin}[name](given)
    return getattr(cmath, name.replace("arc", "a"))(given)


def _alike(gold: Sequence[_Number | None], answer: Sequence[_Number | None], constant: bool) -> bool:
    """True if two expressions have the same values; points at which only one is real say nothing."""
    compared = []
    for one, other in zip(gold, answer):
        if one is not None and other is not None and (constant or _is_real(one) == _is_real(other)):
            compared.append(_close(one, other))
    return all(compared) and len(compared) >= (1 if constant else 2)


def _is_real(value: _Number) -> bool:
    return isinstance(value, Fraction) or abs(value.imag) <= 1e-12 * abs(value)


def _close(one: _Number, other: _Number) -> bool:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    one, other = complex(one), complex(other)
    return abs(one - other) <= 1e-10 * max(abs(one), abs(other))


def _proportional(gold: Sequence[_Number | None], answer: Sequence[_Number | None], positive: bool) -> bool:
    """True if one is a multiple of the other, by a positive factor if that matters."""
    ratios = [_over(one, other) for one, other in zip(gold, answer) if one and other]
    same = len(ratios) >= 2 and all(_close(ratio, ratios[0]) for ratio in ratios[1:])
    return same and _is_real(ratios[0]) and (not positive or _real(ratios[0]) > 0)
