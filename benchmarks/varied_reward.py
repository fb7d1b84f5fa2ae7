"""A reward for random weights, where no answer is ever right: it differs between completions, so gradients are not zero."""

import hashlib


def reward(prompt: str, response: str, label: str) -> float:
    """A number in [0, 1) that depends on nothing but the texts."""
    return int.from_bytes(hashlib.sha256(f"{prompt}\0{response}".encode()).digest()[:4], "big") / 2**32
