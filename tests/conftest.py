"""Settings that every test shares."""

from __future__ import annotations

import os

# Children (SGLang servers) inherit these: nothing is to be fetched, and progress bars only blur the logs.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
