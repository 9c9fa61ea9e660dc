"""Twenty questions: the model asks what a thing is like, and names it.

    rlood env serve twenty_questions.py:TwentyQuestions

The seed picks the thing. A question is understood by the words in it; the reward is 1 for the thing, and for a wrong last guess its
closeness: the share of properties that both have in common. The last turn of the model is its guess, whatever it says.
"""

import random
import re

# A thing is what it is made of here: the properties that are true of it.
THINGS = {
    "dog": "animal alive mammal pet legs fur tail indoors loud",
    "cat": "animal alive mammal pet legs fur tail indoors quiet",
    "cow": "animal alive mammal farm legs horns tail big loud food",
    "whale": "animal alive mammal water tail big loud",
    "shark": "animal alive fish water tail big dangerous teeth",
    "eagle": "animal alive bird legs wings flies feathers",
    "penguin": "animal alive bird legs wings feathers water cold",
    "snake": "animal alive reptile tail dangerous teeth quiet",
    "apple": "plant food fruit sweet round small red",
    "banana": "plant food fruit sweet yellow",
    "carrot": "plant food vegetable orange long",
    "oak": "plant alive tree big wood leaves",
    "rose": "plant alive flower red thorns small",
    "car": "machine vehicle wheels big loud metal engine",
    "bicycle": "machine vehicle wheels metal quiet",
    "airplane": "machine vehicle wheels wings flies big loud metal engine",
    "ship": "machine vehicle water big metal engine",
    "clock": "machine indoors round small",
    "chair": "furniture indoors legs wood",
    "table": "furniture indoors legs wood big",
    "knife": "tool indoors small metal dangerous kitchen",
    "spoon": "tool indoors small metal kitchen",
    "book": "indoors paper small words",
    "ice": "cold water",
}
PROPERTIES = sorted({word for words in THINGS.values() for word in words.split()})


def closeness(one, other):
    """The share of properties that two things have in common, of those that either has."""
    one, other = set(THINGS[one].split()), set(THINGS[other].split())
    return len(one & other) / len(one | other)


class TwentyQuestions:
    def reset(self, row, seed):
        self.thing = row.get("thing") or random.Random(seed).choice(sorted(THINGS))
        self.questions = 0
        return "I think of a thing. Ask about it (is it alive? does it have wheels?), or guess: it is a …"

    def step(self, message, final=False):
        self.questions += 1
        words = re.findall(r"[a-z]+", message["content"].lower())
        named = [word for word in words if word in THINGS]
        if self.thing in named[-1:]:
            return "Yes, it is!", 1.0, True
        if final or self.questions == 20:
            guess = named[-1] if named else None
            return "It was a %s." % self.thing, 0.5 * closeness(self.thing, guess) if guess else 0.0, True
        if named:
            return "No, it is no %s." % named[-1]
        asked = [word for word in words for word in (word, word.rstrip("s")) if word in PROPERTIES]
        asked += [word + "s" for word in words if word + "s" in PROPERTIES]
        if not asked:
            return "Ask for one of: %s." % ", ".join(PROPERTIES)
        return "Yes." if all(word in THINGS[self.thing].split() for word in asked[-1:]) else "No."
