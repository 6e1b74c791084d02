"""The formats of tool calls of the supported families, by vLLM's names of their parsers."""

import re
from dataclasses import dataclass
from types import MappingProxyType

from moeyard_router.text.json_value import ARGUMENTS
from moeyard_router.text.parameters import ParameterMarkup
from moeyard_router.text.reasoning import END_THINK, REASONING_FORMATS, THINK, ReasoningFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family writes calls: [section_begin] (call_begin head arguments closing call_end)+ [section_end].

    head: matches the text between `call_begin` and the arguments, with a group `name` and perhaps `id`. It ends before
        the first character of the arguments, or before the marker after a call without arguments. It never looks
        further and matches in one way only.
    inner: the markers in `head`.
    section_variants: other spellings of the section's two markers, which models sometimes write.
    between, closing: characters without meaning around calls, and after arguments.
    whole: whether a call is a JSON object of `name` and `arguments`. It is read as one piece if its keys have another
        order than in `head`.
    parameters: markup of arguments that are written one by one. Arguments that are one JSON object are read too.
    id_length: number of letters and digits of ids, if the family's templates accept no other length.
    written: a call in the family's templates in three parts: before the function's name, from there to the arguments
        ({index} is the call's number), and after them. `opening`: before the first call. `joint`: between two calls.
    unthought: the beginning of a call that models of the family also make without ending their reasoning.
    """

    name: str
    call_begin: str
    call_end: str
    head: re.Pattern[str]
    written: tuple[str, str, str]
    opening: str = ""
    joint: str = ""
    unthought: str = ""
    inner: tuple[str, ...] = ()
    section_begin: str = ""
    section_end: str = ""
    section_variants: tuple[tuple[str, str], ...] = ()
    between: str = " \t\r\n"
    closing: str = " \t\r\n"
    whole: bool = False
    id_length: int | None = None
    parameters: ParameterMarkup | None = None

    @property
    def section_begins(self) -> tuple[str, ...]:
        """All spellings of the marker before all calls. Empty for a family without sections."""
        return (self.section_begin, *(begin for begin, _ in self.section_variants)) if self.section_begin else ()

    @property
    def section_ends(self) -> tuple[str, ...]:
        return (self.section_end, *(end for _, end in self.section_variants)) if self.section_end else ()

    @property
    def openers(self) -> tuple[str, ...]:
        """Markers that end content: the section's, and a call's own if it is longer than a character."""
        return (*self.section_begins, *((self.call_begin,) if len(self.call_begin) > 1 else ()))

    @property
    def markers(self) -> tuple[str, ...]:
        """All strings that must be visible in the text, even if they are special tokens."""
        given = (*self.section_begins, self.call_begin, *self.inner, self.call_end, *self.section_ends)
        return tuple(dict.fromkeys(m for m in given if len(m) > 1))


_DEEPSEEK_END = "<｜tool▁call▁end｜>|<｜tool▁calls▁end｜>"
_DEEPSEEK_HEAD = re.compile(
    # V3 and R1 write "function", the separator, the name and a fence. V3.1 writes the name and the separator.
    r"\s*(?:function<｜tool▁sep｜>(?=[^\s{]))?(?P<name>[^\s<>`{]{1,256})\s*"
    rf'(?:(?:<｜tool▁sep｜>\s*)?```(?:json)?\s*(?=[{{"]|(?:```\s*)?(?:{_DEEPSEEK_END}))'
    rf'|<｜tool▁sep｜>\s*(?=[{{"]|{_DEEPSEEK_END})|(?={_DEEPSEEK_END}))'
)
_KIMI_END = r"<\|tool_call_end\|>|<\|tool_calls?_section_end\|>"


def _deepseek(name: str, written: tuple[str, str, str], joint: str) -> ToolFormat:
    """Return a format that reads both forms. `written` and `joint` are the grammar of required calls."""
    return ToolFormat(
        name=name,
        section_begin="<｜tool▁calls▁begin｜>",
        call_begin="<｜tool▁call▁begin｜>",
        call_end="<｜tool▁call▁end｜>",
        section_end="<｜tool▁calls▁end｜>",
        inner=("<｜tool▁sep｜>",),
        head=_DEEPSEEK_HEAD,
        closing=" \t\r\n`",
        written=written,
        joint=joint,
    )


_DSML = "｜DSML｜"  # a token of its own in the vocabularies of DeepSeek-V3.2 and V4
_DSML_PARAMETER = rf'<{_DSML}parameter name="[^"<>\n]{{1,256}}"[^<>]{{0,128}}>'


def _dsml(name: str, section: str) -> ToolFormat:
    """Return the format of encoding_dsv32.py and encoding_dsv4.py, whose names of the `section` differ.

    string="true" is before a plain text, "false" before JSON. Calls without arguments may end with "/>".
    """
    return ToolFormat(
        name=name,
        section_begin=f"<{_DSML}{section}>",
        call_begin=f'<{_DSML}invoke name="',
        call_end=f"</{_DSML}invoke>",
        section_end=f"</{_DSML}{section}>",
        inner=(_DSML,),
        head=re.compile(
            rf'(?P<name>[^"<>\n]{{1,256}})"'
            rf"(?:>\s*(?={_DSML_PARAMETER}|</{_DSML}invoke>|</{_DSML}{section}>|\{{)"
            rf'|[ ]?/>\s*(?=<{_DSML}invoke name="|</{_DSML}{section}>))'
        ),
        parameters=ParameterMarkup(
            begin=f'<{_DSML}parameter name="',
            head=re.compile(r'(?P<name>[^"<>\n]{1,256})"(?:[^<>]*? string="(?P<string>true|false)")?[^<>]{0,128}>'),
            end=f"</{_DSML}parameter>",
            cut=f"</{_DSML}invoke>",
            written=('" string="true">', '" string="false">'),
            behind="\n",
        ),
        written=(f'<{_DSML}invoke name="', '">\n', f"</{_DSML}invoke>\n"),
        opening="\n",
    )


_MEMBERS = rf'\s*"name"\s*:\s*"(?P<name>[^"\\\n]{{1,256}})"\s*,\s*"(?:{"|".join(ARGUMENTS)})"\s*:\s*(?=[{{"])'

_FORMATS = (
    # Hermes 2 and later, Qwen2.5 and Qwen3: {"name": ..., "arguments": ...} between tags.
    ToolFormat(
        name="hermes",
        call_begin="<tool_call>",
        call_end="</tool_call>",
        head=re.compile(rf"\s*\{{{_MEMBERS}"),
        closing=" \t\r\n}",
        whole=True,
        written=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
        joint="\n",
    ),
    _deepseek(
        "deepseek_v3", ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"), "\n"
    ),
    _deepseek("deepseek_v31", ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"), ""),
    # The model also writes the id, and its template expects it back: functions.NAME:N. N counts over a conversation.
    ToolFormat(
        name="kimi_k2",
        section_begin="<|tool_calls_section_begin|>",
        call_begin="<|tool_call_begin|>",
        call_end="<|tool_call_end|>",
        section_end="<|tool_calls_section_end|>",
        section_variants=(("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),),
        inner=("<|tool_call_argument_begin|>",),
        head=re.compile(
            r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<>:{]{1,256}):\d{1,6})\s*"
            rf'(?:<\|tool_call_argument_begin\|>\s*(?=[{{"]|{_KIMI_END})|(?={_KIMI_END}))'
        ),
        written=("<|tool_call_begin|>functions.", ":{index}<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    # Mistral and Mixtral until their tokenizers' version 11: one array of objects.
    ToolFormat(
        name="mistral",
        section_begin="[TOOL_CALLS]",
        call_begin="{",
        call_end="}",
        section_end="]",
        between=" \t\r\n[,",
        head=re.compile(_MEMBERS),
        whole=True,
        id_length=9,
        written=('{"name": "', '", "arguments": ', "}"),
        opening=" [",
        joint=", ",
    ),
    # Qwen3-Coder and similar models: <tool_call> around each call, in which <function= marks the call. Models sometimes
    # omit <tool_call>. Templates write each name and each value on separate lines.
    ToolFormat(
        name="qwen3_coder",
        section_begin="<tool_call>",
        call_begin="<function=",
        call_end="</function>",
        section_end="</tool_call>",
        head=re.compile(r"(?P<name>[^\s<>{]{1,256})>\s*(?=<parameter=[^<>\n]{1,256}>|</function>|</tool_call>|\{)"),
        parameters=ParameterMarkup(
            begin="<parameter=",
            head=re.compile(r"(?P<name>[^<>\n]{1,256})>"),
            end="</parameter>",
            cut="</function>\n</tool_call>",
            written=(">\n", ">\n"),
            behind="\n",
            pad="\n",
        ),
        written=("<function=", ">\n", "</function>\n"),
        opening="\n",
        joint="</tool_call>\n<tool_call>\n",
        # Qwen3.5 does this (vLLM's issue 35687).
        unthought="<tool_call>\n<function=",
    ),
    _dsml("deepseek_v32", "function_calls"),
    _dsml("deepseek_v4", "tool_calls"),
)
TOOL_FORMATS = MappingProxyType({f.name: f for f in _FORMATS})
# vLLM's grammar of required calls, for models without a format, or whose prompt does not show the tools. The list comes
# first in the output, so its bracket can be the marker.
JSON_CALLS = ToolFormat(
    name="json",
    section_begin="[",
    call_begin="{",
    call_end="}",
    section_end="]",
    between=" \t\r\n,",
    head=re.compile(r'\s*"name"\s*:\s*"(?P<name>[^"\\\n]{1,256})"\s*,\s*"parameters"\s*:\s*(?=\{)'),
    written=('{"name": "', '", "parameters": ', "}"),
    joint=", ",
)


def tool_format_of(template: str) -> ToolFormat | None:
    """Return the format of calls in a chat template, by its markers. None if it shows no known format."""
    if _DSML in template:
        return TOOL_FORMATS["deepseek_v32" if "function_calls" in template else "deepseek_v4"]
    if "<｜tool▁calls▁begin｜>" in template:
        return TOOL_FORMATS["deepseek_v3" if "```json" in template else "deepseek_v31"]
    if "<|tool_calls_section_begin|>" in template:
        return TOOL_FORMATS["kimi_k2"]
    if "<tool_call>" in template:
        return TOOL_FORMATS["qwen3_coder" if "<function=" in template and "<parameter=" in template else "hermes"]
    return TOOL_FORMATS["mistral"] if "[TOOL_CALLS]" in template else None


def reasoning_format_of(template: str) -> ReasoningFormat | None:
    """Return the format of a model's reasoning, by the markers in its chat template. None if it has none."""
    if THINK not in template and END_THINK not in template:
        return None
    calls = tool_format_of(template)
    if calls is not None and calls.name in ("kimi_k2", "deepseek_v4"):
        return REASONING_FORMATS[calls.name]
    return REASONING_FORMATS["deepseek_v3" if "<｜Assistant｜>" in template else "qwen3"]
