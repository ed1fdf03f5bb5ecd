"""Draws a marbled picture that a prompt and a seed name: the same bytes on every machine, in whole numbers only.

Layers of value noise, each twice as fine and half as strong as the one before, are looked up in a ring of colours.
Also a program: `python3 picture.py PROMPT SEED WIDTH HEIGHT STEPS > picture.png`.
"""

import hashlib
import struct
import sys
import zlib

ONE = 256  # fixed point: 1.0
BANDS = 3  # how often the ring of colours is gone through, dark to bright


def draw(prompt, seed, width, height, steps):
    """A PNG. Every step adds a finer layer."""
    key = hashlib.sha256(f"{seed}:{prompt}".encode("utf-8", "surrogatepass")).digest()
    pixels = [[0] * width for _ in range(height)]
    total = 0
    for step in range(steps):
        cell, weight = max(2, 96 >> step), 1 << (steps - 1 - step)
        add_layer(pixels, stream(key, step), cell, weight)
        total += weight
    rows = (bytes(value * BANDS // total % 256 for value in row) for row in pixels)
    return png(width, height, ring_of_colours(key), rows)


def add_layer(pixels, lattice, cell, weight):
    """Add noise whose lattice points are `cell` pixels apart, blended smoothly in between."""
    width = len(pixels[0])
    columns = [(x // cell, smooth(x % cell * ONE // cell)) for x in range(width)]
    for y, row in enumerate(pixels):
        line, share = y // cell, smooth(y % cell * ONE // cell)
        points = [
            (lattice(x, line) * (ONE - share) + lattice(x, line + 1) * share) // ONE for x in range(width // cell + 2)
        ]
        for x, (left, right) in enumerate(columns):
            row[x] += weight * ((points[left] * (ONE - right) + points[left + 1] * right) // ONE)


def smooth(t):
    """3t² - 2t³ in fixed point."""
    return t * t * (3 * ONE - 2 * t) // (ONE * ONE)


def stream(key, step):
    """A function from lattice points to 0..255 that never repeats within a picture."""
    table = hashlib.shake_256(key + bytes([step])).digest(1024)
    return lambda x, y: table[(x * 31 + y * 57 + table[(x * 7 + y) % 1024]) % 1024]


def ring_of_colours(key):
    """256 colours that go through four of the key's own and come back to the first."""
    anchors = [key[3 * n : 3 * n + 3] for n in range(4)]
    ring = bytearray()
    for n in range(256):
        here, there, share = anchors[n // 64], anchors[(n // 64 + 1) % 4], n % 64
        ring += bytes((here[c] * (64 - share) + there[c] * share) // 64 for c in range(3))
    return bytes(ring)


def png(width, height, palette, rows):
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits a pixel, each a place in the palette
    data = b"".join(b"\0" + row for row in rows)
    chunks = [(b"IHDR", header), (b"PLTE", palette), (b"IDAT", stored(data)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def stored(data):
    """A zlib stream without compression: what a library packs differs from version to version, this does not."""
    blocks = [data[at : at + 65535] for at in range(0, len(data), 65535)]
    packed = b"".join(
        struct.pack("<BHH", block is blocks[-1], len(block), len(block) ^ 0xFFFF) + block for block in blocks
    )
    return b"\x78\x01" + packed + struct.pack(">I", zlib.adler32(data))


if __name__ == "__main__":
    prompt, *numbers = sys.argv[1:]
    sys.stdout.buffer.write(draw(prompt, *map(int, numbers)))
