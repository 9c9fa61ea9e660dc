"""A calculator as a tool: the model may call it, and answers with a number.

    rlood env serve calculator.py:Calculator

A row needs the right answer in its column `answer`; the reward is 1 if the last number of the model's answer is equal to it. Numbers
are exact fractions, read by a parser of its own: no text is evaluated.
"""

import re
from fractions import Fraction

MAX_CHARS = 1000
MAX_DIGITS = 2000
TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?|\.\d+)|(\*\*|[-+*/()^]))")


class Parser:
    """Computes sums, products and powers with whole exponents: 2 * (3 - 1/4) ** 2."""

    def __init__(self, text):
        if len(text) > MAX_CHARS:
            raise ValueError("the expression is longer than %d characters" % MAX_CHARS)
        self.tokens, place = [], 0
        text = text.rstrip()
        while place < len(text):
            match = TOKEN.match(text, place)
            if not match:
                raise ValueError("'%s' is no number, operator or parenthesis" % text[place:].strip()[:10])
            self.tokens.append(match.group(1) or match.group(2))
            place = match.end()
        self.place = 0

    def next(self, *wanted):
        if self.place < len(self.tokens) and self.tokens[self.place] in wanted:
            self.place += 1
            return self.tokens[self.place - 1]
        return None

    def whole(self):
        value = self.sum(0)
        if self.place < len(self.tokens):
            raise ValueError("'%s' is not expected here" % self.tokens[self.place])
        return value

    def sum(self, depth):
        if depth > 50:
            raise ValueError("the parentheses are too deep")
        value = self.product(depth)
        while True:
            operator = self.next("+", "-")
            if not operator:
                return value
            other = self.product(depth)
            value = bounded(value + other if operator == "+" else value - other)

    def product(self, depth):
        value = self.power(depth)
        while True:
            operator = self.next("*", "/")
            if not operator:
                return value
            other = self.power(depth)
            if operator == "/" and other == 0:
                raise ValueError("division by zero")
            value = bounded(value * other if operator == "*" else value / other)

    def power(self, depth):
        sign = 1
        while True:
            operator = self.next("+", "-")
            if not operator:
                break
            sign = -sign if operator == "-" else sign
        value = self.atom(depth)
        if self.next("**", "^"):
            exponent = self.power(depth + 1)
            size = max(len(str(abs(value.numerator))), len(str(value.denominator)))
            if exponent.denominator != 1 or abs(exponent) * size > MAX_DIGITS:
                raise ValueError("the exponent must be a whole number, and the result have at most %d digits" % MAX_DIGITS)
            if value == 0 and exponent < 0:
                raise ValueError("division by zero")
            value = value ** int(exponent)
        return sign * value

    def atom(self, depth):
        if self.next("("):
            value = self.sum(depth + 1)
            if not self.next(")"):
                raise ValueError("a parenthesis is not closed")
            return value
        if self.place == len(self.tokens) or self.tokens[self.place] in "+-*/()^**":
            raise ValueError("a number is missing")
        self.place += 1
        return Fraction(self.tokens[self.place - 1])


def bounded(value):
    if value.numerator.bit_length() > 4 * MAX_DIGITS or value.denominator.bit_length() > 4 * MAX_DIGITS:
        raise ValueError("the numbers have more than %d digits" % MAX_DIGITS)
    return value


def shown(value):
    """Writes a fraction: a whole number, a decimal number if it is short, else a fraction."""
    if value.denominator == 1:
        return str(value.numerator)
    rest, twos, fives = value.denominator, 0, 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    digits = max(twos, fives)
    if rest > 1 or digits > 12:
        return "%d/%d" % (value.numerator, value.denominator)
    scaled = str(abs(value.numerator) * 10**digits // value.denominator).rjust(digits + 1, "0")
    return ("-" if value < 0 else "") + scaled[:-digits] + "." + scaled[-digits:]


class Calculator:
    def __init__(self):
        self.tools = [self.calculate]

    def reset(self, row, seed):
        self.answer = Parser(str(row["answer"])).whole()

    def calculate(self, expression: str) -> str:
        """Computes an expression exactly.

        Args:
            expression: Numbers with + - * / ** and parentheses, such as (12.5 - 3) * 4

        Returns:
            The result.
        """
        return shown(Parser(expression).whole())

    def step(self, message, final=False):
        numbers = re.findall(r"-?(?:\d[\d,]*\.?\d*|\.\d+)(?:/\d+)?", message["content"])
        try:
            right = numbers and Parser(numbers[-1].replace(",", "").rstrip(".")).whole() == self.answer
        except ValueError:
            right = False
        return None, 1.0 if right else 0.0, True
