"""Unknown flags, alternative spellings, and help in two lengths."""

import argparse
import re
from pathlib import Path

import pytest

from moeyard.cli.commands import EVERYDAY, build_parser, main
from moeyard.cli.other_servers import INSTEAD


def command(name: str) -> argparse.ArgumentParser:
    """Return the parser of one command."""
    (subparsers,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    parser: argparse.ArgumentParser = subparsers.choices[name]
    return parser


def flags(parser: argparse.ArgumentParser) -> set[str]:
    """Return all flags in a help text."""
    return {f for action in parser._actions if action.help != argparse.SUPPRESS for f in action.option_strings}


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the line with which the command line refuses these words."""
    with pytest.raises(SystemExit, match="2"):
        main(list(words))
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--prot 8000", r"--prot; did you mean .*--port\?"),
        ("--por 8000", r"--por; did you mean --port\?"),  # was once an abbreviation
        ("--max-model 8", r"did you mean --max-model-len\?"),
        ("--max_model_length=8", r"did you mean --max-model-len\?"),
        ("--bogus", r"unrecognized arguments: --bogus; see `moeyard serve --help`$"),
        ("--tensor-parallel-size 2", r"did you mean --workers N\?"),
        ("--tensor_parallel_size 2", r"did you mean --workers N\?"),
        ("-tp 2", r"did you mean --workers N\?"),
        ("--enable-expert-parallel", r"did you mean --workers N\?"),
        ("--gpu-memory-utilization=0.9", r"did you mean --kv-memory SIZE or --expert-memory SIZE\?"),
        ("--max-num-batched-tokens 1", r"did you mean --max-batch-tokens N\?"),
        ("--context-length 1", r"did you mean --max-model-len N\?"),
        ("--mem-fraction-static 0.8", r"did you mean --kv-memory"),
        ("--disable-radix-cache", r"did you mean --no-prefix-caching\?"),
        ("--trust-remote-code", r"no code of a checkpoint is ever run"),
        ("--torchao-config int4wo", r"config.json says how weights are quantised"),
        ("--model-path x", r"MODEL needs no flag"),
        ("--tp 2 --dp 2", r"--tp --dp 2; did you mean --workers N\?; see"),  # the advice appears once
    ],
)
def test_foreign_and_misspelt_flags(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "serve", *words.split())
    assert line.startswith("moeyard: unrecognized arguments: ")
    assert re.search(says, line), line


def test_quantization_of_a_checkpoint_needs_no_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM and SGLang name the method of a checkpoint by this flag."""
    line = refused(capsys, "serve", str(tmp_path), "--quantization", "fp8")
    assert re.search(r"--quantization fp8 is for the random weights of a --shape; config.json says how", line), line


def test_advice_names_existing_flags() -> None:
    known = flags(command("serve"))
    for name, advice in INSTEAD.items():
        assert f"--{name}" not in known, f"--{name} is a flag of ours"
        for flag in re.findall(r"--[a-z-]+", advice):
            assert flag in known, f"{name}: {advice}"


@pytest.mark.parametrize("name", ["serve", "demo", "doctor", "verify", "chat", "scale"])
def test_no_command_accepts_abbreviations(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = command(name)
    flag = max(flags(parser), key=len)
    positional = {"scale": ["2"], "verify": ["x"]}.get(name, [])
    assert f"unrecognized arguments: {flag[:-1]}" in refused(capsys, name, *positional, f"{flag[:-1]}=1")


def test_underscores_are_dashes_only_in_names() -> None:
    args = build_parser().parse_args(
        ["serve", "--max_model_len", "7", "--expert_slots=3", "--no_prefix_caching", "--served_model_name=my_model"]
    )
    assert (args.max_model_len, args.expert_slots, args.no_prefix_caching) == (7, 3, True)
    assert args.served_model_name == ["my_model"]


@pytest.mark.parametrize(("name", "num_everyday"), [("serve", 10), ("doctor", 9), ("demo", 9)])
def test_help_explains_everyday_flags_and_names_the_others(
    name: str, num_everyday: int, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = command(name)
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    brief = capsys.readouterr().out
    explained, _, others = brief.partition("more flags, which")
    for action in parser._actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            flag = action.option_strings[0]
            everyday = flag in EVERYDAY or flag in ("-h", "--help-all")
            assert bool(re.search(rf"^  {flag}[ ,\n]", explained, re.M)) == everyday, flag
            assert bool(re.search(rf"(?<=\s){flag}(?=\s)", others)) != everyday, flag
    assert sum(flag in flags(parser) for flag in EVERYDAY) == num_everyday
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help-all"])
    whole = capsys.readouterr().out
    assert all(re.search(rf"^  (\S+, )?{flag}[ ,\n]|, {flag}[ ,\n]", whole, re.M) for flag in flags(parser))
    titles = [group.title for group in parser._action_groups[2:]]
    assert len(titles) >= 8
    assert all(f"\n{title}:\n" in whole for title in titles)


def test_three_examples_are_commands(capsys: pytest.CaptureFixture[str]) -> None:
    text = command("serve").format_help()
    examples = re.findall(r"^  (moeyard serve .*?)   ", text, re.M)
    assert len(examples) == 3
    for example in examples:
        build_parser().parse_args(example.split()[1:])


def test_key_of_a_file_gets_the_same_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("help-all: true\n")
    assert "'help-all' is no flag of this command" in refused(capsys, "serve", "--config", str(file))
    for key, says in (("tensor-parallel-size", "did you mean --workers N?"), ("max_model_length", "--max-model-len?")):
        file.write_text(f"{key}: 2\n")
        line = refused(capsys, "serve", "--config", str(file))
        assert f"'{key}' is no flag of this command; " in line
        assert says in line
