"""Prompts of several domains, cut from text that is on any machine with AdaServe.

Those of C++, JSON and licenses come from files of its own libraries: kinds of text that the embedded pair was
not trained on.
"""

from __future__ import annotations

import random
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from adaserve.pair.prompts import load_prompts
from adaserve.server import ServerError
from adaserve.trainer.rehearsal import REHEARSAL_STEP

PATTERNS = {
    "cpp": ("torch/include/**/*.h",),
    "json": ("**/*.json",),
    "law": ("**/LICENSE*", "**/licenses/*"),
}
"""Domain -> files below the environment's libraries."""
HOME = "home"
"""The domain of the shipped prompts, which the draft was trained for."""
MIN_BYTES, MAX_FILES, MAX_OF_A_FOLDER = 2_000, 400, 10
HELD_OUT_STEP = 5
PROMPT_CHARACTERS = (150, 600)


class Texts:
    """Prompts of one domain, cut from its files; those of ``held_out`` ones from other files."""

    def __init__(self, domain: str, seed: int, *, held_out: bool = False) -> None:
        """Raises ServerError if there are no such files."""
        self._rng = random.Random(f"{seed} {domain}")
        texts = _shipped() if domain == HOME else self._from_files(domain)
        self._texts = [text for i, text in enumerate(texts) if (i % HELD_OUT_STEP == 0) is held_out]

    def _from_files(self, domain: str) -> list[str]:
        torch = find_spec("torch")
        assert torch is not None and torch.origin is not None
        library = Path(torch.origin).parents[1]
        found = sorted(f for pattern in PATTERNS[domain] for f in library.glob(pattern) if _is_text(f))
        if not found:
            raise ServerError(f"there are no files for {domain!r} below {library}: choose other domains")
        # The same for every seed: which files are held out must not depend on it.
        random.Random(domain).shuffle(found)
        of_folder = Counter[Path]()
        chosen = []
        for file in found:
            of_folder[file.parent] += 1
            if of_folder[file.parent] <= MAX_OF_A_FOLDER:
                chosen.append(file)
        return list(dict.fromkeys(f.read_text(errors="ignore") for f in chosen[:MAX_FILES]))

    def take(self, count: int) -> list[str]:
        rng, prompts = self._rng, []
        for _ in range(count):
            text = rng.choice(self._texts)
            start, length = rng.randrange(len(text) // 2), rng.randint(*PROMPT_CHARACTERS)
            prompts.append(text[start : start + length])
        return prompts


def _shipped() -> list[str]:
    """Prompts that no draft is trained on as rehearsal texts."""
    return [p.text for i, p in enumerate(load_prompts()) if i % REHEARSAL_STEP]


def _is_text(file: Path) -> bool:
    return file.is_file() and MIN_BYTES < file.stat().st_size < 2_000_000
