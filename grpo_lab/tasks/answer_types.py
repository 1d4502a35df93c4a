"""The type of an answer before any algebra: a choice, a date, a time, a text, or a value with its unit.

`grader_worker.py` compares by these types and passes only values to math-verify, which reads `listen` as a product of
letters, `2024-01-05` as 2018 and `10:30` as a third, and deletes units. `plain_math.py` has types of its own: the two
graders share no code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

# Dress

_SIZES = re.compile(
    r"\\(?:left|right)(?:\.|(?![a-zA-Z]))|\\(?:[bB]ig{1,2}[lmr]?|displaystyle|textstyle|limits|bf|rm|it|sf|tt|[lL]arge|LARGE"
    r"|[hH]uge|normalsize|small|therefore|implies|[lL]?o?n?g?[rR]ightarrow|checkmark|blacksquare|qed)(?![a-zA-Z])|\\!"
)
_UNSEEN = re.compile(
    r"\\(?:textcolor|color|colorbox|[hv]space|[hv]?phantom|tag|label|[xb]?cancel)\*? ?\{[^{}]*\}"
    r"|\\(?:begin|end) ?\{(?:aligned|align|gathered|split|equation|array)\*?\}(?: ?\{[clr|]*\})?"
    r"|\\(?:pmod|bmod|mod|pod)(?![a-zA-Z]) ?(?:\{[^{}]*\}|[0-9a-zA-Z]*)|\\begin ?\{array\} ?\{[clr|]*\}"
)
_WRAPPERS = re.compile(
    r"\\(?:boldsymbol|bm|pmb|mathbf|mathit|mathsf|mathtt|mathcal|mathord|mathop|underline|ensuremath|boxed|fbox|num|text"
    r"|text(?:bf|it|rm|sf|tt|normal|up)|emph|mbox|hbox|mathrm|operatorname|SI|qty)\*?(?= ?\{)"
)
_TEXT = re.compile(
    r"\\(?:text|text(?:bf|it|rm|sf|tt|normal|up)|emph|mbox|hbox|mathrm|operatorname|SI|qty)\*? ?"
    r"\{([^{}]*)\}(?:\{\\?([a-z]+)\})?"
)
_SPACES = re.compile(r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![a-zA-Z])")
_JOINED = re.compile(r"(?<=[0-9])(?:,? ?\\! ?|\{,\}|\\[,;: ]|~|, (?=0))(?=[0-9]{3}(?![0-9]))")
_DELIMITERS = re.compile(r"\\[()\[\]]")
_SPELLED = {
    r"\{ ?([,:]) ?\}": r"\1",
    r"\\lbrace(?![a-zA-Z]) ?": r"\\{",
    r"\\rbrace(?![a-zA-Z])": r"\\}",
    r"\\varnothing(?![a-zA-Z])|\\\{ ?\\\}": r"\\emptyset",
    r"\\[dtc]frac(?![a-zA-Z])": r"\\frac",
    r"\\([gl])eqslant(?![a-zA-Z])": r"\\\1eq",
    r"\\equiv(?![a-zA-Z])": "=",
    "<=": r"\\le ",
    ">=": r"\\ge ",
    "!=": r"\\ne ",
    r"\A ?(?:\\approx|=) ?": "",
    r"\\imath(?![a-zA-Z])": "i",
    r"\^ ?\{? ?\\circ ?\}?|\\degree(?![a-zA-Z])": "°",
    r"\\pounds(?![a-zA-Z])": "£",
    r"\\euro(?![a-zA-Z])": "€",
    r"\\(?=[%#&])": "",
}
_LEADS = re.compile(
    r"(?:the )?(?:final |correct )?answer(?: is)? ?[:=]? ?|(?:option|choice|about|approximately|exactly|roughly) "
    r"|(?:in )?the year ",
    re.IGNORECASE,
)
_MARKS = re.compile(r"(\*{1,2}|_{1,2}|`|\"|')([^*`\"']*)\1")


def undressed(text: str) -> str:
    """The answer without what only changes its looks; texts as plain words."""
    text = " ".join(text.split())
    text = _JOINED.sub("", text.replace("...", r"\ldots ").replace("\\$", "¤"))
    text = _UNSEEN.sub(" ", _SIZES.sub(" ", text))
    text = _TEXT.sub(r" \1 \2 ", _TEXT.sub(r" \1 \2 ", text))
    text = _SPACES.sub(" ", _WRAPPERS.sub("", text))
    for pattern, sign in _SPELLED.items():
        text = re.sub(pattern, sign, text)
    # A single dollar sign is money; a pair encloses a formula.
    text = _DELIMITERS.sub(" ", text).replace("$", "¤" if text.count("$") == 1 else " ")
    text = " ".join(text.split()).rstrip(".,;: \\")
    if marked := _MARKS.fullmatch(text):
        text = marked[2].strip()
    if lead := _LEADS.match(text):
        text = text[lead.end() :] or text
    while text.startswith("{") and _closes_at_end(text):
        text = text[1:-1].strip()
    return r"\emptyset" if text.lower() in ("empty set", "the empty set") else _JOINED.sub("", text)


def _closes_at_end(text: str) -> bool:
    depth = 0
    for place, brace in ((found.start(), found.group()) for found in re.finditer(r"\\.|[{}]", text)):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth == 0:
            return place == len(text) - 1
    return False


# Texts, choices, dates and times

_NAMES = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp sqrt pi infty infinity frac lim and or"
_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen twenty"
)
_CHOICE = re.compile(r"\((?P<a>[A-J])\)[.:]? ?(?P<b>.*)|(?P<c>[A-J])(?: ?[.:)] ?(?P<d>.*))?")
_DAYS = ("%Y-%m-%d", "%m/%d/%Y", "%B %d %Y", "%b %d %Y", "%d %B %Y", "%d %b %Y")
_DAYS_OF_ANY_YEAR = ("%B %d", "%b %d", "%d %B", "%d %b")
_MONTHS = ("%B %Y", "%b %Y")
_HOURS = ("%I:%M %p", "%I:%M:%S %p", "%I %p")
_CLOCKS = ("%H:%M", "%H:%M:%S")


def key(text: str) -> str:
    """The common form of two equal texts: letters and digits of their words, in one case."""
    if not is_text(text):
        return re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text)
    return re.sub(r"[\W_]|(?<![0-9])\s+|\s+(?![0-9])", "", text).casefold()


def is_text(text: str) -> bool:
    """True for plain words: no mathematical sign, and a word of two letters or more that is not a function."""
    words = {word.lower() for word in re.findall(r"[^\W\d_]{2,}", text)}
    return bool(words - set(_NAMES.split())) and not re.search(r"[\\^_=<>+*/|°%¤0-9]", text)


def choice(text: str, any_case: bool = False) -> tuple[str, str] | None:
    """The letter of a choice and what stands behind it."""
    found = _CHOICE.fullmatch(text[:3].upper() + text[3:] if any_case else text)
    if found is None or re.match(r"(?:or|and)\b|[,/&]", option := found["b"] or found["d"] or ""):
        return None
    return found["a"] or found["c"], option


@lru_cache(maxsize=256)
def moment(text: str) -> tuple[str, str] | None:
    """A date or a time of day in one form, with its kind; None if the text is neither."""
    text = re.sub(r"[{}]", "", text)
    if len(text) > 40 or not (re.search("[0-9]", text) or text.lower() in ("noon", "midnight")):
        return None
    words = re.sub(r"(?<=[0-9]) ?\^? ?(?:st|nd|rd|th)\b", "", text.lower())
    words = re.sub(r"\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b|\b(?:the|of)\b|[,.]", " ", words)
    words = re.sub(r"\b([ap]) ?m\b", r" \1m", re.sub(r"(?<=[0-9])([ap]) ?m\b", r" \1m", words))
    words = {"noon": "12 pm", "midnight": "12 am"}.get(words.strip(), words)
    words = re.sub(r" ?: ?", ":", " ".join(words.split())).replace("sept ", "sep ")
    forms = {"day": _DAYS, "day of any year": _DAYS_OF_ANY_YEAR, "month": _MONTHS, "hour": _HOURS, "clock": _CLOCKS}
    for kind, each in forms.items():
        for form in each:
            try:
                read = datetime.strptime(words, form)
            except ValueError:
                continue
            if kind in ("hour", "clock") and ":" in words and not re.search(r":[0-9]{2}", words):
                return None
            shown = {"day": "%Y-%m-%d", "day of any year": "%m-%d", "month": "%Y-%m"}.get(kind, "%H:%M:%S")
            return kind, read.strftime(shown)
    return None


def same_moment(gold: tuple[str, str] | None, read: tuple[str, str] | None) -> bool | None:
    """True if two dates or times agree in all that the right one says; None if neither is one."""
    if gold is None or read is None:
        return None if gold is read else False
    kinds = (gold[0], read[0])
    if kinds == ("clock", "hour"):  # 10:30 may be in the evening
        return (
            gold[1] == read[1]
            or f"{int(read[1][:2]) % 12:02}{read[1][2:]}" == f"{int(gold[1][:2]) % 12:02}{gold[1][2:]}"
        )
    if kinds == ("hour", "clock"):
        return gold[1] == read[1] and int(read[1][:2]) > 12
    if kinds == ("day of any year", "day"):
        return read[1].endswith(gold[1])
    if kinds == ("month", "day"):
        return read[1].startswith(gold[1])
    return gold == read


def is_ratio(text: str) -> bool:
    """True for text with a colon that is not a time of day, such as `a:b = 7:32`."""
    return ":" in text and moment(text) is None


# Units

_UNITS = {
    "mm": "mm millimeter millimetre", "cm": "cm centimeter centimetre", "m": "m meter metre mtr",
    "km": "km kilometer kilometre", "in": "in inch", "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile",
    "mg": "mg milligram", "g": "g gm gram", "kg": "kg kilogram", "oz": "oz ounce", "lb": "lb pound",
    "ton": "t ton tonne",
    "mL": "mL ml milliliter millilitre", "L": "L l liter litre", "gal": "gal gallon", "s": "s sec second",
    "min": "min minute", "h": "h hr hour", "day": "day", "week": "week", "month": "month", "year": "year yr",
    "%": "% percent percentage pct", "°": "° degree deg", "rad": "rad radian", "dollar": "¤ dollar usd buck",
    "euro": "€ euro eur", "sterling": "£ gbp", "cent": "¢ cent", "rupee": "rs rupee inr", "yen": "yen jpy",
    "N": "N newton", "J": "J joule", "W": "W watt", "V": "V volt", "A": "A amp ampere", "Hz": "Hz hertz",
    "acre": "acre", "hectare": "ha hectare", "": "unit", "mi/h": "mph", "km/h": "kph kmh kmph",
    "C": "C celsius", "F": "F fahrenheit", "K": "K kelvin",
}  # fmt: skip
_FORMS = {form: unit for unit, forms in _UNITS.items() for form in forms.split()}
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SILENT = "exactly approximately approx total altogether each the a an of in about"
_DENYING = (
    "not no never nor or and to than least most between except minus plus times less more fewer greater under over"
    " above below if when where for all any is are from only but mod with without"
)
_LONGEST_UNIT = 60  # characters
_TAIL = " ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz°%¤€£¢/^23{}().-"
_SHORT = "men man egg car pie toy cup bag box pen hat dog cat bus cow pig hen kid boy way job set row jar can day"
_PREFIX = re.compile(r"(-?) ?(?:([¤€£])|([A-Za-z]{2,4})\.?(?= )) ?(?=[-.0-9\\])")
_ORDINAL = re.compile(r"([0-9]{1,40}) ?\^? ?\{? ?(?:st|nd|rd|th) ?\}?")
_BASE = re.compile(r"([0-9]{1,40}) ?_ ?\{? ?([0-9]{1,2}) ?\}?")


@dataclass(frozen=True)
class Quantity:
    """The text of a value, what stands behind it, and the factor in words such as million."""

    value: str
    unit: str = ""
    things: frozenset[str] = frozenset()
    scale: int = 1

    def clashes(self, other: Quantity) -> bool:
        """True if both say what they count, and not the same. A percent sign is compared by value."""
        if not (self.unit or self.things) or not (other.unit or other.things):
            return False
        return self.unit != other.unit or not (self.unit or self.things & other.things)


def quantity(text: str) -> Quantity:
    """An answer as a value with its unit; without one the text itself is the value."""
    text = re.sub(r"\A(?:minus|negative)\s+", "-", text, flags=re.IGNORECASE)
    numbers = re.split(" ", _NUMBERS)
    if text.lower() in numbers:
        return Quantity(str(numbers.index(text.lower())))
    if ordinal := _ORDINAL.fullmatch(text):
        return Quantity(ordinal[1])
    if based := _BASE.fullmatch(text):
        return Quantity(based[1], f"base {based[2]}")
    if "\\begin" in text:
        return Quantity(text)
    before = ""
    if (prefix := _PREFIX.match(text)) and (prefix[2] or prefix[3].lower()) in _FORMS:
        before, text = _FORMS[prefix[2] or prefix[3].lower()], prefix[1] + text[prefix.end() :]
    tail = max(1, len(text.rstrip(_TAIL)), len(text) - _LONGEST_UNIT)
    for start in re.finditer(r"(?<![A-Za-z\\])[A-Za-z(]|[°%¤€£¢]", text):
        at = start.start()
        if at < tail:
            continue
        value, unit = text[:at].rstrip(" {"), text[at:]
        ends_value = value[-1:].isdigit() or value[-1:] in "})°" or re.search(r"\\[a-z]+\Z", value)
        if not ends_value or (len(unit) == 1 and unit.isalpha() and text[at - 1] not in " {°"):
            continue
        if (counted := _counted(unit)) is not None:
            if before and counted[0] and before != counted[0]:
                break
            return Quantity(value, before or counted[0], counted[1], counted[2])
    return Quantity(text, before)


def _counted(text: str) -> tuple[str, frozenset[str], int] | None:
    """The unit, the things and the scale that words behind a number name; None if they are something else."""
    text = re.sub(r"\^\s*+\{?\s*+([23])\s*\}?", r"^\1", re.sub(r"[()]", " ", text))
    text = text.replace("°", "° ").replace("%", "% ")
    units, things, scale = [], set(), 1
    for side in re.split(r"/|\bper\b", re.sub(r"[{}]", " ", text)):
        names, power = [], ""
        for word in side.split():
            word, caret, exponent = word.strip(".,;:-").partition("^")
            lower = word.lower()
            single = lower.removesuffix("es") if lower.endswith(("ches", "xes")) else lower.removesuffix("s")
            power = f"^{exponent}" if caret else power
            forms = (word,) if len(word) == 1 else (word, lower, single)
            named = next((_FORMS[form] for form in forms if form in _FORMS), None)
            if lower in ("square", "sq", "cubic", "cu"):
                power = "^2" if lower.startswith("sq") else "^3"
            elif single in _SCALES:
                scale *= _SCALES[single]
            elif named is not None:
                names.append(named)
            elif lower in _DENYING.split() or (len(lower) < 3 and lower not in _SILENT.split() and lower):
                return None
            elif lower and lower not in _SILENT.split():
                things.add(single)
        units.append("".join(names) + (power if any(names) else ""))
    if things and not any(len(thing) > 3 or thing in _SHORT.split() for thing in things):
        return None
    return "/".join(units) if any(units) else "", frozenset(things), scale


# Values, as math-verify reads them without a mistake

_SCIENTIFIC = re.compile(r"(?<![A-Za-z0-9.\\])([0-9]{1,30}(?:\.[0-9]{1,30})?)[eE]([-+]?[0-9]{1,4})(?![A-Za-z0-9.])")
_REPEATING = re.compile(r"([0-9]{1,30})\.([0-9]{0,30})\\(?:overline|bar) ?\{ ?([0-9]{1,30}) ?\}")
_ENDLESS = re.compile(r"([0-9]{1,30})\.([0-9]{0,30}?)([0-9])\3\3+ ?\\l?dots")
_DECIMAL = re.compile(r"(?<![0-9.])([0-9]{0,40})\.([0-9]{1,40})(?![0-9.])")
_GROUPED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+\.[0-9]+")
_SHORT_LATEX = (
    (re.compile(r"\\binom ?([0-9a-z]) ?([0-9a-z])"), r"\\binom{\1}{\2}"),
    (re.compile(r"\\sqrt ?\[([^\[\]{}]{1,9})\] ?([0-9a-z])"), r"\\sqrt[\1]{\2}"),
    (re.compile(r"\\frac ?([0-9a-z]) ?([0-9a-z])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\^ ?(\\frac\{[^{}]*\}\{[^{}]*\})"), r"^{\1}"),
    (re.compile(r"\{([^{}]*) ?\\over(?![a-z]) ?([^{}]*)\}"), r"\\frac{\1}{\2}"),
)
_FUNCTION = re.compile(r"(?<![\\a-zA-Z])(ln|log|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|exp|pi)(?![a-zA-Z])")
_RELATION = re.compile(r"<|>|\\[lg](?:eq|e|t)(?![a-zA-Z])")
_MEMBER = re.compile(r"\A\\?[a-zA-Z]+(?:_ ?\{?[0-9a-zA-Z]\}?)? ?\\in(?![a-zA-Z])")


def latex(text: str) -> str:
    """A value in LaTeX that math-verify reads as meant: exact decimals, whole fractions, rising inequalities."""
    text = _FUNCTION.sub(r"\\\1", _MEMBER.sub("", text))
    text = _GROUPED.sub(lambda number: number[0].replace(",", ""), text)
    text = _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text)
    text = _REPEATING.sub(lambda found: _periodic(*found.groups()), text)
    text = _ENDLESS.sub(lambda found: _periodic(*found.groups()), text)
    text = _DECIMAL.sub(lambda found: rf"\frac{{{int(found[1] + found[2])}}}{{{10 ** len(found[2])}}}", text)
    for pattern, whole in _SHORT_LATEX:
        text = pattern.sub(whole, text)
    signs = _RELATION.findall(text)
    if len(signs) > 1 and all(sign[0] == ">" or sign.startswith("\\g") for sign in signs):
        turned = ["\\le " if "e" in sign else "<" for sign in signs[::-1]]
        sides = _RELATION.split(text)[::-1]
        text = sides[0] + "".join(sign + side for sign, side in zip(turned, sides[1:]))
    return text


def _periodic(whole: str, fixed: str, period: str) -> str:
    """`0.1666...` as a fraction, of its digits before the period and in it."""
    below = (10 ** len(period) - 1) * 10 ** len(fixed)
    return rf"\frac{{{int(whole + fixed + period) - int(whole + fixed)}}}{{{below}}}"


def inequalities(text: str) -> list[str]:
    """The parts of `x < 2 or x > 3`; the whole text where it is no such thing."""
    parts = re.split(r" or |, ?or ", text)
    return parts if all(_RELATION.search(part) for part in parts) else [text]


def listed(text: str) -> frozenset[str]:
    """The keys of texts between commas, `and` and `or`."""
    return frozenset(key(part) for part in re.split(r",| and | or |&", text) if part.strip())


def shapes_clash(gold: str, answer: str) -> bool:
    """True if one is ordered and the other a set, or the answer an equation to solve where the right one is solved."""
    shapes = {_shape(gold), _shape(answer)}
    sides = re.split(r"(?<![\\<>!])=", answer)
    solved = "=" in gold or len(sides) < 2
    name = re.sub(r"_ ?(?:\{[^{}]*\}|[0-9a-zA-Z])", "", sides[0])
    solved = solved or "," in answer or not re.search("[0-9]", name) or not re.search("[a-zA-Z]", answer)
    return shapes == {"ordered", "set"} or not solved


def _shape(text: str) -> str:
    if text.startswith("\\{"):
        return "set"
    if not (text[:1] in ("(", "[") and text[-1:] in (")", "]") and "," in text):
        return ""
    depth, depths = 0, []
    for sign in text[:-1]:
        depth += (sign in "([") - (sign in ")]")
        depths.append(depth)
    return "ordered" if min(depths) > 0 else ""
