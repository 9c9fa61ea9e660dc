#!/usr/bin/env python3
"""Draws lines for a reading test: 20 comments, 20 messages and 20 texts of the dashboard, by seed.

    scripts/english_sample.py SEED

A reader who does not see the code marks each line as understood or not; docs/contributing/reading.md keeps the verdicts.
"""
import random
import re
import subprocess
import sys

MESSAGE = re.compile(r'"((?:[^"\\]|\\.)*)"')


def files(*patterns):
    """The repository's files that match, without other people's."""
    names = subprocess.run(["git", "ls-files", *patterns], capture_output=True, text=True, check=True).stdout.split("\n")
    return [name for name in names if name and not re.search(r"vendor/|fixtures/|/tests/|tests\.rs$|test-support/", name)]


def comments(name):
    """Whole comments: the lines of each block joined."""
    block = []
    for line in open(name, encoding="utf-8"):
        text = re.match(r"\s*//[/!]?(?: (.*))?$", line)
        if text and not (text[1] or "").startswith("# "):
            block.append(text[1] or "")
        elif block:
            yield " ".join(block).strip()
            block = []


def messages(name):
    """Texts with at least four words."""
    source = open(name, encoding="utf-8").read().split("#[cfg(test)]")[0]
    source = re.sub(r"^\s*//.*$", "", source, flags=re.M)
    for text in MESSAGE.findall(source):
        text = re.sub(r"\\\n\s*", "", text)
        if re.search(r"^[,)]|\n|=>|class=|\{%|\{\{ |tmm0|\$\{|\|\|", text) or (name.startswith("web/") and not re.match(r"[A-Z]|.*[.,:?]", text)):
            continue
        if len(re.findall(r"(?<!\S)[A-Za-z]{2,}", text)) >= 3 and not re.match(r"(SELECT|INSERT|UPDATE|DELETE|CREATE) ", text):
            yield text


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    draw = random.Random(int(sys.argv[1]))
    kinds = {
        "comment": [(name, text) for name in files("src/*.rs", "crates/*.rs") for text in comments(name) if text],
        "message": [(name, text) for name in files("src/*.rs", "crates/*.rs") for text in messages(name)],
        "dashboard": [(name, text) for name in files("web/*.js", "web/*.html") for text in messages(name)],
    }
    number = 0
    for kind, lines in kinds.items():
        for name, text in draw.sample(sorted(set(lines)), 20):
            number += 1
            print(f"{number}\t{kind}\t{name}\t{text}")


if __name__ == "__main__":
    main()
