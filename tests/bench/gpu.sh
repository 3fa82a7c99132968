#!/usr/bin/env bash
# The CUDA engine on this GPU, without network: first that it is right, then how fast it is.
#   tests/bench/gpu.sh [options of gpu.py]        needs the extra `gpu` (flash-attn)
#   tests/bench/gpu.sh --device cpu [options]     rehearses the script on a tiny model
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD"
python="${PYTHON:-python}"
tests=(tests/gpu)
if [ "${1:-}" = --device ]; then
  case "${2:-}" in
    cpu)
      export POINTSMAN_GPU_TESTS=cpu
      tests=(tests/gpu/test_hand_over.py)
      shift 2
      set -- --shape tiny --batches 1,2,5 --prompts 64,300 --context 40 --rounds 1 "$@"
      ;;
    cuda) shift 2 ;;
    *) echo "--device is cpu or cuda" >&2; exit 2 ;;
  esac
fi
"$python" -m pytest -q -m gpu -p no:cacheprovider "${tests[@]}" >&2
exec "$python" tests/bench/gpu.py "$@"
