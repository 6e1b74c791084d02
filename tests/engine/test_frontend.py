"""A step's replies to routers fit in few frames."""

from moeyard_worker.engine.loop.frontend import in_frames
from moeyard_worker.protocol import Done, PromptLogprobs, TokenBatch, TokenLogprob, Tokens
from moeyard_worker.scheduling.request import Reply


def tokens(name: str) -> Tokens:
    return Tokens(request_id=name, start=0, token_ids=(1,))


def done(name: str) -> Done:
    return Done(request_id=name, finish_reason="stop", prompt_tokens=1, cached_tokens=0, completion_tokens=1)


def test_one_token_frame_per_router_then_the_ends_in_order() -> None:
    replies = [
        Reply(b"x", tokens("a")),
        Reply(b"x", done("a")),
        Reply(b"y", tokens("b")),
        Reply(b"x", tokens("c")),
        Reply(b"y", done("b")),
    ]
    assert list(in_frames(replies)) == [
        (b"x", TokenBatch(rows=(tokens("a"), tokens("c")))),
        (b"y", TokenBatch(rows=(tokens("b"),))),
        (b"x", done("a")),
        (b"y", done("b")),
    ]
    assert list(in_frames([])) == []


def test_prompt_logprobs_come_before_the_first_token() -> None:
    scores = [
        PromptLogprobs(request_id="a", start=start, logprobs=(TokenLogprob(logprob=-1.0, rank=1),)) for start in (1, 2)
    ]
    replies = [Reply(b"x", scores[0]), Reply(b"x", scores[1]), Reply(b"x", tokens("a")), Reply(b"x", done("a"))]
    assert [message for _, message in in_frames(replies)] == [*scores, TokenBatch(rows=(tokens("a"),)), done("a")]
