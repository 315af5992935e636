"""The offline bundle on small made-up wheels: split, carried, put together, and what goes wrong."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import random
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bundle = load("gpu_bundle")


def fake_wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    files = {**files, f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode()}
    record = "".join(f"{f},sha256=x,{len(c)}\n" for f, c in files.items()) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, content in {**files, f"{info}/RECORD": record.encode()}.items():
            wheel.writestr(file, content)
    return path


@pytest.fixture
def wheels(tmp_path: Path) -> list[Path]:
    """One far larger than a part, one that shares a part with its neighbours, one that is tiny."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    noise = random.Random(0).randbytes
    return [
        fake_wheel(folder, "large", {"large/__init__.py": b"x = 1\n", "large/data.bin": noise(300_000)}),
        fake_wheel(folder, "medium", {"medium/__init__.py": b"y = 2\n", "medium/a.bin": noise(40_000)}),
        fake_wheel(folder, "tiny", {"tiny.py": b"z = 3\n", "tiny-1.0.data/purelib/more.py": b"w = 4\n"}),
    ]


def assemble(out: Path, to: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(out / "assemble.py"), "--to", str(to)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_split_and_put_together(wheels: list[Path], tmp_path: Path) -> None:
    out, site = tmp_path / "bundle", tmp_path / "site"
    manifest = bundle.split(wheels, out, part_bytes=100_000)
    parts = sorted(out.glob("part-*/data"))
    assert len(parts) == len(manifest["parts"]) >= 4
    assert all(p.stat().st_size <= 100_000 for p in parts)
    done = assemble(out, site)
    assert done.returncode == 0, done.stderr
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as z:
            for name in z.namelist():
                there = site / name.removeprefix("tiny-1.0.data/purelib/")
                assert there.read_bytes() == z.read(name)
    code = (
        "import large, medium, tiny, more; from importlib.metadata import version; print(version('medium'))"
    )
    env = {"PYTHONPATH": str(site)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert ran.stdout.strip() == "1.0"


@pytest.mark.parametrize("harm", ["missing", "damaged", "cut"])
def test_a_bad_part_is_named(wheels: list[Path], tmp_path: Path, harm: str) -> None:
    out = tmp_path / "bundle"
    bundle.split(wheels, out, part_bytes=100_000)
    part = out / "part-002" / "data"
    content = part.read_bytes()
    if harm == "missing":
        part.unlink()
    else:
        part.write_bytes(content[:-1] if harm == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    done = assemble(out, tmp_path / "site")
    assert done.returncode == 2 and "part-002" in done.stderr and "bring it" in done.stderr


def test_slimmed_wheels_stay_whole(tmp_path: Path) -> None:
    wheel = fake_wheel(
        tmp_path,
        "sglang",
        {"sglang/__init__.py": b"", "sglang/test/big.py": b"#" * 9000, "sglang/srt/a.py": b""},
    )
    assert bundle.slim(wheel, bundle.SLIM["sglang"]) > 0
    with zipfile.ZipFile(wheel) as z:
        assert z.testzip() is None
        names = z.namelist()
        record = z.read("sglang-1.0.dist-info/RECORD").decode()
    assert "sglang/test/big.py" not in names and "sglang/srt/a.py" in names
    assert {row.split(",")[0] for row in record.splitlines()} == set(names)


def test_a_wheel_cannot_write_elsewhere(tmp_path: Path) -> None:
    evil = fake_wheel(tmp_path, "evil", {"../outside.py": b""})
    bundle.split([evil], tmp_path / "bundle")
    done = assemble(tmp_path / "bundle", tmp_path / "site")
    assert done.returncode == 2 and not (tmp_path / "outside.py").exists()


def test_every_name_has_a_version() -> None:
    wanted = bundle.requirements(SCRIPTS / "gpu_bundle.txt", SCRIPTS.parent / "constraints.txt")
    assert "sglang-kernel==0.4.5" in wanted, "the one that loads with torch 2.11"
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", w) for w in wanted) and len(wanted) > 30


def test_a_name_without_a_version(tmp_path: Path) -> None:
    listed = tmp_path / "list.txt"
    listed.write_text("nobody-knows-this  # comment\n")
    with pytest.raises(bundle.BundleError, match=r"pin it in list\.txt"):
        bundle.requirements(listed, SCRIPTS.parent / "constraints.txt")


def test_manifest(wheels: list[Path], tmp_path: Path) -> None:
    manifest = bundle.split(wheels, tmp_path / "bundle", part_bytes=100_000)
    assert json.loads((tmp_path / "bundle" / "manifest.json").read_text()) == manifest
    assert manifest["target"]["torch"] == "2.11.0+cu130"
    assert sum(p["bytes"] for p in manifest["parts"]) == sum(w.stat().st_size for w in wheels)


@pytest.mark.parametrize(
    ("found", "fits"), [("2.11.0+cu130", True), ("2.11.0", True), ("2.11.0+cpu", False), ("2.12.0", False)]
)
def test_another_torch_is_named(monkeypatch: pytest.MonkeyPatch, found: str, fits: bool) -> None:
    """PyPI's wheel of the very same build has no ``+cu130`` in its metadata."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _: found)
    said = load("gpu_assemble").fits(bundle.TARGET)
    assert [line for line in said if line.startswith("torch")] == (
        [] if fits else [f"torch: {found} here, made for 2.11.0+cu130"]
    )


def test_a_part_fits_a_transfer_with_the_repository() -> None:
    """64 MiB, of which 2 are left for the manifest and for what is new in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=SCRIPTS.parent, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [SCRIPTS.parent / name.decode() for name in listed.stdout.split(b"\0") if name]
    tracked = sum(f.stat().st_size for f in files if f.is_file())
    assert tracked + bundle.PART_BYTES <= 62 << 20, f"tracked files have {tracked >> 20} MiB"


ATTENTION_64 = (
    "kv_cache_dtype_q_f16_dtype_kv_f16_dtype_o_f16_dtype_idx_i32_head_dim_qk_64_head_dim_vo_64_posenc_0_"
    "use_swa_False_use_logits_cap_False"
)
"""In the names of what servers were seen to compile for the embedded pair."""


def test_kernels_that_servers_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from adaserve.bench.gpu_check.flashinfer_kernels import specs

    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    names = [spec.name for spec in specs(hopper=True)]
    assert len(names) == len(set(names))
    assert {
        f"batch_prefill_with_{ATTENTION_64}_f16qk_False_kv_stride_equal",  # trees
        f"batch_prefill_with_{ATTENTION_64}_f16qk_False_sm90",  # SGLang's prefills
        f"batch_decode_with_{ATTENTION_64}",
        "cascade",
        "norm",
        "quantization",  # masks of SGLang's own speculation
    } <= set(names)
    assert not any(spec.name.endswith("sm90") for spec in specs(hopper=False))


def test_what_kernels_are_compiled_from_is_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    import flashinfer

    from adaserve.bench.gpu_check.flashinfer_kernels import specs

    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    packages = Path(flashinfer.__file__).resolve().parents[1]
    sources = [source for spec in specs(hopper=True) for source in spec.sources]
    files = [str(s.relative_to(packages)) for s in sources if s.is_relative_to(packages)]
    assert "flashinfer/data/csrc/norm.cu" in files
    patterns = bundle.SLIM["flashinfer_python"]
    assert bundle.unmatched(patterns, files) == list(patterns)


CODE = b"code" * 1000


def test_compiled_kernels_lie_where_flashinfer_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import flashinfer
    from flashinfer.jit import env as jit_env

    def compiled(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        out = Path(command[-1])
        (out / "norm").mkdir()
        (out / "norm" / "norm.so").write_bytes(CODE)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(bundle.subprocess, "run", compiled)
    bundle.kernels_wheel(tmp_path)
    monkeypatch.undo()
    assert (tmp_path / bundle.KERNELS_WHEEL).stat().st_size < len(CODE) / 2, "parts are small"
    bundle.split([tmp_path / bundle.KERNELS_WHEEL], tmp_path / "bundle")
    assert assemble(tmp_path / "bundle", tmp_path / "site").returncode == 0
    looked_for = jit_env.get_aot_path("norm").relative_to(Path(flashinfer.__file__).resolve().parents[1])
    assert (tmp_path / "site" / looked_for).read_bytes() == CODE


ALREADY_THERE = {"certifi", "charset-normalizer", "click", "idna", "jinja2", "markupsafe", "psutil",
                 "requests", "setuptools", "typing-extensions", "urllib3"}  # fmt: skip
"""What PyTorch and transformers bring along, and psutil."""


def test_the_load_generator_is_complete() -> None:
    """Everything that importing locust imports is carried over, or there."""
    code = (
        "import sys, locust.main, gevent, geventhttpclient, importlib.metadata as metadata;"
        "known = metadata.packages_distributions();"
        "print(*{d.lower() for n in list(sys.modules) for d in known.get(n.partition('.')[0], [])})"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    used = {re.sub(r"[._]", "-", d) for d in ran.stdout.split() if not d.startswith("nvidia")}
    listed = bundle.requirements(SCRIPTS / "gpu_bundle.txt", SCRIPTS.parent / "constraints.txt")
    carried = {w.partition("==")[0] for w in listed}
    assert "locust" in used and "flask" in used
    assert used - carried - ALREADY_THERE == set()


def test_patterns_match_what_is_installed() -> None:
    """A list of files to leave out that matches nothing leaves nothing out."""
    from importlib.metadata import distribution

    for name in ("sglang", "flashinfer_python"):
        files = [str(f) for f in distribution(name).files or ()]
        assert bundle.unmatched(bundle.SLIM[name], files) == []
