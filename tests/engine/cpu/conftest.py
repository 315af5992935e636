from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from adaserve.engine.cpu import build

SETS = {"widest": (), "avx2": build.WITHOUT_AVX512}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and on a busy host they wait for each other's time slices."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=SETS)
def flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """What the kernels are compiled with: once for this host, and on an AVX-512 host for AVX2 too."""
    found = build.load_kernels()
    if found is None:
        pytest.skip("no C compiler here")
    if request.param == "avx2" and found.ada_vector_lanes() != 16:
        pytest.skip("this host's widest vectors are tested above")
    return SETS[request.param]
