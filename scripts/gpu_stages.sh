#!/usr/bin/env bash
# The first half hour on a GPU host, one stage at a time, from the repository's root:
#
#   scripts/gpu_stages.sh STAGE [--device cpu]
#
#   assemble    unpack the bundle's parts (gpu-bundle/) into site/, with this working tree's code  1 min
#   facts       what the host has                                                                  1 min
#   kernels     compile the attention kernels and compare them; make the large pair meanwhile      2-8 min
#   smoke       the small pair: AdaServe's greedy text against SGLang's                             3 min
#   plain       the large pair on SGLang without speculation: reference outputs, TPOT              3 min
#   adaserve    exactness, TPOT, cost of verification, share outside of the models                 5 min
#   standalone  SGLang's own speculation with topk 1 and 2                                         5 min
#   profile     torch profiles at batch 1 and 32                                                   2 min
#   mixed       one mixed load: priced against STANDALONE                                          4 min
#
# Every stage saves below .local/gpu-stages/ (and in $OUT, where that is set), says what came out and what to
# do next, and can be run again: what is done is not repeated. Minutes are guesses until a GPU has run it.
# Settings: PAIR=small for the small pair throughout, ATTENTION=triton to leave FlashInfer out,
# SIZES="--batches 1,8 ..." for other sizes (the same in all stages), PYTHON for the interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."

stage=${1:-help}
device=cuda
[ "${2:-}" = --device ] && device=${3:?--device needs cuda or cpu}
work=$PWD/.local/gpu-stages
mkdir -p "$work"
# What an earlier stage found out (ATTENTION, PAIR, CUDA_HOME) holds unless the environment says otherwise.
given_attention=${ATTENTION:-} given_pair=${PAIR:-} given_home=${CUDA_HOME:-}
[ -f "$work/settings" ] && . "$work/settings"
ATTENTION=${given_attention:-${ATTENTION:-auto}} PAIR=${given_pair:-${PAIR:-large}}
CUDA_HOME=${given_home:-${CUDA_HOME:-}}
PYTHON=${PYTHON:-python}

# Without PYTHONSAFEPATH the folder adaserve/ here would be found before the installed package.
export PYTHONSAFEPATH=1 HF_HUB_OFFLINE=1
if [ "$device" = cuda ]; then
  export PYTHONPATH=$PWD/site${PYTHONPATH:+:$PYTHONPATH}
  export SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1 FLASHINFER_CUDA_ARCH_LIST=${FLASHINFER_CUDA_ARCH_LIST:-9.0a}
  # SGLang's compiled radix tree was made for torch 2.14, and misreads the tensors of 2.11.
  export SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python
  # Where SGLang and FlashInfer find what they compile kernels with: see facts.
  if [ -n "$CUDA_HOME" ]; then export CUDA_HOME; else unset CUDA_HOME; fi
  export XDG_CACHE_HOME=${XDG_CACHE_HOME:-$PWD/.local/cache}
else
  PAIR=small
fi
sizes=${SIZES:---rounds 2 --mixed-seconds 20} # of one check: its stages must agree on them

say() { printf '\n== %s\n' "$*"; }
keep() { # what the stages wrote, without models, to where it is fetched from
  if [ -n "${OUT:-}" ]; then cp -r "$work/." "$OUT/"; fi
}
trap keep EXIT

gpu_check() { # gpu_check FOLDER SIZE STAGE...
  local folder=$1 size=$2 words=()
  shift 2
  for only in "$@"; do words+=(--only "$only"); done
  local flags="--adaserve-attention $ATTENTION"
  if [ "$device" = cuda ]; then
    local backend=flashinfer
    [ "$ATTENTION" = triton ] && backend=triton
    flags="--attention-backend $backend --sampling-backend pytorch --page-size 1 --chunked-prefill-size 2048"
    flags+=" --disable-prefill-cuda-graph --max-total-tokens 300000 --adaserve-attention $ATTENTION"
  fi
  # shellcheck disable=SC2086
  "$PYTHON" -m adaserve.cli gpu-check --device "$device" --size "$size" --flags "$flags" \
    --out "$work/$folder" --stage-limit "${LIMIT:-420}" "${words[@]}" $sizes
}

done_or_stop() { # done_or_stop STATUS: 3 is a missed target, which the next stages may explain
  case $1 in 0 | 3) return 0 ;; esac
  say "$stage is not done: the lines above say why, and the logs below $work. Mend that and run it again;" \
      "if it must wait, help lists the other stages"
  return 2
}

assemble() {
  if [ "$device" = cpu ]; then
    say "nothing to assemble for --device cpu: $PYTHON serves as it is. Next: facts"
    return
  fi
  "$PYTHON" gpu-bundle/assemble.py --to site || return 2
  # The working tree may be newer than the bundle's wheel of it.
  cp -r adaserve/. site/adaserve/
  for package in scheduler patches loadgen; do cp -r "$package/." "site/adaserve/$package/"; done
  "$PYTHON" -c "import sgl_kernel, flashinfer, sglang, adaserve.scheduler; print('imports work')" || {
    say "a package does not import: the lines above name it. Nothing else will run before that is mended"
    return 2
  }
  say "next: facts"
}

facts() {
  "$PYTHON" -m adaserve.bench.gpu_check.facts --toolkit "$PWD/.local/cuda" \
    >"$work/facts.json" 2>"$work/facts.log" || {
    cat "$work/facts.log"
    return 2
  }
  sed -n 's/^ *"home": "\(.*\)",$/CUDA_HOME="\1"/p' "$work/facts.json" >>"$work/settings"
  cat "$work/facts.json"
  grep '^note: ' "$work/facts.log"
  say "next: kernels (with what the notes say)"
}

kernels() {
  local making=
  if [ "$PAIR" = large ]; then
    "$PYTHON" -m adaserve.bench.gpu_check.shapes >"$work/widening.log" 2>&1 &
    making=$!
  fi
  "$PYTHON" -m adaserve.bench.gpu_check.kernels --device "$device" --out "$work/kernels.json" \
    2>"$work/kernels.log"
  local right=$?
  if [ -n "$making" ] && ! wait "$making"; then
    tail -3 "$work/widening.log"
    echo "PAIR=small" >>"$work/settings"
    say "the large pair could not be made, so the stages go on with the small one"
  fi
  case $right in
    0) say "the kernels agree with their references. Next: smoke" ;;
    3) echo "ATTENTION=triton" >>"$work/settings"
       say "FlashInfer failed (kernels.json says why) and Triton is right: all stages use Triton now. Next: smoke" ;;
    *) say "attention, noise or moves has no kernel that is right (kernels.json): stay with this stage. Run one:" \
           "python -m adaserve.bench.gpu_check.kernels --kernel triton --device $device"
       return 2 ;;
  esac
}

smoke() {
  gpu_check smoke small sglang:exactness adaserve:exactness
  local found=$?
  done_or_stop $found || return 2
  if [ $found = 0 ]; then
    say "the small pair is exact. Next: plain"
  else
    say "the small pair is not exact: spend the time here, not on speed." \
        "Try ATTENTION=triton scripts/gpu_stages.sh smoke (after rm -r .local/gpu-stages/smoke), then --disable-cuda-graph"
    return 2
  fi
}

plain() {
  gpu_check check "$PAIR" sglang:exactness sglang:speed
  done_or_stop $? || return 2
  say "next: adaserve. If this server ran out of memory: PAIR=small from here on"
}

adaserve() {
  gpu_check check "$PAIR" adaserve:exactness adaserve:speed adaserve:verification
  done_or_stop $? || return 2
  say "outputs that differ (not ties): back to kernels. Outside of the models above 8%: profile first." \
      "Otherwise: standalone"
}

standalone() {
  local kinds=(sglang-own-topk1 sglang-own-topk2) words=()
  for kind in "${kinds[@]}"; do words+=("$kind:speed" "$kind:exactness"); done
  gpu_check check "$PAIR" "${words[@]}"
  done_or_stop $? || return 2
  say "slower than STANDALONE at some batch: profile at that batch. Next: profile"
}

profile() {
  gpu_check check "$PAIR" adaserve:profile
  done_or_stop $? || return 2
  say "busy_share below 0.9: the device waits for the host; the trace shows where. Next: mixed"
}

mixed() {
  gpu_check check "$PAIR" adaserve:mixed-priced sglang-own-topk1:mixed
  done_or_stop $? || return 2
  say "all stages have run; the report is $work/check/gpu-check.json"
}

case $stage in
  assemble | facts | kernels | smoke | plain | adaserve | standalone | profile | mixed) "$stage" ;;
  *) sed -n '2,/^set /{s/^# \{0,1\}//;/^set /d;p;}' "$0"; [ "$stage" = help ] ;;
esac
