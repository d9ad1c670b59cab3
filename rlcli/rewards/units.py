"""Units of measure after a number. A missing unit is forgiven; a different one is not."""

from __future__ import annotations

import re
from fractions import Fraction

SPELLINGS = {
    "°": "° deg degree degrees 度",
    "%": "% percent pct percentage",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "cm": "cm centimeter centimeters centimetre centimetres 厘米",
    "m": "m meter meters metre metres 米",
    "km": "km kilometer kilometers kilometre kilometres 千米 公里",
    "inch": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mile": "mi mile miles",
    "s": "s sec secs second seconds 秒",
    "min": "min mins minute minutes 分钟",
    "h": "h hr hrs hour hours 小时",
    "day": "day days 天",
    "week": "week weeks 周",
    "month": "month months 个月",
    "year": "yr yrs year years 年",
    "mg": "mg",
    "g": "g gram grams 克",
    "kg": "kg kilogram kilograms 千克 公斤",
    "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces",
    "ml": "ml mL milliliter milliliters millilitre millilitres",
    "L": "l L liter liters litre litres 升",
    "gal": "gal gallon gallons",
    "mph": "mph",
    "km/h": "km/h kmh kph",
    "m/s": "m/s",
    "$": "¤ dollar dollars usd USD 美元",
    "¢": "¢ cent cents",
    "€": "€ euro euros EUR",
    "£": "£ GBP",
    "¥": "¥ yuan RMB CNY 元 块",
    "": "unit units 个 人 次 种 只 本",
}
KNOWN = {spelling: unit for unit, spellings in SPELLINGS.items() for spelling in spellings.split()}
MONEY = "¤€£¥¢"
AREA = re.compile(r"(?:(square|sq\.?|cubic|cu\.?|平方|立方)\s*)?([^\s^]+?)\s*(?:\^\{?([23])\}?)?")
WORD = re.compile(r"[A-Za-z]{3,}\.?")


def read_unit(rest: str) -> str | None:
    """The unit that follows a number, in one spelling; "" for none; None where what follows is no unit but mathematics.

    Unknown words of three letters and more count as a unit too, in lower case: 12 apples. A single letter needs a space before it, since
    5m may be a product.
    """
    text = rest.strip()
    if not text:
        return ""
    match = AREA.fullmatch(text)
    if match and (unit := KNOWN.get(match[2]) or KNOWN.get(match[2].rstrip("."))) is not None:
        if len(match[2]) == 1 and match[2].isalpha() and match[2].isascii() and not rest.startswith(" "):
            return None
        power = match[3] or {"s": "2", "平": "2", "c": "3", "立": "3"}.get((match[1] or " ")[0], "")
        return f"{unit}^{power}" if power else unit
    words = text.split()
    if rest.startswith(" ") and all(WORD.fullmatch(word) or word in KNOWN for word in words):
        return " ".join(words).lower()
    return None


def read_currency(text: str) -> tuple[str, str]:
    """A currency's sign before a number, as a unit, and the text without it."""
    bare = re.sub(r"^(?:US|USD)\s*(?=[¤\d])", "¤", text)
    sign = re.match(rf"([+-]?)\s*([{MONEY}]+)\s*", bare)
    if sign is None:
        return "", text
    return KNOWN[sign[2][0]], sign[1] + bare[sign.end() :]


def same_quantity(left: tuple[Fraction, str], right: tuple[Fraction, str]) -> bool:
    """Whether two numbers with units are the same. A percentage equals its number, with or without the sign: 50 %, 50 and 0.5 for 50 %."""
    (a, unit_a), (b, unit_b) = left, right
    if unit_a == unit_b:
        return a == b
    if "%" in (unit_a, unit_b) and "" in (unit_a, unit_b):
        share = a if unit_a == "%" else b
        other = b if unit_a == "%" else a
        return other in (share, share / 100)
    known = set(KNOWN.values())
    both_known = all(unit.split("^")[0] in known for unit in (unit_a, unit_b)) and unit_a and unit_b
    return a == b and not both_known
