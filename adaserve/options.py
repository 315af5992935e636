"""Options that several commands share, and the server that they describe."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from adaserve.commands import fail, given, panel

about_drafts, about_costs, about_overload = map(
    panel, ("Drafts", "Speculation and its costs", "Overload and routers")
)
about_learning, about_recording, about_weights = map(panel, ("Learning", "Recording", "Weights"))
"""Options of a group. Those that most people need stand in none of them."""

Model = Annotated[
    str | None,
    typer.Option(
        "--model-path",
        "--model",
        help="Target model: a folder or a Hugging Face name.",
        show_default="the embedded target",
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft-model-path",
        help="Draft model with the target's vocabulary, or heads for the target.",
        show_default="the embedded draft; none with --model-path",
    ),
]
Drafts = Annotated[
    str | None,
    about_drafts(
        "What proposes tokens: model, self, suffix, model,suffix or self,suffix. self: the target "
        "itself, reading a --draft-window. suffix: what followed earlier in the same text; nearly free, for "
        "any model.",
        show_default="model; suffix where --model-path has no --draft-model-path",
    ),
]
Window = Annotated[
    str,
    about_drafts(
        "Recent tokens of the context that a draft reads: a number, 0 for the whole context, or auto: "
        "the policy priced chooses for each request."
    ),
]
DraftKind = Annotated[
    str,
    about_drafts(
        "model, eagle3 (an EAGLE-3 head), mtp (an MTP layer, usually in the target's checkpoint), "
        "medusa (Medusa heads), or auto: by the draft's config.json. Without --model-path it chooses among "
        "the embedded drafts, and auto is the model."
    ),
]
SecondDraft = Annotated[
    str | None,
    about_drafts("Another draft model, whose candidates join the same tree.", show_default="none"),
]
Size = Annotated[
    str,
    about_weights("Parameters that the embedded target is widened to, such as 100M or 1.5B."),
]
PolicyName = Annotated[
    str,
    typer.Option("--policy", help="Scheduling policy: priced, adaserve, turbospec, chain-4, none, ..."),
]
Budget = Annotated[
    int | None,
    about_costs(
        "Most tokens per verification, all requests together.", min=1, show_default="by measured costs"
    ),
]
Weights = Annotated[
    str,
    about_weights("How a CPU host stores weights: auto, fp32, fp16 or bf16; off: SGLang computes, slower."),
]
DraftWeights = Annotated[
    str,
    about_weights(
        "How a CPU host stores the draft's weights: auto, fp32, fp16, bf16 or int8. auto is int8 where "
        "the processor multiplies 8-bit numbers fast, else as --cpu-weights."
    ),
]


def settings(context: typer.Context) -> dict[str, Any]:
    """A server's settings by name: those of the command's options that were given, and of ``ADASERVE_CONFIG``
    those that were not. Raises ConfigError."""
    from adaserve.config import AdaServeConfig

    of_environment = AdaServeConfig.load()
    asked = given(context)
    chosen = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in context.params.items()
        if name in AdaServeConfig.model_fields and name in asked
    }
    return of_environment.model_dump(include=of_environment.model_fields_set) | chosen


def server_spec(
    model: str | None,
    draft: str | None,
    size: str,
    extra: tuple[str, ...] = (),
    host: str = "127.0.0.1",
    port: int = 30000,
    drafts: str | None = None,
    **settings: Any,
) -> Any:
    """The ServerSpec of these options. Raises UserError."""
    from adaserve.config import AdaServeConfig
    from adaserve.server import ServerSpec

    is_part = settings.get("draft_kind") == "mtp" and "model" in (drafts or "model").split(",")
    if is_part and draft is None:
        draft = model  # an MTP layer stands in the target's checkpoint
    if drafts is None:
        drafts = "suffix" if model is not None and draft is None else "model"
    config = AdaServeConfig(drafts=drafts, **settings)
    return ServerSpec(model, draft, size, host, port, config, extra)


class TakesConfig(TyperCommand):
    """A command that accepts SGLang's flags, its ``--config FILE`` included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {option for parameter in self.params for option in parameter.opts}
        return super().parse_args(ctx, [_own_name(word, options) for word in with_config(args)])


def _own_name(word: str, options: Collection[str]) -> str:
    """``--adaserve-NAME`` as the command's own option ``--NAME``, where it has one.

    SGLang applies the former when it starts, so a file's would win over the command line's.
    """
    if not word.startswith("--adaserve-"):
        return word
    own = "--" + word.removeprefix("--adaserve-")
    return own if own.partition("=")[0] in options else word


def with_config(words: Sequence[str]) -> list[str]:
    """The words of a command line, preceded by those in the file of its ``--config``. SGLang does the same:
    if a flag is given twice, the last one counts. But the flags that `adaserve serve` adds to its command
    line would then win over the file.
    """
    apart = [w for word in words for w in (word.split("=", 1) if word.startswith("--config=") else [word])]
    if "--config" not in apart:
        return apart
    import yaml
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    from adaserve.config import AdaServeConfig
    from adaserve.patches.start.flags import add_flags

    # Where our plugin is loaded, SGLang has added our flags already.
    parser = argparse.ArgumentParser(conflict_handler="resolve")
    ServerArgs.add_cli_args(parser)
    add_flags(None, parser)
    for name, setting in AdaServeConfig.model_fields.items():
        if setting.annotation is bool:  # a switch of `adaserve serve`: nothing follows it
            parser.add_argument(f"--{name}", action="store_true")
    try:
        merged: list[str] = ConfigArgumentMerger(parser).merge_config_with_args(apart)
    except (ValueError, yaml.YAMLError) as error:
        fail(f"--config: {' '.join(str(error).split())}")
    return merged
