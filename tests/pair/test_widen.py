"""Widening changes the cost of a target and nothing else."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from adaserve.checkpoints.draft_kind import draft_kind
from adaserve.config import AdaServeConfig
from adaserve.pair.eagle import EagleHead, HeadShape, load_head, save_head
from adaserve.pair.folders import HEAD, PairError, drafts_of
from adaserve.pair.model import TinyLlama, load_hf, save_hf
from adaserve.pair.packed import pack, read_weights, unpack
from adaserve.pair.shape import TARGET, Shape, hf_config, parse_size, require_family, shape_of
from adaserve.pair.target_outputs import target_outputs
from adaserve.pair.widen import (
    LEFT_S,
    HeadSize,
    Width,
    ensure_embedded_pair,
    widen,
    widen_head,
    widened_shape,
)
from adaserve.server import ServerSpec
from tests.engine.heads import Head

TOKENS = torch.arange(30)[None]
SMALL = Shape(vocab=97, hidden=32, layers=2, mlp=48, heads=4, kv_heads=2)


def make_model(folder: Path, seed: int = 0, shape: Shape = SMALL) -> TinyLlama:
    """A random model in which every block matters (training starts from blocks that do nothing)."""
    torch.manual_seed(seed)
    model = TinyLlama(shape)
    with torch.no_grad():
        for weight in model.parameters():
            mean, spread = (1.0, 0.1) if weight.ndim == 1 else (0.0, 0.2)
            weight.copy_(mean + spread * torch.randn_like(weight))
    save_hf(model, folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return load_hf(folder)


def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return load_hf(folder)(tokens)


@pytest.mark.parametrize(("parameters", "extra_layers"), [(400_000, 0), (400_000, 3), (1, 2)])
def test_outputs_stay_equal(tmp_path: Path, parameters: int, extra_layers: int) -> None:
    make_model(tmp_path / "small")
    shape = widen(tmp_path / "small", tmp_path / "wide", Width(parameters, extra_layers))
    tokens = torch.randint(0, SMALL.vocab, (3, 40), generator=torch.Generator().manual_seed(1))

    expected, actual = logits(tmp_path / "small", tokens), logits(tmp_path / "wide", tokens)

    assert shape.layers == SMALL.layers + extra_layers
    assert shape.mlp > SMALL.mlp or parameters == 1
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-5)
    assert (actual.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize(("times", "vocabulary"), [(4, 0), (4, 300), (8, 300), (16, 300)])
def test_a_wider_stream_says_the_same(tmp_path: Path, times: int, vocabulary: int) -> None:
    """Exact up to float32's rounding when the size grows by a power of four; else norms are rounded."""
    from transformers import LlamaForCausalLM

    make_model(tmp_path / "small")
    width = Width(2_000_000, 1, hidden=times * SMALL.hidden, vocabulary=vocabulary)
    shape = widen(tmp_path / "small", tmp_path / "wide", width)
    tokens = torch.randint(0, SMALL.vocab, (3, 40), generator=torch.Generator().manual_seed(1))
    small, wide = (
        LlamaForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32) for name in ("small", "wide")
    )
    with torch.no_grad():
        expected, actual = small(tokens).logits, wide(tokens).logits

    loose = 2e-2 if times == 8 else 1e-4
    torch.testing.assert_close(actual[..., : SMALL.vocab], expected, rtol=loose, atol=loose)
    if vocabulary:
        assert (actual[..., SMALL.vocab :] < expected.amin() - 20).all()
    assert shape.head_dim == SMALL.head_dim and shape.heads == SMALL.heads * times // 2
    assert shape_of(json.loads((tmp_path / "wide" / "config.json").read_text())) == shape
    assert wide.num_parameters() == shape.parameters


def make_head(folder: Path, target: TinyLlama) -> None:
    torch.manual_seed(3)
    head = EagleHead(target, HeadShape((0, 1, 2), vocab=30, mlp=24, kv_heads=1), torch.arange(5, 35))
    with torch.no_grad():
        for weight in head.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn_like(weight))
    save_head(head, folder)


def drafts(target: Path, head: Path, text: Tensor, after: Tensor) -> list[tuple[Tensor, Tensor]]:
    """States and logits of a head that has read ``text``, then those that it has read ``after`` it, on its
    own states."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tensors = load_file(head / "model.safetensors")
    ids = tensors.pop("d2t") + torch.arange(len(tensors["lm_head.weight"]))
    assert tensors.pop("t2d").nonzero()[:, 0].tolist() == sorted(ids.tolist())
    module = Head(SimpleNamespace(config=LlamaConfig.from_pretrained(head)), ids)
    module.load_state_dict(tensors)
    module.target = [LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)]
    before, tokens, found = module.target_states(text), text, []
    with torch.no_grad():
        for token in after.unbind(1):
            tokens = torch.cat((tokens, token[:, None]), 1)
            states = module(tokens[:, 1:], before)
            before = torch.cat((before, states[:, -1:]), 1)
            found.append((states, module.logits(states)))
    return found


@pytest.mark.parametrize("times", [1, 4, 16])
def test_a_wider_head_drafts_the_same(tmp_path: Path, times: int) -> None:
    make_head(tmp_path / "head", make_model(tmp_path / "small", shape=replace(SMALL, layers=3)))
    stream = {} if times == 1 else {"hidden": times * SMALL.hidden, "vocabulary": 300}
    over = widen(tmp_path / "small", tmp_path / "wide", Width(2_000_000, 1, **stream))
    size = HeadSize(1_500_000, 30 if times == 1 else 80)
    shape = widen_head(tmp_path / "head", tmp_path / "wide", tmp_path / "wide-head", size)
    text, after = torch.randint(0, SMALL.vocab, (2, 3, 20), generator=torch.Generator().manual_seed(1))
    small, wide = (
        drafts(tmp_path / target, tmp_path / head, text, after[:, :3])
        for target, head in (("small", "head"), ("wide", "wide-head"))
    )
    for (states, logits), (wide_states, wide_logits) in zip(small, wide, strict=True):
        torch.testing.assert_close(wide_states[..., : SMALL.hidden], states, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(wide_logits[..., :30], logits, rtol=1e-4, atol=1e-4)
        assert (wide_logits[..., 30:] < logits.amin() - 20).all()
    tensors = load_file(tmp_path / "wide-head" / "model.safetensors")
    floating = [t for t in tensors.values() if t.is_floating_point()]
    assert sum(t.numel() for t in floating) == shape.parameters(over) == pytest.approx(1_500_000, rel=0.2)
    assert all(t.dtype == torch.float16 for t in floating)
    new = tensors["midlayer.self_attn.q_proj.weight"][2 * SMALL.head_dim :].float()
    assert 0.01 < new.std() < 0.04, "real work"


def test_an_odd_wider_head_is_refused(tmp_path: Path) -> None:
    make_head(tmp_path / "head", make_model(tmp_path / "small", shape=replace(SMALL, layers=3)))
    widen(tmp_path / "small", tmp_path / "wide", Width(10**6, 0, 4 * SMALL.hidden, 300))
    for vocabulary in (29, 234):
        with pytest.raises(PairError, match=f"cannot know {vocabulary} tokens.* give 30 to 233"):
            widen_head(tmp_path / "head", tmp_path / "wide", tmp_path / "out", HeadSize(10**6, vocabulary))


def test_an_odd_wider_stream_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "small")
    for width in (Width(10**6, 0, hidden=48), Width(10**6, 0, hidden=64, vocabulary=97)):
        with pytest.raises(PairError, match="give a multiple"):
            widen(tmp_path / "small", tmp_path / "wide", width)
    with pytest.raises(PairError, match="larger hidden size"):
        Width(10**6, 0, vocabulary=300)


def test_new_columns_are_real_work(tmp_path: Path) -> None:
    """A column of zeros might be skipped or compressed by a runtime; only the output weights may be zero."""
    make_model(tmp_path / "small")
    shape = widen(tmp_path / "small", tmp_path / "wide", Width(400_000))
    tensors = load_file(tmp_path / "wide" / "model.safetensors")
    new = slice(SMALL.mlp, shape.mlp)
    for layer in range(SMALL.layers):
        prefix = f"model.layers.{layer}.mlp."
        for name in ("gate_proj", "up_proj"):
            block = tensors[f"{prefix}{name}.weight"][new].float()
            assert torch.isfinite(block).all()
            assert 0.01 < block.std() < 0.04
        assert (tensors[f"{prefix}down_proj.weight"][:, new] == 0).all()
    assert all(t.dtype == torch.float16 for t in tensors.values())


def test_size_is_what_was_asked_for() -> None:
    for wanted in (100_000_000, 150_000_000, 8_000_000_000):
        shape = widened_shape(Shape(), Width(wanted, extra_layers=4))
        assert shape.parameters == pytest.approx(wanted, rel=0.02)
        assert shape.mlp % 256 == 0
    for wanted, layers, hidden in ((8_000_000_000, 28, 4096), (1_500_000_000, 14, 2048)):
        shape = widened_shape(Shape(), Width(wanted, layers, hidden, 128_256))
        assert shape.parameters == pytest.approx(wanted, rel=0.02)
        assert shape.head_dim == 64 and 3 * hidden < shape.mlp < 5 * hidden


def test_written_parameters_match_the_shape(tmp_path: Path) -> None:
    make_model(tmp_path / "small")
    shape = widen(tmp_path / "small", tmp_path / "wide", Width(400_000, 1))
    tensors = load_file(tmp_path / "wide" / "model.safetensors")
    assert sum(t.numel() for t in tensors.values()) == shape.parameters
    assert shape_of(json.loads((tmp_path / "wide" / "config.json").read_text())) == shape


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps 1e-06"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings False"),
        ({"eos_token_id": 2}, "eos_token_id 2"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM"),
        ({"num_key_value_heads": None}, "without num_key_value_heads"),
        ({"rope_theta": None}, "without rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3"}}, "rotary embedding is scaled"),
        ({"rope_scaling": {"type": "linear"}}, "rotary embedding is scaled"),
    ],
)
def test_a_model_of_another_family_is_named(tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    """Its forward would be another one, or it ended in a traceback."""
    config = {name: value for name, value in (hf_config(TARGET) | changed).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PairError, match=why):
        load_hf(tmp_path)


def test_a_llama_that_transformers_has_written_is_of_the_family() -> None:
    config = hf_config(TARGET)
    theta = config.pop("rope_theta")
    config["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"}
    require_family(config)
    assert shape_of(config) == TARGET


def test_shards_hold_every_tensor_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaserve.pair.widen._SHARD_BYTES", 100_000)
    make_model(tmp_path / "small")
    widen(tmp_path / "small", tmp_path / "wide", Width(400_000, 2))
    index = json.loads((tmp_path / "wide" / "model.safetensors.index.json").read_text())
    shards = {file: load_file(tmp_path / "wide" / file) for file in set(index["weight_map"].values())}
    assert len(shards) > 1
    assert {n: f for f, tensors in shards.items() for n in tensors} == index["weight_map"]
    assert not list((tmp_path / "wide").glob("part-*"))
    torch.testing.assert_close(*(logits(tmp_path / n, TOKENS) for n in ("small", "wide")), rtol=0, atol=1e-5)


def test_transformers_reads_it_and_agrees(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model = make_model(tmp_path / "small")
    tokens = torch.randint(0, SMALL.vocab, (2, 30), generator=torch.Generator().manual_seed(2))
    reference = LlamaForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(reference(tokens).logits, model(tokens), rtol=1e-4, atol=1e-4)


def test_packed_weights_lose_less_than_half_a_step(tmp_path: Path) -> None:
    make_model(tmp_path / "plain")
    pack(tmp_path / "plain", tmp_path / "packed")
    before, after = (read_weights(tmp_path / name) for name in ("plain", "packed"))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        step = weight.float().abs().amax(-1, keepdim=True) / 127 if weight.ndim == 2 else torch.zeros(1)
        assert (
            (after[name].float() - weight.float()).abs() <= 0.51 * step + 1e-3 * weight.abs().float()
        ).all()
        assert after[name].dtype == torch.float16
    sizes = [sum(f.stat().st_size for f in (tmp_path / n).glob("*.safetensors")) for n in ("packed", "plain")]
    assert sizes[0] < 0.62 * sizes[1]


def test_unpacked_and_widened_are_the_packed_model(tmp_path: Path) -> None:
    make_model(tmp_path / "plain")
    pack(tmp_path / "plain", tmp_path / "packed")
    unpack(tmp_path / "packed", tmp_path / "unpacked")
    widen(tmp_path / "packed", tmp_path / "wide", Width(400_000))
    expected = logits(tmp_path / "packed", TOKENS)
    assert torch.equal(logits(tmp_path / "unpacked", TOKENS), expected)
    assert not torch.equal(logits(tmp_path / "plain", TOKENS), expected)
    torch.testing.assert_close(logits(tmp_path / "wide", TOKENS), expected, rtol=1e-6, atol=1e-5)
    assert not list((tmp_path / "unpacked").glob("*int8*"))


@pytest.fixture
def own_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for seed, name in enumerate(("target", "draft")):
        make_model(tmp_path / "weights" / name, seed)
    monkeypatch.setenv("ADASERVE_PAIR_WEIGHTS", str(tmp_path / "weights"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "weights"


def test_a_head_reads_the_same_in_the_widened_target(tmp_path: Path) -> None:
    small = make_model(tmp_path / "small")
    widen(tmp_path / "small", tmp_path / "wide", Width(400_000, extra_layers=2))
    wide = load_hf(tmp_path / "wide")
    with torch.no_grad():
        expected, got = (target_outputs(model, TOKENS, (0, 1)).layers for model in (small, wide))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-5)


def test_second_call_finds_the_cache(own_pair: Path) -> None:
    target, draft = ensure_embedded_pair("0.4M")
    written = (target / "model.safetensors").stat().st_mtime_ns
    assert ensure_embedded_pair(400_000) == (target, draft)
    assert (target / "model.safetensors").stat().st_mtime_ns == written
    assert (target / "tokenizer.json").exists()
    assert torch.equal(logits(draft, TOKENS), logits(own_pair / "draft", TOKENS))


def test_the_head_is_served_where_it_is_asked_for(own_pair: Path) -> None:
    spec = ServerSpec(size="0.4M", config=AdaServeConfig(draft_kind="eagle3"))
    with pytest.raises(PairError, match="adaserve pair train-head"):
        spec.models()
    target = load_hf(own_pair / "target")
    shape = HeadShape(layers=(0, 1), vocab=30, mlp=24, kv_heads=target.shape.kv_heads)
    head = EagleHead(target, shape, torch.arange(30))
    save_head(head, own_pair.parent / "head")
    pack(own_pair.parent / "head", own_pair / HEAD)
    _, folder = spec.models()
    assert folder is not None
    architectures = json.loads((Path(folder) / "config.json").read_text())["architectures"]
    assert draft_kind(architectures, "eagle3", folder) == "eagle3"
    assert drafts_of(own_pair) == ["draft", HEAD]
    assert (load_head(Path(folder), target).token_ids == torch.arange(30)).all()


def test_other_weights_or_sizes_get_another_folder(own_pair: Path) -> None:
    first, _ = ensure_embedded_pair("0.4M")
    deeper, _ = ensure_embedded_pair("0.4M", extra_layers=1)
    make_model(own_pair / "target", seed=9)
    retrained, _ = ensure_embedded_pair("0.4M")
    assert len({first, deeper, retrained}) == 3


def test_interrupted_widening_leaves_nothing(own_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("adaserve.pair.widen._name_shards", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ensure_embedded_pair("0.4M")
    cache = own_pair.parent / "cache" / "adaserve" / "pair"
    assert list(cache.iterdir()) == []
    assert (ensure_embedded_pair("0.4M")[0] / "model.safetensors").exists()


@pytest.mark.parametrize(
    "harm", ["weights", "config.json", "header", "tokenizer.json", "chat_template.jinja"]
)
def test_a_damaged_folder_is_made_again(own_pair: Path, harm: str) -> None:
    """A machine that lost its power leaves files that are too short, and every start would fail on them."""
    for folder in ensure_embedded_pair("0.4M"):
        file = folder / (harm if "." in harm else "model.safetensors")
        whole = file.read_bytes()
        file.write_bytes({"weights": whole[:-100], "header": b"\xff" * 9}.get(harm, b""))
        assert ensure_embedded_pair("0.4M")[folder.name.startswith("draft")] == folder
        assert file.read_bytes() == whole
    assert not list(folder.parent.glob(".*"))


@pytest.mark.parametrize("name", ["target", "draft"])
def test_weights_that_cannot_be_read_are_named(own_pair: Path, name: str) -> None:
    """It is not the cache that is at fault, nor the room on its disk."""
    file = own_pair / name / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(PairError, match=f"{name}/model.safetensors cannot be read") as refused:
        ensure_embedded_pair("0.4M")
    assert "space" not in str(refused.value)


def test_what_killed_processes_have_left_goes(own_pair: Path) -> None:
    cache = own_pair.parent / "cache" / "adaserve" / "pair"
    for name, age_s in ((".writing-old", 2 * LEFT_S), (".writing-new", 60.0)):
        (cache / name).mkdir(parents=True)
        (cache / name / "part-0").write_bytes(b"half")
        os.utime(cache / name, times=(time.time() - age_s,) * 2)
    ensure_embedded_pair("0.4M")
    assert [p.name for p in cache.glob(".*")] == [".writing-new"]


def test_lost_race_uses_the_winner(tmp_path: Path) -> None:
    make_model(tmp_path / "small")
    widen(tmp_path / "small", tmp_path / "wide", Width(400_000))
    widen(tmp_path / "small", tmp_path / "wide", Width(400_000))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["small", "wide"]


def test_full_disk_is_refused_with_the_remedy(tmp_path: Path) -> None:
    make_model(tmp_path / "small")
    with pytest.raises(PairError, match="XDG_CACHE_HOME"):
        widen(tmp_path / "small", tmp_path / "wide", Width(10**17))


@pytest.mark.parametrize("error", [SafetensorError("no space left"), OSError(30, "read-only", "/cache")])
def test_so_is_one_that_is_full_or_read_only_when_it_is_written(
    own_pair: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    for writer in ("adaserve.pair.widen.save_file", "adaserve.pair.widen.unpack"):  # the target, the draft
        with (
            monkeypatch.context() as patch,
            pytest.raises(PairError, match=r"cannot be written.*XDG_CACHE_HOME"),
        ):
            patch.setattr(writer, failing)
            ensure_embedded_pair("0.4M")


def test_so_is_a_cache_below_a_folder_of_somebody_else(
    own_pair: Path, forbidden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(forbidden / "cache"))
    with pytest.raises(PairError, match=r"cannot be written.*XDG_CACHE_HOME"):
        ensure_embedded_pair("0.4M")


def test_missing_weights_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADASERVE_PAIR_WEIGHTS", str(tmp_path))
    with pytest.raises(PairError, match="adaserve pair train"):
        ensure_embedded_pair()


@pytest.mark.parametrize(("text", "parameters"), [("100M", 10**8), ("1.5b", 15 * 10**8), (10**5, 10**5)])
def test_sizes(text: int | str, parameters: int) -> None:
    assert parse_size(text) == parameters


@pytest.mark.parametrize(
    "text", ["", "large", "M", "1.5.2B", "nan", "-5M", "infM", "100MB", "1KM", "1.5", "100"]
)
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(PairError):
        parse_size(text)
