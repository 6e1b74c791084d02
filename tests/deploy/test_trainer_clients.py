"""Requests of trainers' own clients against a real `moeyard serve` with the demo model.

Each class below sends what a framework sends to its rollout server, and reads what the framework reads. Sources, of
2026-08 and earlier: slime `sglang_rollout.py`, `sglang_engine.py`, `server_control.py`, `external.py`; AReaL
`sglang_remote.py`, `vllm_remote.py`; prime-rl `utils/client.py`, with `renderers` 0.1.12; SkyRL
`remote_inference_client.py`; verl `http_server_engine.py`. docs/rollouts.md has the table.
"""

import base64
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.deploy.test_serve import DEMO, Command
from tests.limits import HANG_SECONDS

KEY = "of-a-trainer"
PROMPT = [97, 11, 42, 7, 101, 5, 230, 18, 64, 9]
# The demo model has these sizes.
NUM_LAYERS, TOP_K, FIRST_DENSE = 6, 4, 1
# aiohttp sends this for a POST without a body.
NO_BODY = {"content-type": "application/octet-stream"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    folder = tmp_path_factory.mktemp("trainers")
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n")
    flags = ("--workers", "2", "--port", "0", "--enable-return-routed-experts", "--kv-memory", "32MiB")
    command = Command(folder, "serve", DEMO, *flags, "--control-listen", "api", "--control-key-file", str(keys))
    try:
        command.wait_ready()
        yield command
    finally:
        command.close()


@pytest.fixture(scope="module")
def http(served: Command) -> Iterator[httpx.Client]:
    """A client with the key. Frameworks that send none need a proxy that adds it (docs/rollouts.md)."""
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=served.url, headers=headers, timeout=HANG_SECONDS) as client:
        yield client


def read(answer: httpx.Response) -> Any:
    answer.raise_for_status()
    return json.loads(answer.content)


def wait_until(condition: Callable[[], bool]) -> None:
    """Ask again, as all these frameworks do. A fleet is not ready before its first step with new weights."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Slime:
    """SGLang's API, to an engine that was started before (`--rollout-external-engine-addrs`)."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def discover(self) -> dict[str, int]:
        info = read(self._http.get("/server_info"))
        assert not info.get("encoder_only")
        assert info.get("disaggregation_mode") not in ("prefill", "decode")
        names = ("pp_size", "tp_size", "ep_size", "num_gpus")
        return {name: int(info[name]) for name in names} | {"dp_size": info["dp_size"]}

    def sampling(self, **changes: Any) -> dict[str, Any]:
        params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 12, "stop": None}
        params |= {"stop_token_ids": None, "skip_special_tokens": False, "no_stop_trim": True}
        return {**params, "spaces_between_special_tokens": False, "sampling_seed": 42, **changes}

    def generate(self, prompt: list[int], *, stream: bool = False, **changes: Any) -> dict[str, Any]:
        payload: dict[str, Any] = {"sampling_params": self.sampling(**changes), "return_logprob": True}
        payload |= {"return_routed_experts": True, "input_ids": prompt}
        headers = {"X-SMG-Routing-Key": "session"}
        if not stream:
            output = read(self._http.post("/generate", json=payload, headers=headers))
        else:
            with self._http.stream("POST", "/generate", json={**payload, "stream": True}, headers=headers) as answer:
                answer.raise_for_status()
                lines = [line[5:].strip() for line in answer.iter_lines() if line.startswith("data:")]
            output = json.loads(next(line for line in reversed(lines) if line and line != "[DONE]"))
        meta = output["meta_info"]
        ids = [item[1] for item in meta["output_token_logprobs"]]
        experts, start = None, int(meta.get("routed_experts_start_len", 0) or 0)
        if "routed_experts" in meta:
            experts = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
            experts = experts.reshape(len(prompt) + len(ids) - 1 - start, NUM_LAYERS, TOP_K)
        return {
            "ids": ids,
            "logprobs": [item[0] for item in meta["output_token_logprobs"]],
            "text": output["text"],
            "experts": experts,
            "status": {"length": "truncated", "abort": "aborted", "stop": "completed"}[meta["finish_reason"]["type"]],
            "version": meta.get("weight_version"),
            "cached": meta.get("cached_tokens", 0),
            "prompt": meta.get("prompt_tokens", 0),
        }

    def post(self, path: str, **payload: Any) -> dict[str, Any]:
        return dict(read(self._http.post(path, json=payload)))

    def flush_cache(self) -> int:
        return self._http.get("/flush_cache").status_code

    def num_requests(self) -> int:
        loads = read(self._http.get("/v1/loads?include=core"))["loads"]
        return sum(load["num_total_reqs"] for load in loads)

    def abort_until_idle(self) -> None:
        while True:
            self.post("/abort_request", abort_all=True)
            if self.num_requests() <= 0:
                return


class Areal:
    """SGLang's and vLLM's requests for generation, SGLang's for the rest."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self.common = {"top_p": 1.0, "top_k": 100000000, "temperature": 1.0, "stop_token_ids": []}
        self.common |= {"ignore_eos": True, "skip_special_tokens": True}

    def healthy(self) -> bool:
        return self._http.request("GET", "/health", json={}).status_code == 200

    def by_sglang(self, prompt: list[int], count: int) -> tuple[list[int], list[float], str, np.ndarray[Any, Any]]:
        params = {**self.common, "max_new_tokens": count, "frequency_penalty": 0.0}
        payload = {"input_ids": prompt, "image_data": [], "sampling_params": params, "return_logprob": True}
        payload |= {"stream": False, "return_routed_experts": True}
        meta = read(self._http.post("/generate", json=payload))["meta_info"]
        rows = meta["prompt_tokens"] + meta["completion_tokens"] - 1
        experts = np.frombuffer(base64.b64decode(meta["routed_experts"].encode()), dtype=np.int32).reshape(rows, -1)
        entries = meta["output_token_logprobs"]
        return [x[1] for x in entries], [x[0] for x in entries], meta["finish_reason"]["type"], experts

    def by_vllm(self, prompt: list[int], count: int) -> tuple[list[int], list[float], str]:
        payload = {**self.common, "max_tokens": count, "return_tokens_as_token_ids": True, "logprobs": 0}
        payload |= {"use_beam_search": False, "stream": False, "prompt": prompt}
        choice = read(self._http.post("/v1/completions", json=payload))["choices"][0]
        ids = [int(token.split(":")[1]) for token in choice["logprobs"]["tokens"]]
        return ids, choice["logprobs"]["token_logprobs"], choice["finish_reason"]


class PrimeRl:
    """vLLM's API of token ids, and its own `weight_dir`."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def wait_for_ready(self) -> str:
        wait_until(lambda: self._http.get("/health").status_code == 200)
        return str(read(self._http.get("/v1/models"))["data"][0]["id"])

    def generate(self, model: str, prompt: list[int], **changes: Any) -> tuple[list[int], list[float], str]:
        params = {"top_k": -1, "min_p": 0.0, "return_token_ids": True, "cache_salt": "3", "temperature": 1.0}
        params |= {"top_p": 1.0, "logprobs": 1, "max_tokens": 8, "stop_token_ids": [2], "skip_special_tokens": False}
        body = {"model": model, "token_ids": prompt, "sampling_params": {**params, **changes}}
        answer = self._http.post("/inference/v1/generate", json=body, headers={"X-Session-ID": "s"})
        choice = read(answer)["choices"][0]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert len(logprobs) == len(choice["token_ids"])
        assert -9999.0 not in logprobs
        return choice["token_ids"], logprobs, choice["finish_reason"]

    def score(self, model: str, ids: list[int], **more: Any) -> list[float]:
        params = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1, **more}
        body = {"model": model, "token_ids": ids, "sampling_params": params}
        entries = read(self._http.post("/inference/v1/generate", json=body))["prompt_logprobs"]
        return [float(next(iter(entry.values()))["logprob"]) if entry else 0.0 for entry in entries]

    def update_weights(self, directory: Path) -> None:
        self._http.post("/pause", params={"mode": "keep", "clear_cache": "false"}).raise_for_status()
        try:
            self._http.post("/update_weights", json={"weight_dir": directory.as_posix()}).raise_for_status()
        finally:
            self._http.post("/resume").raise_for_status()


class SkyRl:
    """vLLM's API, by aiohttp."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def generate(self, model: str, prompt: list[int], **changes: Any) -> tuple[list[int], list[float], str]:
        params = {"min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True, "max_tokens": 8}
        params |= {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1, "stop": None}
        params |= {"repetition_penalty": 1.0, "additional_kwargs": None}
        payload = {"sampling_params": {**params, **changes}, "model": model, "token_ids": prompt, "cache_salt": "7"}
        headers = {"Content-Type": "application/json", "X-Session-ID": "trajectory"}
        choice = read(self._http.post("/inference/v1/generate", json=payload, headers=headers))["choices"][0]
        return choice["token_ids"], [e["logprob"] for e in choice["logprobs"]["content"]], choice["finish_reason"]

    def samples(self, model: str, prompt: list[int], number: int) -> list[list[int]]:
        params = {"n": number, "logprobs": 0, "output_kind": 2, "prompt_logprobs": 0, "max_tokens": 4, "seed": 1}
        payload = {"sampling_params": params, "model": model, "token_ids": prompt}
        body = read(self._http.post("/inference/v1/generate", json=payload))
        assert len(body["prompt_logprobs"]) == len(prompt)
        return [choice["token_ids"] for choice in body["choices"]]

    def detokenize(self, model: str, ids: list[int]) -> str:
        return str(read(self._http.post("/detokenize", json={"model": model, "tokens": ids})).get("prompt", ""))

    def world_size(self) -> int:
        return int(read(self._http.request("GET", "/get_world_size", json={}))["world_size"])

    def control(self, path: str, **params: Any) -> Any:
        """A POST without a body."""
        return read(self._http.post(path, params=params, headers=NO_BODY))

    def reset_prefix_cache(self) -> Any:
        return read(self._http.post("/reset_prefix_cache", json={"reset_running_requests": False}))


class Verl:
    """SGLang's API, by its HTTP server adapter."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def wait_until_ready(self) -> None:
        headers = {"Content-Type": "application/json; charset=utf-8"}
        for path in ("/health_generate", "/flush_cache"):
            wait_until(lambda path=path: self._http.get(path, headers=headers).status_code == 200)  # type: ignore[misc]

    def generate(self, **given: Any) -> dict[str, Any]:
        names = ("text", "sampling_params", "input_ids", "image_data", "return_logprob", "logprob_start_len")
        names = (*names, "top_logprobs_num", "token_ids_logprob", "lora_path", "custom_logit_processor")
        assert given.keys() <= {*names}
        return dict(read(self._http.post("/generate", json=given)))

    def abort(self, rid: str = "", *, abort_all: bool = False) -> int:
        return self._http.post("/abort_request", json={"rid": rid, "abort_all": abort_all}).status_code


def test_slime(http: httpx.Client) -> None:
    slime = Slime(http)
    assert slime.discover() == {"pp_size": 1, "tp_size": 2, "ep_size": 2, "num_gpus": 2, "dp_size": 2}
    assert slime.flush_cache() == 200
    whole = slime.generate(PROMPT)
    assert (len(whole["ids"]), whole["status"], whole["version"]) == (12, "truncated", "default")
    assert (whole["cached"], whole["prompt"]) == (0, len(PROMPT))
    assert not whole["experts"][:, :FIRST_DENSE].any(), "layers without experts"
    assert whole["experts"][:, FIRST_DENSE:].any()
    assert np.array_equal(slime.generate(PROMPT)["experts"], whole["experts"])
    streamed = slime.generate(PROMPT, stream=True)
    for name in ("ids", "logprobs", "text", "status"):
        assert streamed[name] == whole[name], name
    # A partial roll-out goes on behind its tokens.
    rest = slime.generate(PROMPT + whole["ids"][:5], max_new_tokens=7)
    assert len(rest["ids"]) == 7


def test_slime_aborts_and_flushes(http: httpx.Client) -> None:
    slime = Slime(http)
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(slime.generate, [*PROMPT, i], max_new_tokens=900, ignore_eos=True) for i in range(3)]
        while slime.num_requests() < 3:
            assert not any(each.done() for each in running)
        assert slime.flush_cache() == 409, "requests run"
        slime.abort_until_idle()
        found = [each.result() for each in running]
    assert [each["status"] for each in found] == ["aborted"] * 3
    assert all(len(each["ids"]) == len(each["logprobs"]) < 900 for each in found)
    assert slime.flush_cache() == 200
    assert slime.generate(PROMPT)["cached"] == 0


def test_slime_aborts_what_has_not_begun(http: httpx.Client) -> None:
    """A queued request ends as an abort without output, not as an error that a client would retry."""
    slime = Slime(http)
    slime.post("/pause_generation")
    with ThreadPoolExecutor(1) as pool:
        queued = pool.submit(slime.generate, PROMPT)
        wait_until(lambda: slime.num_requests() == 1)
        slime.abort_until_idle()
        found = queued.result()
    slime.post("/continue_generation")
    assert (found["status"], found["ids"], found["experts"]) == ("aborted", [], None)
    assert slime.generate(PROMPT)["status"] == "truncated"


def test_slime_updates(http: httpx.Client) -> None:
    slime = Slime(http)
    before = slime.generate(PROMPT)
    checksums = slime.post("/weights_checker", action="checksum")["checksums"]
    slime.post("/pause_generation")
    assert slime.flush_cache() == 200
    assert slime.post("/update_weights_from_disk", model_path=DEMO, weight_version="1")["success"]
    slime.post("/continue_generation")
    assert read(http.get("/get_weight_version"))["weight_version"] == "1"
    after = slime.generate(PROMPT)
    assert (after["version"], after["ids"]) == ("1", before["ids"])
    assert slime.post("/weights_checker", action="compare")["match"]
    assert checksums


def test_areal(http: httpx.Client) -> None:
    areal = Areal(http)
    wait_until(areal.healthy)
    ids, logprobs, reason, experts = areal.by_sglang(PROMPT, 6)
    assert (len(ids), len(logprobs), reason) == (6, 6, "length")
    assert experts.shape == (len(PROMPT) + 5, NUM_LAYERS * TOP_K)
    ids, logprobs, reason = areal.by_vllm(PROMPT, 6)
    assert (len(ids), len(logprobs), reason) == (6, 6, "length")
    read(http.post("/pause_generation", json={}))
    body = {"model_path": DEMO, "abort_all_requests": True}
    assert read(http.post("/update_weights_from_disk", json=body))["success"]
    read(http.post("/continue_generation", json={}))


def test_prime_rl(http: httpx.Client) -> None:
    prime = PrimeRl(http)
    model = prime.wait_for_ready()
    ids, logprobs, reason = prime.generate(model, PROMPT, seed=3)
    assert reason in ("stop", "length")
    assert prime.generate(model, PROMPT, seed=3) == (ids, logprobs, reason)
    turn = prime.generate(model, PROMPT + ids + [9, 8], routed_experts_prompt_start=len(PROMPT + ids) - 1)
    assert turn[0]
    scores = prime.score(model, PROMPT + ids)
    assert (scores[0], len(scores)) == (0.0, len(PROMPT + ids))
    # The formula of prompts has other bits than sampling. One field more gives sampling's.
    as_decoded = prime.score(model, PROMPT + ids, score="as_decoded", output_start=len(PROMPT))
    assert as_decoded[len(PROMPT) :] == logprobs
    prime.update_weights(Path(DEMO))
    assert prime.generate(model, PROMPT, seed=3) == (ids, logprobs, reason)
    answer = http.post("/update_weights", json={"weight_dir": None})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "weight_dir")


def test_skyrl(http: httpx.Client) -> None:
    sky = SkyRl(http)
    assert sky.world_size() == 2
    model = str(read(http.get("/v1/models"))["data"][0]["id"])
    ids, logprobs, reason = sky.generate(model, PROMPT, seed=3)
    assert len(ids) == len(logprobs)
    assert sky.detokenize(model, ids)
    assert len(sky.samples(model, PROMPT, 3)) == 3
    assert sky.control("/pause", mode="keep", clear_cache="false") == {"status": "paused"}
    assert sky.control("/resume") == {"status": "resumed"}
    assert sky.reset_prefix_cache()
    assert sky.generate(model, PROMPT, seed=3) == (ids, logprobs, reason)


def test_verl(http: httpx.Client) -> None:
    verl = Verl(http)
    verl.wait_until_ready()
    params = {"max_new_tokens": 5, "temperature": 1.0, "sampling_seed": 2}
    scored = verl.generate(input_ids=PROMPT, sampling_params=params, return_logprob=True, logprob_start_len=0)
    assert len(scored["meta_info"]["input_token_logprobs"]) == len(PROMPT)
    assert scored["output_ids"] == [each[1] for each in scored["meta_info"]["output_token_logprobs"]]
    assert verl.generate(text="Call me", sampling_params=params)["text"]
    assert verl.abort(abort_all=True) == 200
    assert verl.abort("nobody") == 200
    assert verl.abort() == 400


def test_requests_end_by_name(http: httpx.Client) -> None:
    """SGLang's `rid`, vLLM's `request_id`, and the header of any request."""
    long = {"max_tokens": 900, "ignore_eos": True}
    requests: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        ("/generate", {"input_ids": PROMPT, "rid": "a", "sampling_params": {"max_new_tokens": 900}}, {}),
        ("/inference/v1/generate", {"token_ids": PROMPT, "request_id": "b", "sampling_params": long}, {}),
        ("/v1/completions", {"prompt": PROMPT, **long}, {"x-request-id": "c"}),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True}, {"x-request-id": "d"}),
    ]
    requests[0][1]["sampling_params"]["ignore_eos"] = True
    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(http.post, path, json=body, headers=headers) for path, body, headers in requests]
        while Slime(http).num_requests() < 4:
            assert not sent[0].done()
        read(http.post("/abort_request", json={"rid": "a"}))
        read(http.post("/abort_requests", json={"request_ids": ["b", "c"]}))
        ended = [read(each.result()) for each in sent]
    assert ended[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert [each["choices"][0]["finish_reason"] for each in ended[1:]] == ["abort", "abort", "length"]


def rss(served: Command) -> int:
    return sum(worker.memory_info().rss for worker in served.workers())


def test_sleep_and_wake(http: httpx.Client, served: Command) -> None:
    """By slime, verl and AReaL (SGLang), and by SkyRL and AReaL (vLLM). Answers are those of before, and memory too."""
    slime, sky = Slime(http), SkyRl(http)
    model = str(read(http.get("/v1/models"))["data"][0]["id"])
    # Every page is written to once, so that its memory counts.
    fill = [[100 + i, *([7] * 900)] for i in range(12)]
    read(http.post("/v1/completions", json={"prompt": fill, "max_tokens": 1}))
    before, memory = slime.generate(PROMPT), rss(served)

    def sleeps(level: int) -> None:
        assert read(http.get("/is_sleeping")) == {"is_sleeping": level > 0}
        ready = http.get("/readyz")
        assert (ready.status_code == 503) == (level > 0)
        if level:
            assert f"the server sleeps at level {level}" in ready.json()["reason"]
        state = ("awake", "weights_offloaded", "discard_all")[level]
        assert f'sleep_state="{state}"}} 1.0' in http.get("/metrics").text

    def check(level: int, said: dict[str, Any]) -> None:
        sleeps(level)
        freed = memory - rss(served)
        print(f"{said['message']}; {freed >> 20} of {memory >> 20} MiB are given back")
        assert freed > 10 << 20

    # slime, with its flush before. Memory comes back in stages.
    assert slime.flush_cache() == 200
    check(2, slime.post("/release_memory_occupation"))
    assert "kv_cache" in slime.post("/resume_memory_occupation", tags=["weights"])["message"]
    slime.post("/pause_generation")
    assert slime.flush_cache() == 200
    assert slime.post("/update_weights_from_disk", model_path=DEMO, weight_version="asleep")["success"]
    slime.post("/continue_generation")
    sleeps(2)
    slime.post("/resume_memory_occupation", tags=["kv_cache", "cuda_graph"])
    wait_until(lambda: http.get("/readyz").status_code == 200)
    sleeps(0)
    after = slime.generate(PROMPT)
    assert (after["ids"], after["logprobs"], after["version"]) == (before["ids"], before["logprobs"], "asleep")
    assert np.array_equal(after["experts"], before["experts"])
    # verl releases by tags, AReaL without any.
    check(1, slime.post("/release_memory_occupation", tags=["kv_cache"]))
    slime.post("/resume_memory_occupation", tags=None)
    # SkyRL pauses before, and requests that were kept go on behind.
    body = {"prompt": PROMPT, "max_tokens": 150, "ignore_eos": True, "seed": 4, "return_token_ids": True}
    wanted = read(http.post("/v1/completions", json=body))["choices"][0]["token_ids"]
    with ThreadPoolExecutor(2) as pool:
        kept = pool.submit(http.post, "/v1/completions", json=body)
        while not slime.num_requests():
            assert not kept.done()
        assert http.post("/sleep", params={"level": "1"}, headers=NO_BODY).status_code == 409, "requests run"
        sky.control("/pause", mode="keep", clear_cache="false")
        check(2, sky.control("/sleep", level="2", tags=["weights"]))
        queued = pool.submit(http.post, "/v1/completions", json=body)
        sky.control("/wake_up", tags=["weights"])
        sky.control("/wake_up", tags=["kv_cache"])
        assert read(http.get("/is_paused")) == {"is_paused": True}
        sky.control("/resume")
        assert [read(each.result())["choices"][0]["token_ids"] for each in (kept, queued)] == [wanted, wanted]
        # A kept request whose pause ends while the server sleeps goes on once there is memory.
        kept = pool.submit(http.post, "/v1/completions", json=body)
        wait_until(lambda: slime.num_requests() == 1)
        sky.control("/pause", mode="keep", clear_cache="false")
        sky.control("/sleep", level="1", tags=["weights"])
        sky.control("/resume")
        assert not kept.done()
        sky.control("/wake_up", tags=["weights", "kv_cache"])
        assert read(kept.result())["choices"][0]["token_ids"] == wanted
    # AReaL's requests for vLLM.
    read(http.post("/sleep", json={}))
    sleeps(1)
    read(http.post("/wake_up?tags=weights&tags=kv_cache", json={}))
    read(http.post("/wake_up", json={}))
    wait_until(lambda: http.get("/readyz").status_code == 200)
    assert sky.generate(model, PROMPT, seed=3)[0]
    refused = http.post("/sleep?level=3")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "level")


@pytest.mark.slow
def test_rank_lost_while_the_server_sleeps(http: httpx.Client, served: Command) -> None:
    """Its next process falls asleep, too."""
    slime = Slime(http)
    before = slime.generate(PROMPT)
    slime.post("/release_memory_occupation", tags=["kv_cache"])
    lost = served.ranks()[1]
    lost.kill()
    wait_until(lambda: len(served.ranks()) == 2 and served.ranks().get(1) not in (None, lost))
    wait_until(lambda: "sleeps at level 1" in http.get("/readyz").text)
    wait_until(lambda: http.post("/wake_up").status_code == 200)
    assert read(http.get("/is_sleeping")) == {"is_sleeping": False}
    after = slime.generate(PROMPT)
    for name in ("ids", "logprobs", "text"):
        assert after[name] == before[name]


def test_control_needs_its_key(http: httpx.Client, served: Command) -> None:
    paths = ("/flush_cache", "/abort_request", "/abort_requests", "/reset_prefix_cache", "/weights_checker", "/sleep")
    for path in (*paths, "/wake_up", "/release_memory_occupation", "/resume_memory_occupation"):
        assert httpx.post(f"{served.url}{path}", json={}).status_code == 401
    assert httpx.get(f"{served.url}/flush_cache").status_code == 401
