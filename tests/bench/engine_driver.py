"""One engine in a process of its own: reads loads from stdin, a JSON line each, answers with times.

`python engine_driver.py ENGINE MODEL THREADS`, ours as `ours:DTYPE`. Runs in the engine's own
environment, so it imports nothing of ours unless the engine is ours.

A load is {"prompts": [[id, ...], ...], "num_tokens": n, "concurrency": c}; the answer
{"seconds": s, "tokens": [[id, ...], ...], "ttft_ms": mean}. All outputs are greedy and whole: an
end-of-text token does not end them.
"""

# ruff: noqa: PLC0415 - each engine imports what its own environment has

from __future__ import annotations

import json
import sys
import time
from collections import deque
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

Tokens = list[int]


class Driver(Protocol):
    """An engine ready to run."""

    def run(
        self, prompts: list[Tokens], num_tokens: int, concurrency: int
    ) -> tuple[list[Tokens], list[float]]:
        """Outputs in the order of the prompts, and seconds from asking to each first token."""
        ...


class Ours:
    """The engine thread of a worker, without gateway and queue."""

    def __init__(self, model: Path, num_threads: int, dtype: str) -> None:
        import torch

        torch.set_num_threads(num_threads)
        from workers.kv_jobs import NoCache
        from workers.models.load import load_runner
        from workers.settings import EngineSettings
        from workers.step_loop import Engine

        # Blocks of 64 tokens lie in longer runs of memory; prefixes are not shared here.
        runner = load_runner("torch", model, dtype=dtype, block_tokens=64)
        settings = EngineSettings(num_blocks=256, block_tokens=64, prefix_cache=False)
        self._sink = _Sink()
        self._engine = Engine(runner, settings, NoCache(), self._sink, lambda _: None)
        self._engine.start()
        self._engine.ready.wait()

    def run(
        self, prompts: list[Tokens], num_tokens: int, concurrency: int
    ) -> tuple[list[Tokens], list[float]]:
        """See Driver. A new request enters when one ends."""
        from pipeline.protocol.sampling import SamplingParams
        from workers.sequence import Sequence

        sampling = SamplingParams(
            max_tokens=num_tokens, temperature=0.0, ignore_eos=True, uses_cache=False
        )
        sequences = [
            Sequence(str(number), 1, list(prompt), len(prompt), sampling, b"")
            for number, prompt in enumerate(prompts)
        ]
        self._sink.begin(self._engine, sequences, concurrency)
        self._sink.wait()
        outputs = [each.tokens[each.num_prompt_tokens :] for each in sequences]
        return outputs, [self._sink.ttft_s[each.request_id] for each in sequences]


class _Sink:
    """Notes first tokens and submits the next request for each one that ended."""

    def __init__(self) -> None:
        import threading

        self.ttft_s: dict[str, float] = {}
        self._asked_at_s: dict[str, float] = {}
        self._all_done = threading.Event()
        self._waiting: deque[Any] = deque()
        self._num_left = 0
        self._engine: Any = None

    def begin(self, engine: Any, sequences: list[Any], concurrency: int) -> None:
        self._engine = engine
        self.ttft_s = {}
        self._all_done.clear()
        self._num_left = len(sequences)
        self._waiting = deque(sequences[concurrency:])
        for sequence in sequences[:concurrency]:
            self._submit(sequence)

    def _submit(self, sequence: Any) -> None:
        self._asked_at_s[sequence.request_id] = time.perf_counter()
        self._engine.submit(sequence)

    def wait(self) -> None:
        self._all_done.wait()

    def on_admitted(self, sequence: Any) -> None:
        pass

    def on_prefilled(self, sequence: Any) -> None:
        pass

    def on_step(self, outputs: list[Any]) -> None:
        now_s = time.perf_counter()
        for output in outputs:
            number = output.sequence.request_id
            self.ttft_s.setdefault(number, now_s - self._asked_at_s[number])
            if output.ending is None:
                continue
            self._num_left -= 1
            if self._waiting:
                self._submit(self._waiting.popleft())
        if not self._num_left:
            self._all_done.set()


class LlamaCpp:
    """llama.cpp's own batches of many sequences, without its server: all its speed, no HTTP."""

    _MAX_SEQUENCES = 32
    _CONTEXT_TOKENS = 384

    def __init__(self, model: Path, num_threads: int) -> None:
        import llama_cpp

        self._api = llama_cpp
        self._silence = llama_cpp.llama_log_callback(lambda *_: None)  # C keeps the address
        llama_cpp.llama_log_set(self._silence, None)
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(model).encode(), params)
        self._num_threads = num_threads
        self._contexts: dict[int, Any] = {}
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch = llama_cpp.llama_batch_init(2048, 0, 1)

    def _context(self, num_sequences: int) -> Any:
        if num_sequences not in self._contexts:
            params = self._api.llama_context_default_params()
            params.n_ctx = self._CONTEXT_TOKENS * num_sequences
            params.n_seq_max = num_sequences
            params.n_batch = 2048
            params.n_ubatch = 512
            params.n_threads = params.n_threads_batch = self._num_threads
            self._contexts[num_sequences] = self._api.llama_init_from_model(self._model, params)
        return self._contexts[num_sequences]

    def run(
        self, prompts: list[Tokens], num_tokens: int, concurrency: int
    ) -> tuple[list[Tokens], list[float]]:
        """See Driver. Prompts are equally long, so waves waste nothing."""
        outputs: list[Tokens] = []
        ttft_s: list[float] = []
        for at in range(0, len(prompts), concurrency):
            own, firsts = self._wave(prompts[at : at + concurrency], num_tokens, concurrency)
            outputs += own
            ttft_s += firsts
        return outputs, ttft_s

    def _wave(
        self, prompts: list[Tokens], num_tokens: int, concurrency: int
    ) -> tuple[list[Tokens], list[float]]:
        context = self._context(concurrency)
        self._api.llama_memory_clear(self._api.llama_get_memory(context), True)
        outputs: list[Tokens] = [[] for _ in prompts]
        ttft_s = []
        began_s = time.perf_counter()
        for number, prompt in enumerate(prompts):
            rows = [(token, place, number) for place, token in enumerate(prompt)]
            outputs[number] += self._decode(context, rows, [len(rows) - 1])
            ttft_s.append(time.perf_counter() - began_s)
        for step in range(num_tokens - 1):
            rows = [
                (output[-1], len(prompt) + step, number)
                for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
            ]
            for output, token in zip(
                outputs, self._decode(context, rows, list(range(len(rows)))), strict=True
            ):
                output.append(token)
        return outputs, ttft_s

    def _decode(
        self, context: Any, rows: list[tuple[int, int, int]], wanted: list[int]
    ) -> list[int]:
        import numpy as np

        batch = self._batch
        batch.n_tokens = len(rows)
        for at, (token, place, number) in enumerate(rows):
            batch.token[at], batch.pos[at] = token, place
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, number
            batch.logits[at] = 0
        for at in wanted:
            batch.logits[at] = 1
        if self._api.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        shape = (self._vocab_size,)
        return [
            int(np.ctypeslib.as_array(self._api.llama_get_logits_ith(context, at), shape).argmax())
            for at in wanted
        ]


class Transformers:
    """`generate` on static batches: three times its continuous batching on a CPU (engine notes)."""

    def __init__(self, model: Path, num_threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(num_threads)
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16
        ).eval()

    def run(
        self, prompts: list[Tokens], num_tokens: int, concurrency: int
    ) -> tuple[list[Tokens], list[float]]:
        """See Driver."""
        outputs: list[Tokens] = []
        ttft_s: list[float] = []
        for at in range(0, len(prompts), concurrency):
            began_s = time.perf_counter()
            ids = self._torch.tensor(prompts[at : at + concurrency])
            with self._torch.inference_mode():
                whole = self._model.generate(
                    ids,
                    attention_mask=self._torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=num_tokens,
                    min_new_tokens=num_tokens,
                    pad_token_id=0,
                )
            outputs += whole[:, ids.shape[1] :].tolist()
            ttft_s += [time.perf_counter() - began_s] * len(ids)  # it does not say: an upper bound
        return outputs, ttft_s


class OpenVino:
    """OpenVINO GenAI's continuous batching over a GGUF file."""

    def __init__(self, model: Path, num_threads: int) -> None:
        self._api = import_module("openvino_genai")
        scheduler = self._api.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.max_num_batched_tokens = 1024
        scheduler.enable_prefix_caching = False
        self._pipeline = self._api.ContinuousBatchingPipeline(
            str(model), scheduler, "CPU", {"INFERENCE_NUM_THREADS": num_threads}
        )

    def run(
        self, prompts: list[Tokens], num_tokens: int, concurrency: int
    ) -> tuple[list[Tokens], list[float]]:
        """See Driver."""
        import numpy as np

        openvino = import_module("openvino")
        config = self._api.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_tokens
        config.ignore_eos, config.do_sample = True, False
        outputs: list[Tokens] = []
        ttft_s: list[float] = []
        for at in range(0, len(prompts), concurrency):
            began_s = time.perf_counter()
            wave = prompts[at : at + concurrency]
            tensors = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in wave]
            results = self._pipeline.generate(tensors, [config] * len(wave))
            outputs += [list(result.m_generation_ids[0]) for result in results]
            ttft_s += [time.perf_counter() - began_s] * len(wave)  # it does not say: an upper bound
        return outputs, ttft_s


class Vllm:
    """vLLM's CPU build, its engine in this process."""

    def __init__(self, model: Path, num_threads: int) -> None:
        import os

        os.environ.update(
            HF_HUB_OFFLINE="1",
            OMP_NUM_THREADS=str(num_threads),
            VLLM_CPU_KVCACHE_SPACE="2",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
        )
        self._api = import_module("vllm")
        self._engine = self._api.LLM(
            model=str(model),
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=32,
            max_num_batched_tokens=1024,
            enable_prefix_caching=False,
        )

    def run(
        self, prompts: list[Tokens], num_tokens: int, concurrency: int
    ) -> tuple[list[Tokens], list[float]]:
        """See Driver."""
        sampling = self._api.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True
        )
        outputs: list[Tokens] = []
        ttft_s: list[float] = []
        for at in range(0, len(prompts), concurrency):
            began_s = time.perf_counter()
            wave = [{"prompt_token_ids": prompt} for prompt in prompts[at : at + concurrency]]
            results = self._engine.generate(wave, sampling, use_tqdm=False)
            outputs += [list(result.outputs[0].token_ids) for result in results]
            ttft_s += [time.perf_counter() - began_s] * len(wave)  # it does not say: an upper bound
        return outputs, ttft_s


DRIVERS: dict[str, Any] = {
    "ours": Ours,
    "llama.cpp": LlamaCpp,
    "openvino": OpenVino,
    "transformers": Transformers,
    "vllm": Vllm,
}


def main() -> int:
    """Serve loads until stdin ends."""
    engine, model, threads = sys.argv[1:]
    answers = sys.stdout
    sys.stdout = sys.stderr  # libraries talk
    name, _, form = engine.partition(":")
    driver: Driver = DRIVERS[name](Path(model), int(threads), *([form] if form else []))
    for line in sys.stdin:
        load = json.loads(line)
        began_s = time.perf_counter()
        tokens, ttft_s = driver.run(load["prompts"], load["num_tokens"], load["concurrency"])
        seconds = time.perf_counter() - began_s
        ttft_ms = 1e3 * sum(ttft_s) / len(ttft_s)
        answers.write(json.dumps({"seconds": seconds, "tokens": tokens, "ttft_ms": ttft_ms}) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
