"""A language model of characters: what followed each run of up to ORDER characters in a text, counted.

To go on from a text it looks for the longest end of it that the text it learned from had as well, and draws the next
character as often as it followed there. A token is one character.
"""

import random
import re
from collections import Counter, defaultdict

ORDER = 9
NOTE_END = "\n\n"  # notes of the text are apart by an empty line; a note's end is the end of an answer
_WORD = re.compile(r"[a-z]{3,}")


class Model:
    def __init__(self, text):
        """Learn a text. Takes a part of a second for the 9,000 characters of corpus.txt."""
        self.notes = [note.strip() for note in text.strip().split(NOTE_END) if note.strip()]
        self.text = NOTE_END + NOTE_END.join(self.notes) + NOTE_END
        self.following = defaultdict(Counter)
        for at, character in enumerate(self.text):
            for order in range(min(ORDER, at) + 1):
                self.following[self.text[at - order : at]][character] += 1
        self.in_notes = Counter(word for note in self.notes for word in words(note))

    def topic(self, prompt):
        """The first words of the note that has most in common with a prompt: rare words count more."""
        asked = words(prompt)

        def kinship(note):
            return sum(1 / self.in_notes[word] for word in asked & words(note))

        best = max(self.notes, key=kinship)
        return " ".join(best.split()[:2])

    def go_on(self, context, limit, temperature=1.0, top_p=1.0, seed=0):
        """Yield up to `limit` characters that may follow. Temperature 0 takes the likeliest one each time."""
        dice = random.Random(seed)
        for _ in range(limit):
            character = self.draw(context, temperature, top_p, dice)
            yield character
            context = (context + character)[-ORDER:]

    def draw(self, context, temperature, top_p, dice):
        counts = next(
            self.following[context[at:]]
            for at in range(max(0, len(context) - ORDER), len(context) + 1)
            if context[at:] in self.following
        )  # the empty context is always known
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        if temperature == 0:
            return ranked[0][0]
        most = ranked[0][1]
        weights = [(count / most) ** (1 / temperature) for _, count in ranked]
        kept, share = 0, top_p * sum(weights)
        while kept < len(weights) and (kept == 0 or sum(weights[:kept]) < share):
            kept += 1
        point = dice.random() * sum(weights[:kept])
        for place in range(kept):
            point -= weights[place]
            if point < 0:
                return ranked[place][0]
        return ranked[kept - 1][0]


def words(text):
    return set(_WORD.findall(text.lower()))
