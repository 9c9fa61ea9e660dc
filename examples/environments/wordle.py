"""Wordle: the model guesses a word of five letters and is told which of them are right.

    rlood env serve wordle.py:Wordle

The seed picks the word, so all episodes of a group look for the same one. The reward is 1 for the word, less for each guess that was
needed, and the share of right letters of the best guess if the word was not found.
"""

import random
import re

WORDS = "about apple beach brain bread chair clock cloud crane dance dream earth flame fruit ghost grape heart horse house juice \
knife light lemon money month mouse music night ocean paint party peach piano plane plant queen radio river robot sheep shirt \
smile snake spoon stone storm sugar table tiger toast train voice water whale wheel world".split()
GUESSES = 6


def marks(word, guess):
    """Returns one letter for each of the guess: G in its place, Y elsewhere in the word, - not in it."""
    rest = [w for w, g in zip(word, guess) if w != g]
    result = []
    for w, g in zip(word, guess):
        if w == g:
            result.append("G")
        elif g in rest:
            rest.remove(g)
            result.append("Y")
        else:
            result.append("-")
    return "".join(result)


class Wordle:
    def reset(self, row, seed):
        self.word = row.get("word") or random.Random(seed).choice(WORDS)
        self.guesses, self.best = 0, 0.0
        return "Guess a word of five letters. G: right place, Y: wrong place, -: not in the word. End your answer with the word."

    def step(self, message, final=False):
        self.guesses += 1
        over = final or self.guesses == GUESSES
        found = re.findall(r"\b[a-zA-Z]{5}\b", message["content"])
        if not found:
            return "That has no word of five letters.", self.best * 0.5 if over else None, over
        guess = found[-1].lower()
        if guess == self.word:
            return "Right!", 1.0 - 0.05 * (self.guesses - 1), True
        shown = marks(self.word, guess)
        self.best = max(self.best, (shown.count("G") + 0.5 * shown.count("Y")) / 5)
        return "%s: %s" % (guess, shown), self.best * 0.5 if over else None, over
