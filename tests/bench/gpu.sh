#!/usr/bin/env bash
# The CUDA engine on this GPU, without network: first that it is right, then how fast it is.
#   tests/bench/gpu.sh [options of gpu.py]        needs the extra `gpu` (flash-attn)
#   tests/bench/gpu.sh --device cpu [options]     rehearses the script on a tiny model
# The last line is JSON whatever failed; the exit status is 0 only if nothing did.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2
export PYTHONPATH="$PWD" HF_HUB_OFFLINE=1
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
checks=$?
"$python" tests/bench/gpu.py --checks "$checks" "$@"
status=$?
case "$status" in
  0) exit 0 ;;
  3) ;; # its JSON names what failed
  *) echo "{\"errors\": {\"checks\": \"pytest ended with $checks\", \"gpu.py\": \"ended with $status\"}}" ;;
esac
exit 1
