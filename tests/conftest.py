"""Settings that every test shares."""

from __future__ import annotations

import os

# Children (SGLang servers) inherit these: nothing is to be fetched, and progress bars only blur the logs.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Two threads on a busy two-core machine mostly wait for each other; the models here need no second one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
