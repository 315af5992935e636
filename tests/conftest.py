"""Settings that every test shares."""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.own_cache import own_cache
from tests.side_by_side import SHARED, ByServers, share_of

# Children (SGLang servers) inherit these: nothing is to be fetched, and progress bars only blur the logs.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Two threads on a busy two-core machine mostly wait for each other; the models here need no second one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_cache = Path(tempfile.mkdtemp(prefix="adaserve-tests-"))
atexit.register(shutil.rmtree, _cache, ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = own_cache(_cache)

# The same examples in every run, so that a change is judged by what it changes. To look for new ones:
# ``HYPOTHESIS_PROFILE=explore python -m pytest tests/scheduler``.
# How slowly examples are made says how busy the machine is.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", unhurried, derandomize=True)
settings.register_profile("explore", unhurried, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


@pytest.fixture
def forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that this user may not enter. The superuser may, so it is the system's calls that say no."""
    folder = tmp_path / "forbidden"
    folder.mkdir()

    def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(path: Any, *rest: Any, **more: Any) -> Any:
            if isinstance(path, str | Path) and folder in Path(path).parents:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *rest, **more)

        return refuse

    for name in ("stat", "mkdir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    usual = os.access
    inside = lambda path: folder in (Path(path), *Path(path).parents)  # noqa: E731
    monkeypatch.setattr(os, "access", lambda path, mode: not inside(path) and usual(path, mode))
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The largest shares first, so that all processes end at about the same time."""
    order = {share: place for place, share in enumerate(SHARED)}
    items.sort(key=lambda item: order.get(share_of(item.nodeid), len(order)))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByServers:
    config.option.loadscopereorder = False  # by the number of tests, which says little
    return ByServers(config, log)
